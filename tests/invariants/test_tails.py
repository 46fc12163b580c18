"""H3: ``match`` finds the deepest resume point, against sets of prefixes, whatever came and went."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import (
    MissReason,
    PrefixCache,
    PrefixLock,
    TailPool,
    TailSizes,
    Tier,
    TierListener,
)
from hiserve.core.digest import namespace_digest
from hiserve.core.transfers import CopyKind, PageCopy, TailImage
from tests.helpers.host import TENANTS, make_run
from tests.helpers.tail_model import TailModel
from tests.invariants.kv_checks import Told

PAGE, NAMESPACE, FRAMES, SNAPSHOT_FRAMES = 2, b"n" * 16, 2, 3


def make_cache(
    num_pages: int = 60,
    num_window_pages: int = 30,
    num_host_pages: int = 0,
    num_ready_host_pages: int | None = None,
    listener: TierListener | None = None,
) -> tuple[PrefixCache, TailPool]:
    cache = PrefixCache(
        num_pages=num_pages,
        page_size=PAGE,
        namespace=NAMESPACE,
        tails=TailSizes(window_pages=num_window_pages, frames_per_page=FRAMES),
        num_host_pages=num_host_pages,
        num_ready_host_pages=num_ready_host_pages,
        listener=listener,
    )
    assert cache.windows is not None
    return cache, cache.windows


def insert(cache: PrefixCache, tokens: np.ndarray) -> PrefixLock:
    """Inserts the whole pages before the last token; returns the lock on them."""
    lock = cache.lock(cache.match(b"", tokens.tobytes())).detach()
    num_pages = (tokens.size - 1) // PAGE
    pages = cache.allocate(np.zeros(num_pages, dtype=np.int32))
    assert pages is not None
    cache.insert(lock, tokens[: num_pages * PAGE].tobytes(), pages)
    return lock


def publish(cache: PrefixCache, windows: TailPool, tokens: np.ndarray) -> PrefixLock:
    """Inserts the two pages of five tokens, with their tail of two window pages; returns the lock on them."""
    lock = insert(cache, tokens)
    held = windows.allocate(np.zeros(2, dtype=np.int32))
    cache.keep_tail(lock, 0, held)
    windows.drop(held)
    return lock


class Runs:
    """Random rows: resumed at a match, published page by page, with tails at random boundaries; copies that end or fail.

    Tails have window pages, a snapshot, or both.
    """

    def __init__(self, seed: int, num_host_pages: int = 0, *, has_windows: bool = True, num_slots: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        num_window_pages = 9 if num_host_pages else 30
        self.told = Told(PAGE)
        sizes = TailSizes(
            window_pages=num_window_pages if has_windows else 0,
            frames_per_page=FRAMES,
            snapshot_slots=num_slots,
            frames_per_snapshot=SNAPSHOT_FRAMES,
        )
        self.cache = PrefixCache(
            num_pages=60,
            page_size=PAGE,
            namespace=NAMESPACE,
            tails=sizes,
            num_host_pages=num_host_pages,
            listener=self.told.events,
        )
        self.windows, self.snapshots = self.cache.windows, self.cache.snapshots
        self.pools = [pool for pool in (self.windows, self.snapshots) if pool is not None]
        self.has_host = num_host_pages > 0
        self.model = TailModel(self.cache)
        self.rows: list[tuple[np.ndarray, int, PrefixLock]] = []  # tokens, published pages, lock
        self.copies: list[PageCopy] = []
        self.num_loads = 0

    def prompt(self) -> np.ndarray:
        if self.has_host:  # prompts that come back
            return np.full(int(self.rng.integers(8, 24)), self.rng.integers(3), dtype=np.int32)
        return self.rng.integers(0, 2, int(self.rng.integers(1, 24))).astype(np.int32)

    def start(self) -> None:
        tokens = self.prompt()
        found = self.cache.match(b"", tokens.tobytes())
        pages, num_resumable, num_cached = self.model.match(tokens.tobytes())
        told = (found.num_tokens, found.num_host_tokens, found.num_history_tokens)
        assert told == (pages * PAGE, (num_resumable - pages) * PAGE, num_cached * PAGE)
        assert (found.tail is None) == (pages == 0) and (found.host_tail is None) == (num_resumable == pages)
        miss = self.cache.explain(b"", tokens.tobytes(), num_resumable * PAGE)
        assert (miss.reason is MissReason.NO_TAIL) == (num_resumable < num_cached)
        if pages < num_resumable:
            assert self.cache.explain(b"", tokens.tobytes(), pages * PAGE).reason is MissReason.NOT_WORTH_LOADING
        if len(self.rows) < (2 if self.has_host else 4):
            loads = bool(found.num_host_tokens and self.rng.integers(4))
            lock = self.cache.lock(found, found.num_host_tokens if loads else 0).detach()
            assert lock.tail is None or lock.tail.device_ready_op in {0, *lock.ops}, "nothing waits for the tail"
            if loads and not self.load(lock, self.model.names(tokens.tobytes())):
                self.cache.release(lock)
            else:
                self.rows.append((tokens, lock.pages.size, lock))

    def load(self, lock: PrefixLock, names: list[bytes]) -> bool:
        """Begins a load, unless there is no room."""
        tails, num_pages = self.cache.tails, lock.host_pages.size
        assert tails is not None and lock.tail is not None and lock.tail.frames is not None
        if self.windows is not None and tails.num_to_load(lock.tail) > self.windows.num_spare:
            return False
        if not tails.has_slot_for(lock.tail):
            return False
        pages = self.cache.allocate(np.zeros(num_pages, dtype=np.int32))
        if pages is None:
            return False
        window_pages, slots = tails.allocate(lock.tail)
        copy = self.cache.begin_load(lock, pages, window_pages, slots)
        self.copies.append(copy)
        assert copy.image is not None and copy.image.digest == names[lock.pages.size - 1], "a tail of another boundary"
        num_frames = FRAMES * window_pages.size + SNAPSHOT_FRAMES * slots.size
        assert copy.image.frames.size == num_frames > 0 and copy.host_pages.size == num_pages
        assert slots.size == (self.snapshots is not None)
        self.model.loading[copy.op] = names[lock.pages.size - num_pages : lock.pages.size]
        self.num_loads += 1
        return True

    def publish(self) -> None:
        index = int(self.rng.integers(len(self.rows)))
        tokens, num_pages, lock = self.rows[index]
        end = (
            int(self.rng.integers(num_pages, tokens.size // PAGE + 1)) if tokens.size // PAGE > num_pages else num_pages
        )
        if end > num_pages and lock.is_whole:
            pages = self.cache.allocate(np.zeros(end - num_pages, dtype=np.int32))
            if pages is None:
                return
            kept = self.cache.insert(lock, tokens[num_pages * PAGE : end * PAGE].tobytes(), pages)
            self.cache.free(pages[kept.size :]) if kept.size < pages.size else None
            self.rows[index] = tokens, num_pages + kept.size, lock

    def keep(self) -> None:
        tokens, num_pages, lock = self.rows[int(self.rng.integers(len(self.rows)))]
        if not num_pages or not lock.is_whole or (self.windows is not None and self.windows.num_spare < 2):
            return
        boundary = int(self.rng.integers(1, num_pages + 1))
        pages = slots = np.empty(0, dtype=np.int32)
        if self.snapshots is not None and not (slots := self.snapshots.try_allocate()).size:
            return
        if self.windows is not None:
            pages = self.windows.allocate(np.zeros(min(boundary, 2), dtype=np.int32))
        tails = self.model.tails.setdefault(self.model.names(tokens.tobytes())[boundary - 1], [])
        tail = self.cache.keep_tail(lock, num_pages - boundary, pages, slots)
        if tail not in tails:
            tails.append(tail)
        if self.snapshots is not None and self.cache.tails is not None and self.rng.integers(4):
            self.cache.tails.settle(tail)
        for pool, held in ((self.windows, pages), (self.snapshots, slots)):
            if pool is not None:
                pool.drop(held)

    def end(self) -> None:
        self.cache.release(self.rows.pop(int(self.rng.integers(len(self.rows))))[2])

    def squeeze(self) -> None:
        count = self.cache.num_available - int(self.rng.integers(4)) if self.has_host else int(self.rng.integers(1, 40))
        pages = self.cache.allocate(np.zeros(max(0, count), dtype=np.int32))
        if pages is not None:
            self.cache.free(pages)

    def end_copy(self) -> None:
        copy = self.copies[int(self.rng.integers(len(self.copies)))]
        if copy.kind is CopyKind.LOAD:  # they end in their order
            copy = next(each for each in self.copies if each.kind is CopyKind.LOAD)
        self.copies.remove(copy)
        self.model.loading.pop(copy.op, None)
        lost = self.cache.complete(copy.op, ok=(ok := bool(self.rng.integers(6))))
        if not ok and copy.image is not None:
            assert np.isin(copy.image.frames, self.cache.host.pages.free_pages()).all(), "a tail of damaged images"
        for lock in lost:
            assert not lock.is_whole
            self.cache.release(lock)
        self.rows = [row for row in self.rows if row[2].is_open]

    def step(self) -> None:
        chosen = int(self.rng.integers(16))
        if chosen < 4 or not self.rows:
            self.start()
        elif chosen < 7:
            self.publish()
        elif chosen < 9:
            self.keep()
        elif chosen < 10 or (self.has_host and chosen == 15):
            self.end()
        elif chosen < 11:
            self.squeeze()
        elif chosen < 13:
            self.copies += self.cache.begin_offloads(8)
        elif chosen < 15 and self.copies:
            self.end_copy()
        if self.rng.integers(160) == 0:
            self.cache.flush([None, Tier.DEVICE, Tier.HOST][int(self.rng.integers(3))])
        self.model.check()
        for tier in Tier:
            self.model.check_told(tier, *self.cache.take_events(tier))
        self.check_routers()
        for pool in self.pools:
            pool.check()
        self.check_copies()
        self.check_order()

    def check_routers(self) -> None:
        """H11: routers know of the same pages."""
        self.told.events.send()
        for tier, medium in ((Tier.DEVICE, "GPU"), (Tier.HOST, "CPU_PINNED")):
            known = self.told.direct.mirror.cached[medium]
            assert known.keys() == {int.from_bytes(name[:8], "big", signed=True) for name in self.model.told[tier]}

    def check_copies(self) -> None:
        """No page that a copy reads or writes is free."""
        for copy in self.copies:
            assert not np.isin(copy.all_host_pages, self.cache.host.pages.free_pages()).any(), (
                f"host pages of {copy.op}"
            )
            assert not np.isin(copy.device_pages, self.cache.device.pages.free_pages()).any(), f"pages of {copy.op}"
            for pool, held in ((self.windows, copy.window_pages), (self.snapshots, copy.slots)):
                assert pool is None or (pool.num_refs[held] > 0).all(), f"pages of the tail of {copy.op}"

    def check_order(self) -> None:
        """The host's order has each tail that no copy uses, and the frames of all are charged."""
        tails = [tail for node in self.cache.tree.nodes() for tail in (node.tails or {}).values()]
        order, history = set(self.cache.host.eviction), sum(node.host_pages.size for node in self.cache.tree.nodes())
        assert all((tail in order) == (tail.frames is not None and not tail.pending_op) for tail in tails)
        frames = sum(tail.frames.size for tail in tails if tail.frames is not None)
        assert sum(self.cache.host.shares.held.values()) == history + frames

    def close(self) -> None:
        while self.copies:
            self.end_copy()
        for _, _, lock in self.rows:
            self.cache.release(lock)
        self.cache.flush()
        for pool in self.pools:
            assert pool.num_tails == pool.num_pinned == 0 and pool.num_free == pool.num_pages - 1
        host = self.cache.host
        assert host.pages.num_free == host.pages.num_ready - 1 and host.num_evictable == 0


