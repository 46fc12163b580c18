"""The store beyond the host: prefixes that are fetched while their requests wait, and pages that are written to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hiserve.cache.index.prefix_cache import MissReason, PrefixCache, RunOp
from hiserve.config.caching import StorePrefetch
from hiserve.core.transfers import NO_PAGES, CopyAck, CopyKind, PageCopy, StoreEnds, StoreLookup
from hiserve.engine.cache_counters import HOST_FULL, CacheCounters
from hiserve.engine.host_loads import LoadCostModel
from hiserve.engine.queue import Request

MAX_WAIT_S = 60.0  # of a request that waits for the store to the end
MAX_LOOKUPS = 64  # without an answer
MAX_PREFETCHES = 8  # under way
GROWTH_S = 5.0  # a host that gets no usable page for so long gets no more: it has no memory
MAX_PAGES = 256  # of one prefetch: a longer prefix comes in parts, which can be used as they arrive
NOT_BACKED = "not_backed"  # a reason that ``StoreSync`` gives too
TOO_LATE = "too_late"  # a reason, beside those of ``cache_stats``
STALL_S = 5.0  # at shutdown, uploads to a store that has not answered for so long are dropped
POLL_S = 2.0  # an idle worker polls for copies up to this age


@dataclass(slots=True, eq=False)
class _PrefetchRequest:
    """The part of a waiting request's prompt that the store may have."""

    request: Request
    since: float  # when it came
    num_cached: int  # pages of the prompt that it could be resumed behind then
    num_history: int  # pages of the prompt that are here, at least as many
    digests: list[bytes]  # of the pages after those that the store was asked for
    # Pages of the prompt up to the end that it waits for, with the tail there; 0 until the store has answered.
    end: int = 0
    num_frames: int = 0  # of the tail there; 0 where boundaries need none
    earlier_ends: list[int] = field(default_factory=list)  # other resume points that the store has, ascending
    num_stored: int = 0  # pages of the prompt up to the end of all that the store has
    has_answer: bool = False
    op: int = 0  # the prefetch that it waits for, its own or another request's; 0 without one
    num_arrived: int = 0  # pages after ``num_cached`` that came while it waited
    is_late: bool = False  # it has waited long enough
    is_over: bool = False  # it waits for nothing more

    @property
    def num_left(self) -> int:
        """Host pages that are still to come, those of the tail at the end included."""
        is_whole = self.num_cached + self.num_arrived >= self.end
        return 0 if is_whole else max(0, self.end - self.num_history) + self.num_frames


@dataclass(frozen=True, slots=True, eq=False)
class _PendingCopy:
    """A copy without an answer, the time of its order, and the request that it is for, if there is one."""

    copy: PageCopy
    since: float
    wanted: _PrefetchRequest | None = None


