"""The ledger of accepted requests that have not ended, with everything needed to run them again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.core.request import Retain, SamplingParams
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.errors import InvariantError
from hiserve.ipc.codec import MalformedError
from hiserve.ipc.lifecycle import ReplayStats
from hiserve.ipc.messages import Admit, Generate
from hiserve.ipc.updates import UNREPORTED, RequestFacts

NO_DRAFTS = DraftUse()


class RequestState(IntEnum):
    """State of a request."""

    QUEUED = 0
    RUNNING = 1
    ABORTING = 2
    ENDED = 3


@dataclass(slots=True, eq=False)
class Entry:
    """One request.

    Attributes:
        prompt: int32 ``[n]``.
        sampling: With a seed, drawn here if the request has none.
        priority: As requested.
        caller: Number of its API key.
        session: Chooses a worker where no prefix does; empty without one.
        retain: Prefixes that the cache evicts last.
        accepted_at_s: Time of acceptance, by a monotonic clock.
        queue_s: Seconds from acceptance to the first worker; -1 before that and when reported.
        generated: Tokens that the client has, in order: sent to it, or resumed.
        replica: The worker that runs it; None while queued.
        num_admissions: Workers that it was sent to.
        num_crashes: Deaths of its workers since it last made progress.
        has_moved: Its present worker reported output of it.
        num_scored: Tokens of its prompt whose scores were sent to the client.
        drafts: All until now, of the worker that runs it; None before its first report.
        former_drafts: Of its dead workers.
        is_cache_reported: The client was sent the number of cached prompt tokens.
    """

    uid: int
    prompt: Int32Array
    sampling: SamplingParams
    namespace: bytes
    choice: int
    priority: int
    caller: int
    accepted_at_s: float
    queue_s: float = UNREPORTED
    state: RequestState = RequestState.QUEUED
    replica: int | None = None
    generated: array[int] = field(default_factory=lambda: array("i"))
    num_admissions: int = 0
    num_crashes: int = 0
    has_moved: bool = False
    num_scored: int = 0
    drafts: DraftUse | None = None
    former_drafts: DraftUse = NO_DRAFTS
    is_cache_reported: bool = False
    session: bytes = b""
    retain: Retain = ()

    @property
    def tokens(self) -> Int32Array:
        """The prompt, then the generated tokens: int32 ``[n + generated]``."""
        return np.concatenate([self.prompt, np.frombuffer(self.generated, dtype=np.int32)])

    @property
    def num_tokens(self) -> int:
        """Length of ``tokens``."""
        return len(self.prompt) + len(self.generated)

    def enter(self, replica: int, now_s: float) -> None:
        """Assigns it to a worker."""
        if not self.num_admissions:
            self.queue_s = now_s - self.accepted_at_s
        self.state, self.replica, self.has_moved = RequestState.RUNNING, replica, False
        self.num_admissions += 1

    def leave(self) -> None:
        """Requeues it after its worker died; output that was not sent to the client is generated again."""
        self.state, self.replica = RequestState.QUEUED, None
        self.num_crashes = 1 if self.has_moved else self.num_crashes + 1
        if self.drafts is not None:
            self.former_drafts, self.drafts = self.former_drafts + self.drafts, None

    def record(self, tokens: list[int], num_score_words: int) -> None:
        """Records output for the client: new tokens, and words of scores, which are of the prompt before all others."""
        self.generated.extend(tokens)
        self.has_moved = True
        num_top = self.sampling.prompt_logprobs
        if num_top is not None and num_score_words:
            num_scores = num_score_words // (1 + 2 * num_top)
            self.num_scored = min(len(self.prompt) - 1, self.num_scored + num_scores)

    def correct(self, facts: RequestFacts) -> None:
        """Corrects what its worker reported for the client: sums of all workers, each reported once."""
        if facts.cached is not None:
            facts.cached = None if self.is_cache_reported else facts.cached.within(len(self.prompt))
            self.is_cache_reported = True
        if facts.drafts is not None:
            self.drafts = facts.drafts
            facts.drafts = self.former_drafts + facts.drafts
        facts.queue_s, self.queue_s = self.queue_s, UNREPORTED

    def to_admit(self) -> tuple[Admit, Int32Array]:
        """Returns the message that continues the request, and its tokens int32 ``[n + generated]``."""
        message = Admit(
            uid=self.uid,
            num_prompt=len(self.prompt),
            sampling=self.sampling,
            namespace=self.namespace,
            choice=self.choice,
            priority=self.priority,
            num_scored=self.num_scored,
            caller=self.caller,
            retain=self.retain,
        )
        return message, self.tokens


class Ledger:
    """The accepted requests; each leaves exactly once, through ``end``.

    Attributes:
        num_accepted: Requests ever accepted; always the ended and the live ones together.
        num_ended: Requests ever ended.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self.num_accepted = 0
        self.num_ended = 0

    def __len__(self) -> int:
        return len(self._entries)

    def accept(self, message: Generate, tokens: Int32Array, now_s: float) -> Entry:
        """Records a request with its tokens, int32 ``[n]``, and draws its seed if it has none.

        Raises:
            MalformedError: A live request has this uid already, or this one has no prompt.
        """
        if message.uid in self._entries:
            raise MalformedError(f"request {message.uid} was sent twice")
        num_prompt = len(tokens) - message.num_resumed
        if not 0 < num_prompt <= len(tokens):
            raise MalformedError(f"request {message.uid} resumes {message.num_resumed} of {len(tokens)} tokens")
        entry = Entry(
            message.uid,
            tokens[:num_prompt],
            message.sampling.seeded(),
            message.namespace,
            message.choice,
            message.priority,
            message.caller,
            accepted_at_s=now_s,
            session=message.session,
            retain=message.retain,
            generated=array("i", tokens[num_prompt:].tolist()),
        )
        self._entries[entry.uid] = entry
        self.num_accepted += 1
        return entry

    def __iter__(self) -> Iterator[Entry]:
        """Iterates over the live requests, oldest first."""
        return iter(self._entries.values())

    def get(self, uid: int) -> Entry | None:
        """Returns a live request, or None."""
        return self._entries.get(uid)

    def running_on(self, replica: int) -> list[Entry]:
        """Returns the requests a worker holds, oldest first."""
        return [entry for entry in self._entries.values() if entry.replica == replica]

    def rows(self, uids: Sequence[int], replica: int) -> list[Entry]:
        """Returns the entries that a worker reports on.

        Raises:
            MalformedError: The worker does not hold one of them.
        """
        entries = []
        for uid in uids:
            entry = self._entries.get(uid)
            if entry is None or entry.replica != replica:
                raise MalformedError(f"worker {replica} reports on request {uid}, which it does not hold")
            entries.append(entry)
        return entries

    def end(self, entry: Entry) -> None:
        """Removes a request whose terminal message is being sent.

        Raises:
            InvariantError: It ended before.
        """
        if self._entries.pop(entry.uid, None) is not entry:
            raise InvariantError(f"request {entry.uid} ended twice ({len(self._entries)} live)")
        entry.state = RequestState.ENDED
        self.num_ended += 1


class ReplayCounter:
    """Counts replays."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_tokens = 0
        self._cached = {"device": 0, "host": 0, "store": 0}

    def begin(self, num_tokens: int) -> None:
        """Counts a request that another worker continues, and its known tokens."""
        self._num_requests += 1
        self._num_tokens += num_tokens

    def found(self, cached: CacheUse) -> None:
        """Counts the cached tokens that this worker reported."""
        for tier in self._cached:
            self._cached[tier] += getattr(cached, tier)

    def stats(self) -> ReplayStats:
        """Returns the counts until now."""
        return ReplayStats(self._num_requests, self._num_tokens, dict(self._cached))
