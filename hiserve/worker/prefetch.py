"""The store beyond the host: prefixes that are fetched while their requests wait, and pages that are written to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hiserve.cache.index.exchange import RunOp
from hiserve.cache.index.manager import CacheManager
from hiserve.cache.index.node import NO_PAGES
from hiserve.config import StorePrefetch
from hiserve.core.copies import CopyAck, CopyKind, PageCopy, StoreLookup
from hiserve.worker.cache_stats import CacheCounts
from hiserve.worker.waiting import Request

MAX_WAIT_S = 60.0  # of a request that waits for the store to the end
MAX_LOOKUPS = 64  # without an answer
MAX_PREFETCHES = 8  # under way
MAX_PAGES = 256  # of one prefetch: a longer prefix comes in pieces, so that what is there can be used
PATIENCE_S = 2.0  # orders older than this are no work: whoever is idle stops polling for them


@dataclass(slots=True, eq=False)
class _Want:
    """What a waiting request hopes for.

    Attributes:
        request: Whose prompt.
        since: When it came.
        num_cached: Pages of the prompt that were here then.
        digests: Of the pages after those that the store was asked for.
        end: Pages of the prompt up to the end of what the store has; 0 until it has said so.
        op: The prefetch that it waits for, its own or another request's; 0 without one.
        num_arrived: Pages after ``num_cached`` that came while it waited.
        is_late: It has waited long enough.
        is_over: It hopes for nothing more.
    """

    request: Request
    since: float
    num_cached: int
    digests: list[bytes]
    end: int = 0
    op: int = 0
    num_arrived: int = 0
    is_late: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """A copy that was not answered yet, when it was ordered, and for whom, if for a request."""

    copy: PageCopy
    since: float
    want: _Want | None = None


class Prefetches:
    """Asks the store for what the cache lacks of waiting requests, fetches it, and uploads what is new.

    A store that does not answer in time is asked nothing more until it does: its silence costs hits, and one wait.

    Args:
        cache: Decides where pages go; keeps those that are uploaded.
        counts: Is told how copies ended.
        policy: How long a request waits; None without a store.
        timeout_s: Longest, where ``policy`` is ``timeout``.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        cache: CacheManager,
        counts: CacheCounts,
        policy: StorePrefetch | None = None,
        timeout_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._counts = counts
        self._has_store = policy is not None
        self._max_wait_s = {"best_effort": 0.0, "wait": MAX_WAIT_S, "timeout": timeout_s}[policy or "best_effort"]
        self._clock = clock
        self._wants: dict[int, _Want] = {}
        self._to_ask: dict[int, _Want] = {}
        self._asked: dict[int, _Want] = {}
        self._open: dict[int, _Order] = {}

    @property
    def has_work(self) -> bool:
        """Whether there is something to order, or an order that may soon be answered."""
        if self._cache.exchange.has_uploads:
            return True
        oldest = next(iter(self._open.values()), None)
        return oldest is not None and self._clock() - oldest.since < PATIENCE_S

    def add(self, request: Request) -> None:
        """A request began to wait: the store is to be asked for what the cache lacks of it."""
        if not self._has_store:
            return
        num_cached, digests = self._cache.missing(request.tenant, request.prefix_key)
        if not digests:
            return
        if self._is_behind():
            self._cache.exchange.leave_out(len(digests), "store_behind")
            return
        want = _Want(request, self._clock(), num_cached, digests)
        self._wants[request.uid] = want
        self._to_ask[request.uid] = want

    def is_awaited(self, request: Request) -> bool:
        """Whether a request is to be passed over, because its prefix may come from the store still."""
        want = self._wants.get(request.uid)
        if want is None or want.is_over:
            return False
        if self._clock() - want.since < self._max_wait_s:
            return True
        if self._max_wait_s:
            want.is_late = True
            self._give_up(want)
        return False

    def num_stored_tokens(self, uid: int) -> int:
        """Returns how many tokens came for a request while it waited."""
        want = self._wants.get(uid)
        return 0 if want is None else want.num_arrived * self._cache.page_size

    def forget(self, uid: int) -> None:
        """A request waits no more: it was admitted or aborted."""
        want = self._wants.pop(uid, None)
        if want is not None and not want.is_over:
            self._give_up(want)

    def take(self) -> tuple[tuple[StoreLookup, ...], tuple[PageCopy, ...]]:
        """Returns the questions and copies to be sent with the next plan."""
        lookups: list[StoreLookup] = []
        while self._to_ask and len(self._asked) < MAX_LOOKUPS:
            uid = next(iter(self._to_ask))
            want = self._asked[uid] = self._to_ask.pop(uid)
            lookups.append(StoreLookup(uid, want.digests))
        copies = [self._order(upload, CopyKind.UPLOAD) for upload in self._cache.take_uploads()]
        num_open = sum(order.copy.kind is CopyKind.PREFETCH for order in self._open.values())
        for want in self._wants.values():
            if num_open == MAX_PREFETCHES:
                break
            if want.end and not want.op and not want.is_over:
                copy = self._fetch(want)
                if copy is not None:
                    copies.append(copy)
                    num_open += 1
        return tuple(lookups), tuple(copies)

    def found(self, answers: Sequence[tuple[int, int]]) -> None:
        """Takes in how many of the pages that it was asked for the store has: (uid, pages) of requests."""
        for uid, num_pages in answers:
            want = self._asked.pop(uid)
            want.end = want.num_cached + num_pages
            if want.is_over:
                self._cache.exchange.leave_out(num_pages, "too_late")
            want.is_over |= not num_pages

    def settle(self, acks: Sequence[CopyAck]) -> list[CopyAck]:
        """Takes in how copies ended; returns those that were not ordered here."""
        others: list[CopyAck] = []
        for ack in acks:
            order = self._open.pop(ack.op, None)
            if order is None:
                others.append(ack)
                continue
            if order.copy.kind is CopyKind.UPLOAD:
                self._cache.end_upload(ack.op)
            else:
                self._end_prefetch(order, ack)
            self._counts.ended(order.copy, ack)
        return others

    def _end_prefetch(self, order: _Order, ack: CopyAck) -> None:
        self._cache.end_prefetch(ack.op, ack.num_pages)
        for want in self._wants.values():
            if want.op == ack.op:
                want.op = 0
                self._note_arrived(want)
                want.is_over |= want is order.want and not ack.is_ok

    def _is_behind(self) -> bool:
        """Whether the store owes an answer that came too late for whoever waited."""
        wants = [*self._asked.values(), *(order.want for order in self._open.values())]
        return any(want is not None and want.is_late for want in wants)

    def _fetch(self, want: _Want) -> PageCopy | None:
        """Begins to fetch the next piece for a request; or lets it wait for another's, or for nothing any more."""
        num_here = self._note_arrived(want)
        if not want.num_cached <= num_here < want.end:
            want.is_over = True
            return None
        arriving = self._cache.exchange.arriving_by(want.digests[num_here - want.num_cached])
        if arriving:
            want.op = arriving
            return None
        request, num_pages = want.request, min(want.end - num_here, MAX_PAGES, self._cache.host.num_available)
        if not num_pages:
            return None  # later, when the host has room
        begun = self._cache.begin_prefetch(request.tenant, request.prefix_key, num_pages)
        if begun is None:
            want.is_over = True
            return None
        want.op = begun.op
        return self._order(begun, CopyKind.PREFETCH, want)

    def _order(self, what: RunOp, kind: CopyKind, want: _Want | None = None) -> PageCopy:
        copy = PageCopy(what.op, kind, NO_PAGES, what.run.pages, 0, what.run)
        self._open[what.op] = _Order(copy, self._clock(), want)
        return copy

    def _note_arrived(self, want: _Want) -> int:
        """Notes how far the prompt of a request is cached now; returns it in pages."""
        match = self._cache.match(want.request.tenant, want.request.prefix_key)
        num_here = (match.num_tokens + match.num_host_tokens) // self._cache.page_size
        want.num_arrived = max(want.num_arrived, num_here - want.num_cached)
        return num_here

    def _give_up(self, want: _Want) -> None:
        """Drops what is on its way for nobody but this request, and counts what is not even that."""
        want.is_over = True
        self._to_ask.pop(want.request.uid, None)
        op, want.op = want.op, 0
        if want.end:
            num_here = self._note_arrived(want)
            order = self._open.get(op)
            num_coming = order.copy.host_pages.size if order is not None else 0
            self._cache.exchange.leave_out(max(0, want.end - num_here - num_coming), "too_late")
        if op and not any(other.op == op for other in self._wants.values()):
            self._cache.abort_prefetch(op)
