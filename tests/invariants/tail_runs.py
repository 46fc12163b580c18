"""Random rows with tails at random boundaries, beside an independent model."""

from __future__ import annotations

from typing import Any

import numpy as np

from hiserve.cache.index.prefix_cache import MissReason, PrefixCache, PrefixLock, TailSizes, Tier
from hiserve.core.transfers import CopyKind, PageCopy
from tests.helpers.tail_model import TailModel
from tests.invariants.kv_checks import Told

PAGE, NAMESPACE, FRAMES, SNAPSHOT_FRAMES = 2, b"n" * 16, 2, 3


class Runs:
    """Random rows: resumed at a match, published page by page, with tails at random boundaries; copies that end or fail.

    Tails have window pages, a snapshot, or both.
    """

    def __init__(
        self, seed: int, num_host_pages: int = 0, *, has_windows: bool = True, num_slots: int = 0, **options: Any
    ) -> None:
        self.rng = np.random.default_rng(seed)
        num_window_pages = 9 if num_host_pages else 30
        self.told = Told(PAGE)
        sizes = TailSizes(
            window_pages=num_window_pages if has_windows else 0,
            frames_per_page=FRAMES,
            snapshot_slots=num_slots,
            frames_per_snapshot=SNAPSHOT_FRAMES,
            window=2 * PAGE,
        )
        self.cache = PrefixCache(
            num_pages=60,
            page_size=PAGE,
            namespace=NAMESPACE,
            tails=sizes,
            num_host_pages=num_host_pages,
            listener=self.told.events,
            **options,
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
            free = [*self.cache.host.pages.free_pages().tolist(), *self.uploaded_pages()]
            assert set(copy.image.frames.tolist()) <= set(free), "a tail of damaged images"
        for lock in lost:
            assert not lock.is_whole
            self.cache.release(lock)
        self.rows = [row for row in self.rows if row[2].is_open]

    def flush(self, tier: Tier | None) -> None:
        """Pages of a load that lose their place do not arrive."""
        self.cache.flush(tier)
        self.model.loading = {
            op: names for op, names in self.model.loading.items() if not self.cache.ops[op].lock.is_lost
        }

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
            self.flush([None, Tier.DEVICE, Tier.HOST][int(self.rng.integers(3))])
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
        assert all((tail in order) == tail.is_host_evictable for tail in tails)
        frames = sum(tail.frames.size for tail in tails if tail.frames is not None)
        assert sum(self.cache.host.shares.held.values()) == history + frames

    def uploaded_pages(self) -> list[int]:
        """Host pages that uploads read."""
        return []

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
