"""Requests that have no row yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from hiserve.core.digest import pack_tokens
from hiserve.core.plan import WORD_BYTES, Int32Array, RowAdmit
from hiserve.core.request import Retain, SamplingParams
from hiserve.core.usage import COLD
from hiserve.grammar.matcher import Matcher
from hiserve.ipc.updates import RequestFacts


@dataclass(frozen=True, slots=True)
class InFlightPrefix:
    """Another row that computes a prefix of this request."""

    row: int
    generation: int  # of its request; the wait ends when the row has another one
    num_pages: int  # published pages that end the wait


@dataclass(slots=True, eq=False)
class Request:
    """A request of this worker. While it has a row, the row holds its tokens.

    Attributes:
        uid: Its number at the scheduler.
        tokens: int32 ``[n]``. Prompt, then the tokens generated before it came here or lost its row.
        num_prompt: Leading tokens that are the prompt.
        sampling: With a seed.
        tenant: Namespace of the request within the worker's cache.
        choice: Index among the request's n choices.
        priority: The cache keeps prefixes of higher priority longer.
        account: The tenant whose share of the cache it uses; None is the namespace.
        retain: Prefixes that the cache evicts last.
        num_faults: Stale page tables that the device found.
        num_undone: Failed steps since its last sound one.
        facts: For its next report, from ``note``; those of its last row are still here. None without any.
        source: Tier of most of them, by ``CacheUse.source``.
        draft_use: int32 ``[2 + drafts]``. The row's ``RowState.draft_use`` when the request lost it; None before that.
        num_reported: Prompt tokens whose score was reported before this worker got the request.
        num_scored: Those, and the ones reported since; the first token has no score. All, when none is wanted.
        was_admitted: Whether it ever had a row.
        in_flight_prefix: The row that it waits for.
        matcher: Of its grammar, before the first token; None until it is first awaited, or without one.
        key: ``tokens``, packed.
    """

    uid: int
    tokens: Int32Array
    num_prompt: int
    sampling: SamplingParams
    tenant: bytes
    choice: int
    priority: int = 0
    account: bytes | None = None
    retain: Retain = ()
    num_faults: int = 0
    num_undone: int = 0
    facts: RequestFacts | None = None
    source: str = COLD
    draft_use: Int32Array | None = None
    num_reported: int = 0
    num_scored: int = field(init=False)
    was_admitted: bool = False
    in_flight_prefix: InFlightPrefix | None = None
    matcher: Future[Matcher] | None = None
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        """Packs the tokens for matching."""
        self.key = pack_tokens(self.tokens)
        is_new = self.tokens.size == self.num_prompt
        wants_scores = is_new and self.sampling.prompt_logprobs is not None
        self.num_scored = self.num_reported if wants_scores else self.num_prompt - 1

    @property
    def num_reusable(self) -> int:
        """Leading tokens that may come from the cache: a score needs the token before it computed."""
        is_scored = self.num_scored == self.num_prompt - 1
        return self.tokens.size - 1 if is_scored else self.num_scored

    @property
    def prefix_key(self) -> bytes:
        """The key to match: a match leaves at least its last token to compute."""
        return self.key[: WORD_BYTES * (self.num_reusable + 1)]

    def note(self, facts: RequestFacts) -> None:
        """Adds facts to its next report, while it has no row."""
        if self.facts is None:
            self.facts = facts
        else:
            self.facts.update(facts)

    def to_row(self, row: int, num_computed: int, restore_slot: int = 0) -> RowAdmit:
        """Returns its admission to a row of the device, with ``num_computed`` cached tokens, and the slot of their snapshot."""
        return RowAdmit(row, self.tokens, self.num_prompt, num_computed, self.sampling, self.choice, restore_slot)

    def lose_row(self, tokens: Int32Array) -> None:
        """Takes the known tokens back from the row."""
        self.tokens = tokens
        self.key = pack_tokens(tokens)


class WaitingQueue:
    """First come, first served; a preempted request goes back to the front."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        """Returns the number of waiting requests."""
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        """Iterates over a copy, so that the loop may remove requests."""
        return iter(tuple(self._queue))

    def append(self, request: Request) -> None:
        """Adds a new request at the end."""
        self._queue.append(request)

    def requeue(self, request: Request) -> None:
        """Adds a preempted request at the front."""
        self._queue.appendleft(request)

    def remove(self, request: Request) -> None:
        """Takes a request out; it must be in the queue."""
        self._queue.remove(request)