@pytest.mark.parametrize("seed", range(40))
def test_match_is_the_deepest_resume_point_whatever_came_and_went(seed: int) -> None:
    runs = Runs(seed)
    for _ in range(150):
        runs.step()
    runs.close()


@pytest.mark.parametrize("num_host_pages", [24, 70, 300])
def test_match_knows_the_deepest_resume_point_of_each_tier(num_host_pages: int) -> None:
    """H1, H3 and H10: a load has the whole tail of its boundary, or is not begun."""
    num_loads = 0
    for seed in range(30):
        runs = Runs(seed, num_host_pages)
        for _ in range(200):
            runs.step()
        runs.close()
        num_loads += runs.num_loads
    assert num_loads > 30, num_loads


@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("num_host_pages", [0, 24, 70])
def test_match_knows_the_deepest_snapshot_of_each_tier(num_host_pages: int, has_windows: bool) -> None:
    """H1, H3 and H10, of tails with a snapshot, alone or behind window pages."""
    num_loads = num_evicted = 0
    for seed in range(6):
        runs = Runs(seed, num_host_pages, has_windows=has_windows, num_slots=[4, 9][seed % 2])
        for _ in range(150):
            runs.step()
        runs.close()
        num_loads += runs.num_loads
        num_evicted += runs.cache.stats().snapshots.num_evicted_tails
    assert num_evicted > 0 and (num_loads > 0) == (num_host_pages > 0), (num_loads, num_evicted)


