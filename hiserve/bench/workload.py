"""Requests and measurements: turns, sessions, workloads and samples."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from hiserve.core.plan import Int32Array

Messages: TypeAlias = list[dict[str, Any]]
Prompt: TypeAlias = str | Messages | Int32Array


def mirrored(prompt: Prompt) -> Prompt:
    """Returns a prompt of the same size without a common prefix, so that warming up caches nothing that counts."""
    if isinstance(prompt, list):
        return [{"role": "user", "content": str(prompt[-1]["content"])[::-1] or "."}]
    return prompt[::-1]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as it is to be sent.

    Attributes:
        at_s: Recorded time of sending, seconds from the start of the run; None leaves it to the arrival process.
        extends: The prompt sent is everything of the session so far, replies included, and then ``prompt``. Only for
            token ids.
    """

    prompt: Prompt  # a text, the messages of a chat, or token ids (int32 ``[n]``)
    max_tokens: int
    at_s: float | None = None
    think_s: float = 0.0  # seconds between the session's previous reply and this request
    extends: bool = False


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one run sends."""

    name: str
    sessions: list[list[Turn]]  # the turns of a session follow one another; sessions are independent
    notes: dict[str, int] = {}  # what was done to the data, counted: prompts cut, prompts left out

    @property
    def num_turns(self) -> int:
        return sum(map(len, self.sessions))


class Sample(msgspec.Struct, kw_only=True):
    """One request, as it was measured. Times are seconds of ``time.perf_counter``.

    Attributes:
        begin_s: When it was sent; later than ``due_s`` when it waited for its place under ``--max-concurrency``.
        chunk_tokens: Output tokens so far at each of these chunks, by the server's running usage; -1 if unknown.
        cached_by_tier: Of these, from each tier (device, host, store); empty if the server does not tell.
        miss: Why the rest did not come from the cache, by the server; empty for no reason, or if it does not tell.
    """

    session: int = 0
    turn: int = 0  # index of the request in its session
    due_s: float = 0.0  # when it should have been sent
    begin_s: float = 0.0
    end_s: float = 0.0  # when the last chunk with text or a finish reason arrived; for failures, when they were noticed
    chunk_s: list[float] = []  # arrival of every chunk that carried text
    chunk_texts: list[str] = []  # their texts, thoughts left out
    chunk_tokens: list[int] = []
    num_prompt: int = -1  # prompt tokens, by the usage; ours when the server tells none; -1 if unknown
    num_cached: int = -1  # of these, from the prefix cache; -1 if the server does not tell
    cached_by_tier: dict[str, int] = {}
    miss: str = ""
    num_output: int = 0  # output tokens by the usage; without it, the number of chunks
    has_usage: bool = False  # the token counts are the server's
    finish: str = ""  # finish reason, empty when none came
    num_ends: int = 0  # finish reasons and error events that came: 1 for a stream that ended once
    status: int = 0  # HTTP status, 0 when there was no answer
    error: str = ""  # kind of failure (``http 429``, ``connection`` ...); empty for success
    detail: str = ""
    output_ids: list[int] = []  # generated token ids, where they were asked for and sent

    def fail(self, error: str, detail: str, now: float) -> None:
        """Records a failure; the first one counts."""
        if not self.error:
            self.error, self.detail, self.end_s = error, detail, now


class Run(msgspec.Struct, kw_only=True):
    """All samples of one run."""

    begin_s: float  # start of the run on the clock of the samples
    end_s: float  # end of its last request
    samples: list[Sample]  # of requests that were sent, in the order of the workload
    client_cpu_s: float  # processor time that this process took meanwhile
    num_unsent: int = 0  # requests that were not sent because the run was stopped early

    @property
    def is_partial(self) -> bool:
        return self.num_unsent > 0 or any(sample.error == "interrupted" for sample in self.samples)
