"""What is owed: every request accepted and not yet ended, with all it takes to run it again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from hiserve.core.plan import WORD_BYTES, Int32Array
from hiserve.core.request import SamplingParams
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.errors import InvariantError
from hiserve.ipc.codec import MalformedError
from hiserve.ipc.lifecycle import ReplayStats
from hiserve.ipc.messages import Admit, Generate
from hiserve.ipc.updates import UNREPORTED, TokenDelta

NO_DRAFTS = DraftUse()


class RequestState(IntEnum):
    """Where a request is."""

    QUEUED = 0
    RUNNING = 1
    ABORTING = 2
    ENDED = 3


@dataclass(slots=True, eq=False)
class Entry:
    """One request.

    Attributes:
        prompt: int32 ``[n]``.
        sampling: With a seed, drawn here when the caller gave none.
        priority: As asked.
        caller: Number of the API key it came with.
        accepted_at_s: When it was accepted, by a monotonic clock.
        queue_s: Seconds until a worker got it first; -1 before that and when reported.
        generated: Tokens the client was sent, in order.
        replica: The worker that runs it; None while queued.
        num_admissions: Workers that got it, one after the other.
        num_crashes: Workers that died with it since it last made progress.
        has_moved: Its present worker told news of it.
        num_scored: Tokens of its prompt whose scores the client was sent.
        drafts: Of the worker that runs it, all until now; None before it told of any.
        former_drafts: Of the workers that died with it.
        is_cache_told: The client knows what of its prompt came from the cache.
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
    is_cache_told: bool = False

    @property
    def tokens(self) -> Int32Array:
        """Its prompt, then what was generated: int32 ``[n + generated]``."""
        return np.concatenate([self.prompt, np.frombuffer(self.generated, dtype=np.int32)])

    @property
    def num_tokens(self) -> int:
        """How many these are."""
        return len(self.prompt) + len(self.generated)

    def enter(self, replica: int, now_s: float) -> None:
        """A worker gets it."""
        if not self.num_admissions:
            self.queue_s = now_s - self.accepted_at_s
        self.state, self.replica, self.has_moved = RequestState.RUNNING, replica, False
        self.num_admissions += 1

    def leave(self) -> None:
        """Its worker died: all it did that the client was not told is done again."""
        self.state, self.replica = RequestState.QUEUED, None
        self.num_crashes = 1 if self.has_moved else self.num_crashes + 1
        if self.drafts is not None:
            self.former_drafts, self.drafts = self.former_drafts + self.drafts, None

    def record(self, delta: TokenDelta) -> None:
        """Records what the client is sent; corrects the facts so that they are of all its workers and reported once."""
        self.generated.extend(delta.tokens)
        self.has_moved = True
        num_top = self.sampling.prompt_logprobs
        if num_top is not None and delta.scores:
            num_scores = len(delta.scores) // WORD_BYTES // (1 + 2 * num_top)
            self.num_scored = min(len(self.prompt) - 1, self.num_scored + num_scores)
        if delta.cached is not None:
            delta.cached = None if self.is_cache_told else delta.cached
            self.is_cache_told = True
        if delta.drafts is not None:
            self.drafts = delta.drafts
            delta.drafts = self.former_drafts + delta.drafts
        delta.queue_s, self.queue_s = self.queue_s, UNREPORTED

    def to_admit(self) -> tuple[Admit, Int32Array]:
        """Returns what a worker needs to run the request from here, and its tokens int32 ``[n + generated]``."""
        message = Admit(
            uid=self.uid,
            num_prompt=len(self.prompt),
            sampling=self.sampling,
            namespace=self.namespace,
            choice=self.choice,
            priority=self.priority,
            num_scored=self.num_scored,
            caller=self.caller,
        )
        return message, self.tokens


class Ledger:
    """Every accepted request leaves it exactly once, through ``end``.

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

    def accept(self, message: Generate, prompt: Int32Array, now_s: float) -> Entry:
        """Records a request and draws its seed.

        Args:
            message: The request.
            prompt: int32 ``[n]``.
            now_s: The monotonic clock.

        Raises:
            MalformedError: A live request has this uid already.
        """
        if message.uid in self._entries:
            raise MalformedError(f"request {message.uid} was sent twice")
        entry = Entry(
            message.uid,
            prompt,
            message.sampling.seeded(),
            message.namespace,
            message.choice,
            message.priority,
            message.caller,
            accepted_at_s=now_s,
        )
        self._entries[entry.uid] = entry
        self.num_accepted += 1
        return entry

    def __iter__(self) -> Iterator[Entry]:
        """Walks the live requests, oldest first."""
        return iter(self._entries.values())

    def get(self, uid: int) -> Entry | None:
        """Returns a live request."""
        return self._entries.get(uid)

    def running_on(self, replica: int) -> list[Entry]:
        """Returns the requests a worker holds, oldest first."""
        return [entry for entry in self._entries.values() if entry.replica == replica]

    def rows(self, uids: Sequence[int], replica: int) -> list[Entry]:
        """Returns the entries a worker reports on.

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
        """Forgets a request for which the terminal message is being sent.

        Raises:
            InvariantError: It ended before.
        """
        if self._entries.pop(entry.uid, None) is not entry:
            raise InvariantError(f"request {entry.uid} ended twice ({len(self._entries)} live)")
        entry.state = RequestState.ENDED
        self.num_ended += 1


class ReplayCounter:
    """Counts replays as they happen."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_tokens = 0
        self._cached = {"device": 0, "host": 0, "store": 0}

    def begin(self, num_tokens: int) -> None:
        """A worker got a request that others had; so many of its tokens are known."""
        self._num_requests += 1
        self._num_tokens += num_tokens

    def found(self, cached: CacheUse) -> None:
        """It told what of them it had."""
        for tier in self._cached:
            self._cached[tier] += getattr(cached, tier)

    def stats(self) -> ReplayStats:
        """Returns the counts until now."""
        return ReplayStats(self._num_requests, self._num_tokens, dict(self._cached))