def test_tails_keep_pace_with_history_that_takes_every_order_of_a_step() -> None:
    cache, windows = make_cache(num_pages=200, num_window_pages=200, num_host_pages=400)
    prompts = [np.full(5, token, dtype=np.int32) for token in range(60)]
    for first in range(0, len(prompts), 3):
        for tokens in prompts[first : first + 3]:
            cache.release(publish(cache, windows, tokens))
        for copy in cache.begin_offloads(64, 3):
            cache.complete(copy.op, ok=True)
    cache.flush(Tier.DEVICE)
    num_resumable = sum(cache.match(b"", tokens.tobytes()).num_host_tokens == 4 for tokens in prompts)
    assert num_resumable >= len(prompts) - 3


@pytest.mark.parametrize("use", ["a match", "a row that ends there"])
def test_a_boundary_that_is_used_keeps_its_tail_longer(use: str) -> None:
    cache, windows = make_cache(num_window_pages=5)
    prompts = [np.full(5, token, dtype=np.int32) for token in (1, 2)]
    locks = [publish(cache, windows, tokens) for tokens in prompts]
    if use == "a match":
        locks.append(cache.lock(cache.match(b"", prompts[0].tobytes())).detach())
    else:
        cache.keep_tail(locks[0], 0, np.empty(0, dtype=np.int32))
    windows.allocate(np.zeros(2, dtype=np.int32))
    assert [cache.match(b"", tokens.tobytes()).num_tokens for tokens in prompts] == [4, 0]