class StorePrefetcher:
    """Looks up the missing pages of waiting requests in the store, fetches them, and uploads new pages.

    While an answer is late the store gets no further lookups: these cost hits, and each would cost a wait.

    Args:
        costs: Estimates the pages that arrive in time, from the times of prefetches.
        policy: How long a request waits; None without a store.
        timeout_s: Longest, where ``policy`` is ``timeout``.
    """

    def __init__(
        self,
        cache: PrefixCache,
        cache_counters: CacheCounters,
        costs: LoadCostModel,
        policy: StorePrefetch | None,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._cache_counters = cache_counters
        self._costs = costs
        self._has_store = policy is not None
        self._compares_costs = policy == "timeout"
        self._max_wait_s = {"best_effort": 0.0, "wait": MAX_WAIT_S, "timeout": timeout_s}[policy or "best_effort"]
        self._clock = clock
        self._prefetches: dict[int, _PrefetchRequest] = {}
        self._to_look_up: dict[int, _PrefetchRequest] = {}
        self._looking_up: dict[int, _PrefetchRequest] = {}
        self._open: dict[int, _PendingCopy] = {}
        self._num_ready_host_pages = 0
        self._grew_s = clock()  # when the host got its last usable pages; at first, the start
        self._answered_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether there is a copy to order, or one that may soon be answered."""
        if self._cache.store.has_uploads:
            return True
        oldest = next(iter(self._open.values()), None)
        return oldest is not None and self._clock() - oldest.since < POLL_S

    @property
    def is_uploading(self) -> bool:
        """Whether pages are on their way to the store, or can be begun; False after ``STALL_S`` without an answer."""
        store = self._cache.store
        if not self._open:
            return store.has_uploads or (store.num_to_upload > 0 and store.is_host_partial and self._may_grow)
        oldest_s = min(order.since for order in self._open.values())
        return self._clock() - max(oldest_s, self._answered_s) < STALL_S

    def grow_host(self, num_pages: int) -> None:
        """Makes host pages below ``num_pages`` usable."""
        if num_pages > self._num_ready_host_pages:
            self._num_ready_host_pages, self._grew_s = num_pages, self._clock()
        self._cache.grow_host(num_pages)

    def add(self, request: Request) -> None:
        """Adds a waiting request; the store is asked for its missing pages with a later plan."""
        if not self._has_store:
            return
        num_cached, num_here, digests = self._cache.store.missing(request.tenant, request.prefix_key)
        if not digests:
            return
        wanted = _PrefetchRequest(request, self._clock(), num_cached, num_here, digests)
        self._prefetches[request.uid] = wanted
        if self._has_late_answer():
            self._cache_counters.not_fetched(num_cached + len(digests) - num_here, "store_behind")
            wanted.is_over = True
        else:
            self._to_look_up[request.uid] = wanted

    def is_awaited(self, request: Request) -> bool:
        """Whether a request waits for a part of its prefix from the store."""
        wanted = self._prefetches.get(request.uid)
        if wanted is None or wanted.is_over:
            return False
        if self._clock() - wanted.since < self._max_wait_s:
            return True
        if self._max_wait_s:
            wanted.is_late = True
            self._give_up(wanted, TOO_LATE)
        return False

    def num_stored_tokens(self, uid: int) -> int:
        """Returns the tokens that a request can be resumed behind since something arrived for it while it waited."""
        wanted = self._prefetches.get(uid)
        return 0 if wanted is None else wanted.num_arrived * self._cache.page_size

    def may_have_more(self, uid: int, num_tokens: int) -> bool:
        """Whether the store has more of a waiting request's prompt than its first ``num_tokens``, or has not answered."""
        wanted = self._prefetches.get(uid)
        return wanted is not None and (not wanted.has_answer or num_tokens < wanted.num_stored * self._cache.page_size)

    def drop(self, uid: int) -> None:
        """Forgets a request that was admitted or aborted."""
        wanted = self._prefetches.pop(uid, None)
        if wanted is not None and not wanted.is_over:
            self._give_up(wanted, TOO_LATE)

    def take(self) -> tuple[tuple[StoreLookup, ...], tuple[PageCopy, ...]]:
        """Returns the lookups and copies for the next plan."""
        lookups: list[StoreLookup] = []
        while self._to_look_up and len(self._looking_up) < MAX_LOOKUPS:
            uid = next(iter(self._to_look_up))
            wanted = self._looking_up[uid] = self._to_look_up.pop(uid)
            num_here = wanted.num_history - wanted.num_cached
            lookups.append(StoreLookup(uid, wanted.digests, num_here, needs_tail=self._cache.tails is not None))
        uploads, stages = self._cache.store.begin_uploads()
        copies = [self._order(upload, CopyKind.UPLOAD) for upload in uploads] + stages
        self._open |= {stage.op: _PendingCopy(stage, self._clock()) for stage in stages}
        return tuple(lookups), (*copies, *self._begin_fetches())

    def found(self, answers: Sequence[StoreEnds]) -> None:
        """Takes the answers of lookups."""
        for uid, ends in answers:
            wanted = self._looking_up.pop(uid)
            *wanted.earlier_ends, wanted.end = [wanted.num_cached + end for end in ends] or [wanted.num_cached]
            wanted.num_stored, wanted.has_answer = wanted.end, True
            wanted.num_frames = self._cache.store.num_frames_before(wanted.end)
            if wanted.is_over:
                self._cache_counters.not_fetched(wanted.num_left, TOO_LATE)
            wanted.is_over |= not ends

    def complete(self, acks: Sequence[CopyAck]) -> list[CopyAck]:
        """Completes copies; returns those that were not begun here."""
        others: list[CopyAck] = []
        for ack in acks:
            order = self._open.pop(ack.op, None)
            if order is None:
                others.append(ack)
                continue
            self._answered_s = self._clock()
            self._cache.complete(ack.op, ok=ack.is_ok, num_pages=ack.num_pages)
            if order.copy.kind is CopyKind.OFFLOAD:  # of a page to be uploaded, which is counted then
                continue
            if order.copy.kind is CopyKind.PREFETCH:
                self._end_prefetch(order, ack)
            self._cache_counters.ended(order.copy, ack)
        return others

    def _end_prefetch(self, order: _PendingCopy, ack: CopyAck) -> None:
        if ack.num_pages:
            self._costs.end_fetch(ack.num_pages * self._cache.page_size, ack.seconds)
        for wanted in self._prefetches.values():
            if wanted.op == ack.op:
                wanted.op = 0
                self._note_arrived(wanted)
                wanted.is_over |= wanted is order.wanted and not ack.is_ok

    @property
    def _may_grow(self) -> bool:
        """Whether the host may still get usable pages, if it has not all."""
        return self._clock() - self._grew_s < GROWTH_S

    def _has_late_answer(self) -> bool:
        """Whether the store has not answered for a request whose wait is over."""
        prefetches = [*self._looking_up.values(), *(order.wanted for order in self._open.values())]
        return any(wanted is not None and wanted.is_late for wanted in prefetches)

    def _begin_fetches(self) -> list[PageCopy]:
        """Begins the prefetches that requests wait for, and ends those that cannot arrive in time."""
        sizes = [order.copy.num_host_pages for order in self._open.values() if order.copy.kind is CopyKind.PREFETCH]
        num_open, num_before = len(sizes), sum(sizes)
        copies: list[PageCopy] = []
        for wanted in self._prefetches.values():
            if not wanted.end or wanted.op or wanted.is_over:
                continue
            num_wanted, num_pages, reason = self._num_in_time(wanted, num_before)
            while num_wanted and not num_pages and self._step_back(wanted, reason):
                num_wanted, num_pages, reason = self._num_in_time(wanted, num_before)
            if not num_wanted:
                wanted.is_over = True
            elif not num_pages:
                self._costs.skip_fetch()
                self._give_up(wanted, reason)
            elif num_open < MAX_PREFETCHES:
                copy = self._fetch(wanted, num_pages)
                if copy is not None:
                    copies.append(copy)
                    num_open += 1
            num_before += num_pages
        return copies

    def _step_back(self, wanted: _PrefetchRequest, reason: str) -> bool:
        """Lets a request wait for the resume point before the one that it cannot get; False if the store has none."""
        if not wanted.earlier_ends:
            return False
        self._note_arrived(wanted)
        num_left = wanted.num_left
        wanted.end = wanted.earlier_ends.pop()
        wanted.num_frames = self._cache.store.num_frames_before(wanted.end)
        self._cache_counters.not_fetched(num_left - wanted.num_left, reason)
        return True

    def _num_in_time(self, wanted: _PrefetchRequest, num_before: int) -> tuple[int, int, str]:
        """Returns a request's next pages, and how many of them can arrive before its wait is over, or 0 and the reason.

        Where boundaries need tails, all or none: with a part of them no request resumes.
        """
        num_pages = wanted.num_left if wanted.num_frames else min(wanted.num_left, MAX_PAGES)
        num_in_time, reason = self._num_affordable(wanted, num_pages, num_before)
        return num_pages, num_in_time, reason

    def _num_affordable(self, wanted: _PrefetchRequest, num_pages: int, num_before: int) -> tuple[int, str]:
        if not self._max_wait_s:
            return num_pages, ""  # no request waits
        page_size, has_tail = self._cache.page_size, wanted.num_frames > 0
        wait_s = wanted.since + self._max_wait_s - self._clock()
        num_tokens = self._costs.num_in_time(num_pages * page_size, num_before * page_size, wait_s)
        if num_tokens < (num_pages * page_size if has_tail else page_size):
            return 0, TOO_LATE
        num_usable = (wanted.end - wanted.num_cached) * page_size if has_tail else num_tokens
        if self._compares_costs and not self._costs.is_worth_fetching(num_usable, num_before * page_size, num_tokens):
            return 0, MissReason.NOT_WORTH_LOADING
        return num_tokens // page_size, ""

    def _fetch(self, wanted: _PrefetchRequest, max_pages: int) -> PageCopy | None:
        """Begins the next prefetch of a request. None if it waits for another's, for room, or for nothing more."""
        num_here = self._note_arrived(wanted)
        if not wanted.num_cached <= num_here < wanted.end:
            wanted.is_over = True
            return None
        arriving = self._prefetch_of_next(wanted)
        if arriving:
            wanted.op = arriving
            return None
        if wanted.num_frames and not self._has_history(wanted):
            return None
        num_pages, tail_at = self._part(wanted, max_pages)
        if not (num_pages or tail_at):
            has_memory = self._cache.stats().host.num_pages or not self._may_grow
            if has_memory and not self._step_back(wanted, HOST_FULL):
                self._give_up(wanted, HOST_FULL)
            return None
        num_more = 0 if tail_at else wanted.num_left - num_pages
        request = wanted.request
        begun = self._cache.store.begin_prefetch(
            request.tenant, request.prefix_key, num_pages, num_more, tail_at=tail_at
        )
        if begun is None:
            wanted.is_over = True
            return None
        wanted.op = begun.op
        return self._order(begun, CopyKind.PREFETCH, wanted)

    def _prefetch_of_next(self, wanted: _PrefetchRequest) -> int:
        """Returns the prefetch of what a request needs next, or 0: a page, and the tail when all pages are here."""
        is_tail = wanted.num_history >= wanted.end
        last = wanted.end if is_tail else wanted.num_history + 1
        return self._cache.store.prefetch_of(wanted.digests[last - wanted.num_cached - 1], of_tail=is_tail)

    def _has_history(self, wanted: _PrefetchRequest) -> bool:
        """Whether the host has the cached history before a tail; else it is offloaded, or a tail before it is fetched."""
        request = wanted.request
        is_here = self._cache.store.back_up(request.tenant, request.prefix_key, wanted.end, wanted.num_left)
        return (is_here is None and not self._step_back(wanted, NOT_BACKED)) or bool(is_here)

    def _part(self, wanted: _PrefetchRequest, max_pages: int) -> tuple[int, int]:
        """Returns the pages of the next prefetch of a request, and its end if it brings the tail there; no pages without room."""
        room, num_pages = self._cache.store.num_available_on_host, max(0, wanted.end - wanted.num_history)
        if not wanted.num_frames:
            return min(num_pages, max_pages, room), 0
        if wanted.num_left > room:
            return 0, 0
        return (num_pages, wanted.end) if num_pages <= MAX_PAGES else (MAX_PAGES, 0)

    def _order(self, begun: RunOp, kind: CopyKind, wanted: _PrefetchRequest | None = None) -> PageCopy:
        run = begun.run if begun.run.digests else None
        copy = PageCopy(begun.op, kind, NO_PAGES, begun.run.pages, 0, run, image=begun.image)
        self._open[begun.op] = _PendingCopy(copy, self._clock(), wanted)
        return copy

    def _note_arrived(self, wanted: _PrefetchRequest) -> int:
        """Updates how far the prompt of a request is cached; returns the pages that it can be resumed behind."""
        match = self._cache.match(wanted.request.tenant, wanted.request.prefix_key)
        num_here = (match.num_tokens + match.num_host_tokens) // self._cache.page_size
        wanted.num_history = match.num_history_tokens // self._cache.page_size
        wanted.num_arrived = max(wanted.num_arrived, num_here - wanted.num_cached)
        return num_here

    def _give_up(self, wanted: _PrefetchRequest, reason: str) -> None:
        """Ends the wait of a request: aborts a prefetch that no other waits for, and counts the pages not begun."""
        wanted.is_over = True
        self._to_look_up.pop(wanted.request.uid, None)
        op, wanted.op = wanted.op, 0
        if wanted.end:
            self._note_arrived(wanted)
            order = self._open.get(op)
            num_coming = order.copy.num_host_pages if order is not None else 0
            self._cache_counters.not_fetched(max(0, wanted.num_left - num_coming), reason)
        if op and not any(other.op == op for other in self._prefetches.values()):
            self._cache.store.abort_prefetch(op)
