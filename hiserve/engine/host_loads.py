"""Rows whose prefix is on its way from the host, and whether loading it costs less than computing it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.prefix_cache import PrefixCache, PrefixLock
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import NO_PAGES, STORE_LANES, CopyAck, CopyKind, PageCopy
from hiserve.engine.cache_counters import CacheCounters
from hiserve.engine.rows import RowState

MAX_LOADS = 64  # under way at once; requests with more to load wait for their turn
# Offloads begun with one plan: they bound the cost of publication in a step. An offload takes the planning thread as long
# as 100 pages, so there are few while few nodes wait; each then has more pages. A step that fills many pages is long
# enough to offload as many: pages that wait longer are evicted before they are on the host.
MIN_OFFLOADED_PAGES, MAX_OFFLOADS, NODES_PER_OFFLOAD, PAGES_PER_OFFLOAD = 64, 4, 128, 128
PAGES_PER_SAVE = 16  # pages that the next steps would evict are offloaded in more copies, the longer the step
DECAY = 0.9  # weight of earlier measurements, at each new one
MIN_MEASUREMENTS = 4  # of each kind before they count
MAX_SKIPPED = 32  # requests that computed the pages of a tier, before copies from it are measured anew


class LinearFit:
    """Fits seconds = fixed + slope * amount to measurements, the latest weighing most."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.num_measurements = 0

    def add(self, amount: float, seconds: float) -> None:
        """Records a measurement."""
        self.num_measurements += 1
        self._weight = DECAY * self._weight + 1.0
        self._x = DECAY * self._x + amount
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + amount * amount
        self._xy = DECAY * self._xy + amount * seconds

    def fit(self) -> tuple[float, float]:
        """Returns (fixed, slope), neither below 0. Amounts that were all alike are taken as proportional."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        proportional = mean_y / mean_x
        if variance < 0.01 * mean_x * mean_x:
            return 0.0, proportional
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        if slope <= 0.0:
            return mean_y, 0.0
        fixed = mean_y - slope * mean_x
        return (fixed, slope) if fixed > 0.0 else (0.0, proportional)


class TransferCost:
    """Seconds of moving tokens from a slower tier."""

    def __init__(self) -> None:
        self._line = LinearFit()
        self._num_skipped = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Records a measurement."""
        self._line.add(num_tokens, seconds)

    def skip(self) -> None:
        """Records a request that computes its tokens instead; after ``MAX_SKIPPED`` the fit begins anew: a stall may have passed."""
        self._num_skipped += 1
        if self._num_skipped == MAX_SKIPPED:
            self._num_skipped = 0
            self._line = LinearFit()

    def fit(self) -> tuple[float, float] | None:
        """Returns (seconds, seconds per token); None before there are enough measurements."""
        return None if self._line.num_measurements < MIN_MEASUREMENTS else self._line.fit()