def test_a_match_from_before_a_tail_is_matched_again() -> None:
    cache, windows = make_cache()
    tokens = np.arange(5, dtype=np.int32)
    lock = insert(cache, tokens)
    before = cache.match(b"", tokens.tobytes())
    cache.keep_tail(lock, 0, windows.allocate(np.zeros(2, dtype=np.int32)))
    assert (before.num_tokens, cache.match(b"", tokens.tobytes()).num_tokens) == (0, 4)
    with pytest.raises(AssertionError, match="the tree changed since the match"):
        cache.lock(before)


def test_a_boundary_keeps_the_tail_that_it_has() -> None:
    cache, windows = make_cache()
    tokens = np.arange(9, dtype=np.int32)
    lock = insert(cache, tokens)
    first = cache.keep_tail(lock, 1, windows.allocate(np.zeros(2, dtype=np.int32)))
    second = cache.keep_tail(lock, 1, windows.allocate(np.zeros(2, dtype=np.int32)))
    assert first is second and windows.num_tails == 1
    with pytest.raises(AssertionError, match="no page ends 4 pages before the end"):
        cache.keep_tail(lock, 4, np.zeros(2, dtype=np.int32))
    cache.release(lock)


def test_a_load_waits_for_the_last_forward_over_its_window_pages() -> None:
    """INV 26, of window pages."""
    cache, windows = make_cache(num_window_pages=3, num_host_pages=20)
    tokens = np.arange(5, dtype=np.int32)
    publish(cache, windows, tokens)
    for _ in ("history", "tail"):
        (copy,) = cache.begin_offloads(8)
        cache.complete(copy.op, ok=True)
    row = windows.allocate(np.zeros(2, dtype=np.int32))
    cache.begin_after(7)
    windows.drop(row)
    again = cache.lock((found := cache.match(b"", tokens.tobytes())), found.num_host_tokens).detach()
    copy = cache.begin_load(again, np.empty(0, dtype=np.int32), windows.allocate(np.zeros(2, dtype=np.int32)))
    assert copy.window_pages.size == 2 and copy.after_step == 7


