"""H3, H10 and H11 with a store: resume points are uploaded and fetched whole, whatever ends, fails or leaves in between."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import HostAdmission, PrefixCache, RunOp, TailSizes, Tier
from hiserve.core.digest import namespace_digest
from hiserve.core.transfers import NO_PAGES, CopyKind, PageCopy
from tests.invariants.tail_runs import FRAMES, NAMESPACE, PAGE, SNAPSHOT_FRAMES, Runs


class StoredRuns(Runs):
    """Random rows as in ``Runs``, beside a store: sets of names."""

    def __init__(self, seed: int, num_host_pages: int, admission: HostAdmission, **options: bool | int) -> None:
        super().__init__(
            seed, num_host_pages, max_upload_pages=num_host_pages // 4, host_admission=admission, **options
        )
        self.begun: set[bytes] = set()  # pages whose upload has begun
        self.pages: set[bytes] = set()
        self.stored_tails: set[bytes] = set()
        self.uploads: list[RunOp] = []  # in their order
        self.stages: list[PageCopy] = []
        self.fetches: list[RunOp] = []
        self.num_fetched = self.num_alone = self.num_staged = 0

    def step(self) -> None:
        chosen = int(self.rng.integers(8))
        if chosen < 4:
            self.upload()
        if chosen % 2 and self.uploads:
            self.end_upload()
        if chosen in (2, 3) and self.stages:
            stage = self.stages.pop(0)
            # History whose copy fails is not uploaded, and its tails are of no use in the store.
            self.cache.complete(stage.op, ok=stage.image is None or bool(self.rng.integers(5)))
        if chosen in (4, 5):
            self.fetch()
        if chosen > 5 and self.fetches:
            self.end_fetch()
        if not self.rng.integers(25):
            self.lose()
        super().step()
        self.check_host()

    def lose(self) -> None:
        """Loses all that is cached, all of the host, or the tails that no transfer uses, as evictions do."""
        chosen = int(self.rng.integers(3))
        if chosen < 2:
            self.flush([None, Tier.HOST][chosen])
        for node in self.cache.tree.nodes() if chosen == 2 else ():
            for tail in list((node.tails or {}).values()):
                if tail.is_open and not tail.pending_op:
                    tail.close()
        for _ in range(4):
            self.fetch()

    def num_frames(self, boundary: int) -> int:
        """The frames of a tail behind so many pages."""
        num_windows = 0 if self.windows is None else min(boundary, 2) * FRAMES
        return num_windows + (0 if self.snapshots is None else SNAPSHOT_FRAMES)

    def upload(self) -> None:
        uploads, stages = self.cache.store.begin_uploads()
        for order in uploads:
            self.begun |= set(order.run.digests)
            self.check_upload(order)
        self.uploads += uploads
        self.stages += stages
        self.num_staged += sum(stage.image is not None for stage in stages)

    def check_upload(self, order: RunOp) -> None:
        """A tail is uploaded whole, and not before its history."""
        if order.image is not None:
            before = self.model.before(order.image.digest)
            assert self.begun.issuperset(before) and not order.run.digests, "the store gets a tail without its history"
            assert order.image.frames.size == self.num_frames(len(before))
            assert order.image.history == tuple(before), "other pages than its history count as used with a tail"
            assert order.image.namespace == namespace_digest(NAMESPACE, b"")

    def end_upload(self) -> None:
        order = self.uploads.pop(0)
        ok = bool(self.rng.integers(6))
        self.cache.complete(order.op, ok=ok)
        if ok:
            self.pages |= set(order.run.digests)
            self.stored_tails |= set() if order.image is None else {order.image.digest}

    def fetch(self) -> None:
        """Begins to fetch up to the deepest resume point that the store has of a prompt, if this is not here."""
        key, store = self.prompt().tobytes(), self.cache.store
        num_cached, num_here, digests = store.missing(b"", key)
        _, num_resumable, num_history = self.model.match(key)
        assert (num_cached, num_here) == (num_resumable, num_history)
        assert digests == self.model.names(key[: max(0, len(key) - 4)])[num_cached:]
        count = next(
            (at for at in range(num_here - num_cached, len(digests)) if digests[at] not in self.pages), len(digests)
        )
        end = max((at + 1 for at in range(count) if digests[at] in self.stored_tails), default=0) + num_cached
        if end == num_cached:
            return
        num_frames = store.num_frames_before(end)
        assert num_frames == self.num_frames(end)
        begun = store.begin_prefetch(b"", key, max(0, end - num_here), tail_at=end)
        if begun is not None:
            assert begun.image is not None and begun.image.digest == digests[end - num_cached - 1]
            assert begun.image.frames.size == num_frames
            assert begun.image.history == tuple(self.model.before(digests[end - num_cached - 1]))
            assert begun.run.digests == digests[num_here - num_cached : end - num_cached]
            assert (
                store.prefetch_of([*begun.run.digests, begun.image.digest][0], of_tail=not begun.run.digests)
                == begun.op
            )
            self.fetches.append(begun)

    def end_fetch(self) -> None:
        order = self.fetches.pop(int(self.rng.integers(len(self.fetches))))
        assert order.image is not None
        digest, num_pages = order.image.digest, order.run.pages.size
        is_whole, was_lost = bool(self.rng.integers(4)), self.cache.ops[order.op].lock.is_lost
        if not self.rng.integers(9):
            self.cache.store.abort_prefetch(order.op)
            was_lost = True
        had_tail = any(tail.frames is not None for tail in self.model.tails.get(digest, []))
        num_ok = num_pages + order.image.frames.size if is_whole else int(self.rng.integers(num_pages + 1))
        self.cache.complete(order.op, ok=is_whole, num_pages=num_ok)
        found = [
            tail
            for node in self.cache.tree.nodes()
            for tail in (node.tails or {}).values()
            if tail.digest == digest and tail.frames is not None and np.isin(order.image.frames, tail.frames).any()
        ]
        has_place = not (was_lost or had_tail) and digest in self.model.cached[Tier.HOST]
        assert len(found) == (is_whole and has_place), "a tail is found that did not arrive, or none that did"
        tails = self.model.tails.setdefault(digest, [])
        tails += [tail for tail in found if tail not in tails]
        self.num_fetched += len(found)
        self.num_alone += len(found) * (not num_pages)

    def uploaded_pages(self) -> list[int]:
        orders = [*self.uploads, *self.cache.store._tail_uploads._orders, *self.cache.uploads._uploads]
        images = [order.image.frames for order in orders if order.image is not None]
        return np.concatenate([NO_PAGES, *images, *(order.run.pages for order in orders)]).tolist()

    def check_host(self) -> None:
        """What copies read or write is not free; the pages that the host can evict are counted; nothing is lost."""
        cache = self.cache
        fetched = [order.run.pages for order in self.fetches] + [
            order.image.frames for order in self.fetches if order.image
        ]
        staged = [stage.all_host_pages for stage in self.stages]
        used = np.concatenate([NO_PAGES, *fetched, *staged, np.array(self.uploaded_pages(), dtype=np.int32)])
        assert not np.isin(used, cache.host.pages.free_pages()).any(), "a page that a copy of the store uses is free"
        nodes = list(cache.tree.nodes())
        tails = [tail for node in nodes for tail in (node.tails or {}).values()]
        moved = {op.tail for op in cache.ops}
        idle = [
            tail.frames.size
            for tail in tails
            if tail.frames is not None and tail.is_host_evictable and tail not in moved
        ]
        free = sum(node.host_pages.size for node in nodes if not node.num_locks and not node.num_host_locks)
        assert cache.host.num_evictable == free + sum(idle)
        sync = cache.store_sync
        in_flight = cache.ops.num_in_flight[CopyKind.PREFETCH]
        assert sync.num_wanted == sync.num_prefetched + sync.unfulfilled.total() + in_flight
        assert cache.uploads.num_pages == sum(
            cache.ops.num_in_flight[kind] for kind in (CopyKind.UPLOAD, CopyKind.STAGE)
        )

    def drain(self) -> None:
        """Lets all rows end, and all that waits get to the store: nothing waits for ever."""
        while self.rows:
            self.end()
        for _ in range(60):
            self.copies += self.cache.begin_offloads(8)
            for copy in self.copies:
                self.cache.complete(copy.op, ok=True)
            self.copies.clear()
            self.upload()
            for stage in self.stages:
                self.cache.complete(stage.op, ok=True)
            self.stages.clear()
            while self.uploads:
                self.end_upload()
        assert not self.cache.store.num_to_upload and not self.cache.store.has_uploads

    def close(self) -> None:
        while self.fetches:
            self.end_fetch()
        self.drain()
        super().close()
        assert not self.cache.uploads.num_pages and not self.cache.uploads._awaited


def cache_of_a_tail(num_host_pages: int) -> PrefixCache:
    """Two pages and their tail wait for their uploads."""
    cache = PrefixCache(
        num_pages=20,
        page_size=PAGE,
        namespace=NAMESPACE,
        num_host_pages=num_host_pages,
        max_upload_pages=10,
        tails=TailSizes(window_pages=20, frames_per_page=FRAMES, window=2 * PAGE),
    )
    assert cache.windows is not None
    lock = cache.lock(cache.match(b"", bytes(20))).detach()
    pages, held = cache.allocate(np.zeros(2, dtype=np.int32)), cache.windows.allocate(np.zeros(2, dtype=np.int32))
    assert pages is not None
    cache.insert(lock, bytes(16), pages)
    cache.keep_tail(lock, 0, held)
    cache.windows.drop(held)
    cache.release(lock)
    assert cache.store.num_to_upload == 2 + 2 * FRAMES
    return cache


def test_nobody_waits_for_tails_that_left_before_their_upload_and_they_are_counted() -> None:
    cache = cache_of_a_tail(num_host_pages=40)
    cache.flush()
    assert cache.store.num_to_upload == 0
    assert cache.store.begin_uploads() == ([], [])
    assert cache.stats().num_not_uploaded == 2 + 2 * FRAMES


@pytest.mark.parametrize("num_spare", [0, 1])
def test_nobody_waits_for_a_tail_that_does_not_fit_on_the_host(num_spare: int) -> None:
    """Else a server that ends would wait for its upload as long as it may. Page 0 of the host holds nothing."""
    cache = cache_of_a_tail(num_host_pages=2 * FRAMES + num_spare)
    for _ in range(6):
        offloads = cache.begin_offloads(8)
        uploads, stages = cache.store.begin_uploads()
        for copy in (*offloads, *uploads, *stages):
            cache.complete(copy.op, ok=True)
    assert cache.store.num_to_upload == 0 and not cache.store.has_uploads
    assert cache.stats().num_not_uploaded == (0 if num_spare else 2 * FRAMES)


@pytest.mark.parametrize("admission", HostAdmission)
@pytest.mark.parametrize("num_host_pages", [24, 70])
def test_resume_points_go_to_a_store_and_come_back_whole(num_host_pages: int, admission: HostAdmission) -> None:
    num_fetched = num_alone = num_staged = 0
    for seed in range(9):
        print("seed", seed)
        runs = StoredRuns(
            seed, num_host_pages, admission, has_windows=seed % 3 > 0, num_slots=[0, 9, 9][(seed + 1) % 3]
        )
        for _ in range(160):
            runs.step()
        runs.close()
        num_fetched, num_alone = num_fetched + runs.num_fetched, num_alone + runs.num_alone
        num_staged += runs.num_staged
    assert num_fetched > 2 and num_alone > 0, (num_fetched, num_alone)
    assert num_staged > 0 or admission is HostAdmission.SELECTIVE