class LoadCostModel:
    """Decides whether loading or fetching a prefix is faster than computing it: yes, until both were measured.

    The time of a step runs from its submission, or from the end of the step before it if that is later. Steps of one
    token a row are left out: their time is not that of prefill.

    Args:
        step_tokens: Most tokens that one step computes.
    """

    def __init__(self, step_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._step_tokens = step_tokens
        self._clock = clock
        self._submitted: deque[tuple[float, int]] = deque()
        self._ended = 0.0
        self._loads = TransferCost()
        self._fetches = TransferCost()
        self._prefills = LinearFit()

    def begin_step(self, num_rows: int, num_tokens: int) -> None:
        """Records a planned step of so many tokens, drafts not counted; steps end in this order."""
        self._submitted.append((self._clock(), num_tokens if num_tokens > num_rows else 0))

    def end_step(self, *, has_run: bool = True) -> float | None:
        """Records the end of the oldest step; returns its seconds, None if it computed prompts, or did not run."""
        began, num_tokens = self._submitted.popleft()
        now = self._clock()
        seconds = now - max(began, self._ended)
        self._ended = now
        if not has_run:
            return None
        if not num_tokens:
            return seconds
        self._prefills.add(num_tokens, seconds)
        return None

    def end_load(self, num_tokens: int, seconds: float) -> None:
        """Records a load of so many tokens; its waits are not counted."""
        self._loads.add(num_tokens, seconds)

    def skip_load(self) -> None:
        """Records a request that computes pages of the host."""
        self._loads.skip()

    def end_fetch(self, num_tokens: int, seconds: float) -> None:
        """Records a prefetch of so many tokens; its waits are not counted."""
        self._fetches.add(num_tokens, seconds)

    def skip_fetch(self) -> None:
        """Records a request that computes pages of the store."""
        self._fetches.skip()

    def is_worth_loading(self, num_tokens: int, num_before: int, num_copied: int | None = None) -> bool:
        """Whether loading these tokens is faster than computing them.

        Args:
            num_tokens: Tokens that the host has.
            num_before: Tokens of loads that are under way and come first.
            num_copied: Tokens whose pages take as many bytes as the load: more with a tail, fewer where the device has
                history. None is ``num_tokens``.
        """
        num_copied = num_tokens if num_copied is None else num_copied
        fit = self._loads.fit()
        if fit is None:
            return True
        fixed, per_token = fit
        return fixed + (num_before + num_copied) * per_token < self._prefill_s(num_tokens)

    def num_in_time(self, num_tokens: int, num_before: int, wait_s: float) -> int:
        """Returns how many of these tokens a store can bring within ``wait_s`` seconds; the leading ones.

        Args:
            num_tokens: Tokens that the store has.
            num_before: Tokens of prefetches that are under way and come first.
            wait_s: Seconds from now.
        """
        fit = self._fetches.fit()
        if fit is None:
            return num_tokens
        fixed, per_token = fit
        left_s = wait_s - fixed - num_before * per_token / STORE_LANES
        if left_s <= 0.0:
            return 0
        return num_tokens if num_tokens * per_token <= left_s else int(left_s / per_token)

    def is_worth_fetching(self, num_tokens: int, num_before: int, num_moved: int = 0) -> bool:
        """Whether fetching these tokens from a store is faster than computing them; see ``num_in_time``.

        With a tail, and where some of their pages are here, the bytes are those of the history of ``num_moved`` tokens.
        """
        num_moved = num_moved or num_tokens
        return self.num_in_time(num_moved, num_before, self._prefill_s(num_tokens)) == num_moved

    def _prefill_s(self, num_tokens: int) -> float:
        """Returns the seconds of computing tokens; infinite until steps were measured."""
        if self._prefills.num_measurements < MIN_MEASUREMENTS:
            return math.inf
        step_fixed, per_token = self._prefills.fit()
        return -(-num_tokens // self._step_tokens) * step_fixed + num_tokens * per_token


class HostLoads:
    """Copies between device and host, and the rows that wait for loads."""

    def __init__(self, cache: PrefixCache, rows: RowState, costs: LoadCostModel, cache_counters: CacheCounters) -> None:
        self._cache = cache
        self._rows = rows
        self._costs = costs
        self._cache_counters = cache_counters
        self._waiting: set[int] = set()
        self._loads: list[PageCopy] = []
        self._num_loads = 0
        self.num_pages_to_load = 0  # of all loads under way
        self._open: dict[int, PageCopy] = {}

    @property
    def has_copies(self) -> bool:
        """Whether a copy is in flight, or can be begun."""
        return bool(self._open or self._loads or self._cache.has_offloads)

    @property
    def is_waited_for(self) -> bool:
        """Whether a row waits."""
        return bool(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether another load may begin."""
        return self._num_loads < MAX_LOADS

    def load(self, lock: PrefixLock) -> None:
        """Begins to load the host pages of a lock, and its tail. The caller has checked that the device has room for them."""
        pages = self._cache.allocate(_after(lock.pages, lock.host_pages.size))
        assert pages is not None, f"no room for {lock.host_pages.size} pages that were promised"
        tails = self._cache.tails
        window_pages, slots = (NO_PAGES, NO_PAGES) if tails is None else tails.allocate(lock.tail)
        self._loads.append(self._cache.begin_load(lock, pages, window_pages, slots))
        self._num_loads += 1
        self.num_pages_to_load += self._loads[-1].num_host_pages

    def track(self, row: int) -> bool:
        """Keeps a new row out of steps while its prefix is loading; returns whether it is."""
        is_waiting = bool(self._rows.lock(row).ops)
        if is_waiting:
            self._waiting.add(row)
        return is_waiting

    def untrack(self, row: int) -> None:
        """Forgets a released row; its loads go on."""
        self._waiting.discard(row)

    def next_rows(self) -> NDArray[np.int64]:
        """Returns the waiting rows whose loads arrive first, earliest admission first: loads arrive in their order."""
        rows = self._rows.active
        rows = rows[np.isin(rows, list(self._waiting))]
        last = np.array([max(self._rows.lock(row).ops) for row in rows.tolist()], dtype=np.int64)
        is_next: NDArray[np.bool_] = last == last.min(initial=np.iinfo(np.int64).max)
        return rows[is_next]

    def start(self, rows: NDArray[np.int64]) -> tuple[int, ...]:
        """Releases rows before their loads have ended; returns the loads that their forward must wait for."""
        self._waiting.difference_update(rows.tolist())
        return tuple(sorted(set[int]().union(*(self._rows.lock(row).ops for row in rows.tolist()))))

    def is_open(self, ops: Iterable[int]) -> bool:
        """Whether one of these copies is in flight."""
        return any(op in self._open for op in ops)

    def runnable(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows (int64 ``[n]``) that do not wait for a load."""
        return rows[~np.isin(rows, list(self._waiting))] if self._waiting else rows

    def take(self, num_tokens: int) -> tuple[PageCopy, ...]:
        """Returns the copies to start with the next plan, which computes so many tokens: loads, then offloads."""
        num_filled, (num_queued, num_to_save) = num_tokens // self._cache.page_size, self._cache.offload_backlog
        num_offloads = 1 + num_queued // NODES_PER_OFFLOAD + num_filled // PAGES_PER_OFFLOAD
        if num_to_save:
            num_offloads = MAX_OFFLOADS + num_filled // PAGES_PER_SAVE
        if not num_tokens:  # no row waits for the plan
            num_offloads, num_filled = MAX_OFFLOADS, MAX_OFFLOADS * PAGES_PER_OFFLOAD
        most = MAX_OFFLOADS + num_filled // PAGES_PER_SAVE
        offloads = self._cache.begin_offloads(
            max(MIN_OFFLOADED_PAGES, num_filled, num_to_save), min(most, num_offloads), self._is_worth_offloading
        )
        copies = (*self._loads, *offloads)
        self._loads = []
        self._open |= {copy.op: copy for copy in copies}
        return copies

    def _is_worth_offloading(self, num_pages: int) -> bool:
        return self._costs.is_worth_loading(num_pages * self._cache.page_size, 0)

    def complete(self, acks: Sequence[CopyAck]) -> list[int]:
        """Completes copies; returns the rows that lost their prefix because a load failed."""
        lost: list[PrefixLock] = []
        for ack in acks:
            copy = self._open.pop(ack.op)
            if copy.kind is CopyKind.LOAD:
                self._num_loads -= 1
                self.num_pages_to_load -= copy.num_host_pages
                if ack.is_ok:
                    self._costs.end_load(copy.num_host_pages * self._cache.page_size, ack.seconds)
            lost += self._cache.complete(ack.op, ok=ack.is_ok)
            self._cache_counters.ended(copy, ack)
        arrived = [row for row in self._waiting if not self._rows.lock(row).ops]
        self._waiting.difference_update(arrived)
        if not lost:
            return []
        return [row for row in self._rows.active.tolist() if any(self._rows.lock(row) is each for each in lost)]


def _after(pages: Int32Array, count: int) -> Int32Array:
    """Returns the numbers of ``count`` pages after these: a row of adjacent pages is read faster."""
    return pages[-1] + 1 + np.arange(count, dtype=np.int32) if pages.size else np.zeros(count, dtype=np.int32)