TOKENS = np.arange(5, dtype=np.int32)


def offload(cache: PrefixCache) -> list[int]:
    """Ends the offloads of a step; returns the window pages of each."""
    copies = cache.begin_offloads(8)
    for copy in copies:
        cache.complete(copy.op, ok=True)
    return [copy.window_pages.size for copy in copies]


def test_a_row_whose_tail_was_lost_is_told_as_one_that_moved() -> None:
    cache, windows = make_cache(num_window_pages=3, num_host_pages=20)
    cache.release(publish(cache, windows, TOKENS))
    offload(cache)
    offload(cache)
    windows.drop(windows.allocate(np.zeros(2, dtype=np.int32)))
    found = cache.match(b"", TOKENS.tobytes())
    lock = cache.lock(found, found.num_host_tokens).detach()
    copy = cache.begin_load(lock, np.empty(0, dtype=np.int32), windows.allocate(np.zeros(2, dtype=np.int32)))
    before = cache.relocation_version
    assert cache.complete(copy.op, ok=False) == [lock]
    assert cache.relocation_version > before


def test_a_tail_is_offloaded_to_memory_that_is_ready_and_from_pages_that_nobody_was_promised() -> None:
    cache, windows = make_cache(num_window_pages=4, num_host_pages=20, num_ready_host_pages=4)
    cache.release(publish(cache, windows, TOKENS))
    assert [offload(cache), offload(cache)] == [[0], []], "the tail takes four frames, of which one is ready"
    cache.grow_host(20)
    windows.num_promised = 2
    assert offload(cache) == [] and not cache.has_offloads
    windows.num_promised = 1
    assert cache.has_offloads and offload(cache) == [2]


def test_the_host_keeps_history_whose_tail_it_alone_has() -> None:
    """The device has the pages too, but without the host's copy the tail would go."""
    cache, windows = make_cache(num_window_pages=3, num_host_pages=20)
    cache.release(publish(cache, windows, TOKENS))
    offload(cache)
    offload(cache)
    (node,) = cache.tree.nodes()
    assert node.is_copy, "the device has the tail too"
    windows.drop(windows.allocate(np.zeros(2, dtype=np.int32)))
    assert not node.is_copy
    cache.tiers.make_host_room(19, evicts=False)
    assert cache.match(b"", TOKENS.tobytes()).num_host_tokens == 4


def test_tails_of_a_former_process_are_adopted_whole_and_once() -> None:
    """H10: frames of parts of window pages, of a boundary that has a tail, or without history are free."""
    cache, _ = make_cache(num_host_pages=20)
    run = make_run([1, 2], [7, 8], page_size=PAGE)
    cache.recover([run])

    def image(frames: list[int], digest: bytes) -> TailImage:
        return TailImage(np.array(frames, dtype=np.int32), TENANTS[0], digest)

    first, last = run.digests
    assert cache.tails is not None and cache.take_events(Tier.HOST) == (b"", b"")
    images = [image([3, 4, 5], first), image([6, 7], last), image([8, 9], last), image([10, 11], b"?" * 16)]
    assert cache.tails.recover(images) == 2
    assert sorted(cache.host.pages.free_pages().tolist()) == [3, 4, 5, *range(8, 20)]
    assert cache.host.num_evictable == 4
    assert cache.take_events(Tier.HOST) == (first + last, b""), "H11: routers learn of adopted resume points"


def test_a_node_adopts_the_tails_of_all_its_boundaries() -> None:
    cache, _ = make_cache(num_host_pages=20)
    run = make_run([1, 2], [7, 8], namespace=namespace_digest(NAMESPACE, b""), page_size=PAGE)
    cache.recover([run])
    assert cache.tails is not None
    frames = np.arange(3, 7, dtype=np.int32).reshape(2, -1)
    images = [TailImage(each, run.namespace, digest) for each, digest in zip(frames, run.digests, strict=True)]
    assert cache.tails.recover(images) == 4
    for tokens, num_tokens in (([7, 7, 8, 8, 9], 2 * PAGE), ([7, 7, 9, 9, 9], PAGE)):
        assert cache.match(b"", np.array(tokens, dtype=np.int32).tobytes()).num_host_tokens == num_tokens
    cache.flush()
    assert cache.host.pages.num_free == cache.host.pages.num_ready - 1
