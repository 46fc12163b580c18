"""What is sent and what is measured: turns, sessions, workloads and samples."""

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
        prompt: A text, the messages of a chat, or token ids (int32 ``[n]``).
        at_s: Recorded time of sending, seconds from the start of the run; None leaves it to the arrival process.
        think_s: Seconds between the session's previous reply and this request.
        extends: The prompt sent is everything of the session so far, replies included, and then ``prompt``.
            Only for token ids.
    """

    prompt: Prompt
    max_tokens: int
    at_s: float | None = None
    think_s: float = 0.0
    extends: bool = False


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one run sends.

    Attributes:
        sessions: The turns of a session follow one another; sessions are independent.
        notes: What was done to the data, counted: prompts cut, prompts left out.
    """

    name: str
    sessions: list[list[Turn]]
    notes: dict[str, int] = {}

    @property
    def num_turns(self) -> int:
        """Requests in all sessions."""
        return sum(map(len, self.sessions))


class Sample(msgspec.Struct, kw_only=True):
    """One request, as it was measured. Times are seconds of ``time.perf_counter``.

    Attributes:
        turn: Index of the request in its session.
        due_s: When it should have been sent.
        begin_s: When it was sent; later than ``due_s`` when it waited for its place under ``--max-concurrency``.
        end_s: When the last chunk with text or a finish reason arrived; for failures, when they were noticed.
        chunk_s: Arrival of every chunk that carried text.
        chunk_texts: Their texts, thoughts left out.
        chunk_tokens: Output tokens so far at each of these chunks, by the server's running usage; -1 if not told.
        num_prompt: Prompt tokens, by the usage; ours when the server tells none; -1 if nobody knows.
        num_cached: Of these, from the prefix cache; -1 if the server does not tell.
        cached_by_tier: Of these, from each tier (device, host, store); empty if the server does not tell.
        miss: Why the rest did not come from the cache, by the server; empty for no reason, or if it does not tell.
        num_output: Output tokens by the usage; without it, the number of chunks.
        has_usage: The token counts are the server's.
        finish: Finish reason, empty when none came.
        num_ends: Finish reasons and error events that came: 1 for a stream that ended once.
        status: HTTP status, 0 when there was no answer.
        error: Kind of failure (``http 429``, ``connection`` ...); empty for success.
        output_ids: Generated token ids, where they were asked for and told.
    """

    session: int = 0
    turn: int = 0
    due_s: float = 0.0
    begin_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = []
    chunk_texts: list[str] = []
    chunk_tokens: list[int] = []
    num_prompt: int = -1
    num_cached: int = -1
    cached_by_tier: dict[str, int] = {}
    miss: str = ""
    num_output: int = 0
    has_usage: bool = False
    finish: str = ""
    num_ends: int = 0
    status: int = 0
    error: str = ""
    detail: str = ""
    output_ids: list[int] = []

    def fail(self, error: str, detail: str, now: float) -> None:
        """Records a failure; the first one counts."""
        if not self.error:
            self.error, self.detail, self.end_s = error, detail, now


class Run(msgspec.Struct, kw_only=True):
    """All samples of one run.

    Attributes:
        begin_s: Start of the run on the clock of the samples.
        end_s: End of its last request.
        samples: Of requests that were sent, in the order of the workload.
        client_cpu_s: Processor time that this process took meanwhile.
        num_unsent: Requests that were not sent because the run was stopped early.
    """

    begin_s: float
    end_s: float
    samples: list[Sample]
    client_cpu_s: float
    num_unsent: int = 0

    @property
    def is_partial(self) -> bool:
        """Whether the run was stopped early."""
        return self.num_unsent > 0 or any(sample.error == "interrupted" for sample in self.samples)
