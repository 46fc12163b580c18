"""Pages between the host and a store that is slow, fails, lies, fills up or hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hiserve.cache.storage import store_transfers
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.records import PageState
from hiserve.cache.storage.segment import PageLayout, Segment
from hiserve.cache.storage.store import PageStore, store_key, tail_key
from hiserve.cache.storage.store_transfers import GARBLED, MAX_ENDS, NO_CHECKSUM, NOT_DELIVERED, REFUSED, StoreTransfers
from hiserve.core.kv_groups import CacheGroupSpec
from hiserve.core.transfers import CopyAck, CopyKind, PageCopy, PageRun, StoreEnds, StoreLookup, TailImage
from hiserve.errors import InvariantError
from tests.helpers.host import PAGE_SIZE, content, make_layout, make_run
from tests.helpers.sim_store import Fault, SimStore, Step

GROUPS = (CacheGroupSpec(name="kv", num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32"),)
PAGE_BYTES = PageLayout(GROUPS, PAGE_SIZE).page_bytes
NOTHING = np.empty(0, dtype=np.int32)
TIMEOUT_S = 60.0
PLENTY = 1e15
DEFAULTS = {"max_upload_bytes_per_s": PLENTY, "checksum_timeout_s": TIMEOUT_S}


@pytest.fixture
def host() -> Iterator[HostPool]:
    segment = Segment.anonymous(make_layout(16, PAGE_BYTES))
    pool = HostPool(segment, GROUPS, num_threads=1, max_checksum_bytes_per_s=PLENTY)
    pool.clear()
    assert pool.prefault.wait(16, TIMEOUT_S)
    yield pool
    pool.close()
    segment.close()


@pytest.fixture
def make(host: HostPool) -> Iterator[Callable[..., StoreTransfers]]:
    made: list[StoreTransfers] = []

    def transfers(store: PageStore, **options: float) -> StoreTransfers:
        made.append(StoreTransfers(store, host, **(DEFAULTS | options)))  # type: ignore[arg-type]
        return made[-1]

    yield transfers
    for each in made:
        each.close()


def filled_store(run: PageRun, script: Sequence[Step] = ()) -> SimStore:
    store = SimStore([Step(), *script])
    keys = [store_key(digest) for digest in run.digests]
    store.put(keys, [memoryview(content(digest, PAGE_BYTES).tobytes()) for digest in run.digests])
    return store


def written(host: HostPool, run: PageRun) -> PageRun:
    host.begin(run)
    for page, digest in zip(run.pages.tolist(), run.digests, strict=True):
        host.buffer(page)[:] = content(digest, PAGE_BYTES).data
    host.finish(run.pages)
    return run


def copy_of(run: PageRun, kind: CopyKind, op: int = 1) -> PageCopy:
    return PageCopy(op, kind, NOTHING, run.pages, 0, run)


def next_ack(transfers: StoreTransfers) -> CopyAck:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        if acks := transfers.poll():
            (ack,) = acks
            return ack
        time.sleep(0.001)
    raise AssertionError("no ack came")


def next_found(transfers: StoreTransfers) -> StoreEnds:
    end = time.monotonic() + TIMEOUT_S
    while not (found := transfers.take_found()):
        assert time.monotonic() < end, "no answer came"
        time.sleep(0.001)
    assert len(found) == 1
    return found[0]


def check_close_ends(transfers: StoreTransfers) -> None:
    closing = threading.Thread(target=transfers.close, daemon=True)
    closing.start()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()


RUN = make_run([3, 4, 9], [1, 2, 3])


def states(host: HostPool) -> list[PageState]:
    return [host.records.state(page) for page in RUN.pages.tolist()]


def test_a_lookup_tells_how_many_leading_pages_are_there(make: Callable[..., StoreTransfers]) -> None:
    transfers = make(filled_store(RUN))
    more = make_run([1, 2, 5, 6, 7], [1, 2, 3, 4, 5])
    transfers.look_up(StoreLookup(7, more.digests))
    assert next_found(transfers) == (7, (3,))
    transfers.look_up(StoreLookup(8, more.digests[3:]))
    assert next_found(transfers) == (8, ())


def test_a_prefetch_brings_pages_that_are_valid_and_get_a_checksum(
    host: HostPool, make: Callable[..., StoreTransfers]
) -> None:
    transfers = make(filled_store(RUN))
    transfers.start(copy_of(RUN, CopyKind.PREFETCH, 5))
    ack = next_ack(transfers)
    assert (ack.op, ack.reason, ack.num_pages, ack.num_bytes) == (5, "", 3, 3 * PAGE_BYTES)
    assert states(host) == [PageState.VALID] * 3
    for page, digest in zip(RUN.pages.tolist(), RUN.digests, strict=True):
        assert bytes(host.buffer(page)) == content(digest, PAGE_BYTES).tobytes()
    assert host.wait_sealed(RUN.pages, TIMEOUT_S)
    assert host.is_intact(RUN.pages)


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.LIE])
def test_pages_that_do_not_arrive_are_free_again(
    host: HostPool, make: Callable[..., StoreTransfers], fault: Fault
) -> None:
    transfers = make(filled_store(RUN, [Step(fault, after=1)]))
    transfers.start(copy_of(RUN, CopyKind.PREFETCH))
    ack = next_ack(transfers)
    assert (ack.reason, ack.num_pages, ack.num_bytes) == (NOT_DELIVERED, 1, PAGE_BYTES)
    assert states(host) == [PageState.VALID, PageState.FREE, PageState.FREE]


class Starved(SimStore):
    """Needs more memory than there is."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        np.empty(1 << 55, dtype=np.uint8)
        raise AssertionError("there was as much")

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        return self.get(keys, buffers)


def test_where_memory_runs_out_for_the_store_its_pages_do_not_arrive_and_those_after_it_are_asked_for(
    host: HostPool, make: Callable[..., StoreTransfers]
) -> None:
    transfers = make(Starved())
    for op in (1, 2):
        transfers.start(copy_of(RUN, CopyKind.PREFETCH, op))
        ack = next_ack(transfers)
        assert (ack.op, ack.reason, ack.num_pages) == (op, NOT_DELIVERED, 0)
        assert states(host) == [PageState.FREE] * 3
    transfers.start(copy_of(written(host, RUN), CopyKind.UPLOAD, 3))
    ack = next_ack(transfers)
    assert (ack.op, ack.reason, ack.num_pages) == (3, REFUSED, 0)


def test_an_upload_stores_what_a_prefetch_finds(host: HostPool, make: Callable[..., StoreTransfers]) -> None:
    store = SimStore()
    transfers = make(store)
    transfers.start(copy_of(written(host, RUN), CopyKind.UPLOAD))
    ack = next_ack(transfers)
    assert (ack.reason, ack.num_pages, ack.num_bytes) == ("", 3, 3 * PAGE_BYTES)
    host.free(RUN.pages)
    other = make_run([5, 6, 7], [1, 2, 3])
    transfers.start(copy_of(other, CopyKind.PREFETCH, 2))
    assert next_ack(transfers).num_pages == 3
    assert bytes(host.buffer(7)) == content(RUN.digests[2], PAGE_BYTES).tobytes()


def test_a_store_is_emptied_behind_the_uploads_that_were_begun(
    host: HostPool, make: Callable[..., StoreTransfers]
) -> None:
    store = SimStore()
    transfers = make(store)
    transfers.start(copy_of(written(host, RUN), CopyKind.UPLOAD))
    transfers.clear()
    assert next_ack(transfers).num_pages == 3
    end = time.monotonic() + TIMEOUT_S
    while store.stats().num_pages:
        assert time.monotonic() < end, "it was not emptied"
        time.sleep(0.001)
    transfers.look_up(StoreLookup(7, RUN.digests))
    assert next_found(transfers) == (7, ())


def test_pages_of_another_draft_revision_are_not_found(host: HostPool, make: Callable[..., StoreTransfers]) -> None:
    transfers = make(SimStore())
    transfers.start(copy_of(written(host, make_run([3, 4], [1, 2], draft_revision=8)), CopyKind.UPLOAD))
    assert next_ack(transfers).is_ok
    transfers.start(copy_of(make_run([5, 6], [1, 2], draft_revision=9), CopyKind.PREFETCH, 2))
    assert next_ack(transfers).num_pages == 0
    transfers.start(copy_of(make_run([5, 6], [1, 2], draft_revision=8), CopyKind.PREFETCH, 3))
    assert next_ack(transfers).num_pages == 2


def test_a_page_that_is_not_what_was_written_is_not_stored(host: HostPool, make: Callable[..., StoreTransfers]) -> None:
    store = SimStore()
    transfers = make(store)
    written(host, RUN)
    assert host.wait_sealed(RUN.pages, TIMEOUT_S)
    host.buffer(4)[5] ^= 1
    transfers.start(copy_of(RUN, CopyKind.UPLOAD))
    ack = next_ack(transfers)
    assert (ack.reason, ack.num_pages) == (GARBLED, 1)
    assert store.stats().num_pages == 1


def test_a_page_without_a_checksum_is_waited_for_and_then_not_stored(make: Callable[..., StoreTransfers]) -> None:
    segment = Segment.anonymous(make_layout(16, PAGE_BYTES))
    host = HostPool(segment, GROUPS, num_threads=1, max_checksum_bytes_per_s=PAGE_BYTES / 3600)  # one page an hour
    host.clear()
    store = SimStore()
    transfers = StoreTransfers(store, host, checksum_timeout_s=0.05)
    transfers.start(copy_of(written(host, RUN), CopyKind.UPLOAD))
    ack = next_ack(transfers)
    assert (ack.reason, ack.num_pages) == (NO_CHECKSUM, 0)
    assert store.stats().num_pages == 0
    transfers.close()
    host.close()
    segment.close()


def test_a_full_store_refuses(host: HostPool, make: Callable[..., StoreTransfers]) -> None:
    transfers = make(SimStore([Step(Fault.FULL, after=2)]))
    transfers.start(copy_of(written(host, RUN), CopyKind.UPLOAD))
    ack = next_ack(transfers)
    assert (ack.reason, ack.num_pages, ack.num_bytes) == (REFUSED, 2, 2 * PAGE_BYTES)


def test_uploads_keep_to_their_rate(host: HostPool, make: Callable[..., StoreTransfers]) -> None:
    transfers = make(SimStore(), max_upload_bytes_per_s=3 * PAGE_BYTES / 0.2)
    written(host, RUN)
    assert host.wait_sealed(RUN.pages, TIMEOUT_S)
    begin = time.monotonic()
    for op in range(3):
        transfers.start(copy_of(RUN, CopyKind.UPLOAD, op))
    for _ in range(3):
        next_ack(transfers)
    assert time.monotonic() - begin >= 0.4


def test_what_hangs_keeps_its_own_pages_and_hinders_neither_others_nor_the_end(
    host: HostPool, make: Callable[..., StoreTransfers]
) -> None:
    store = filled_store(RUN, [Step(Fault.HANG)])
    transfers = make(store)
    transfers.start(copy_of(RUN, CopyKind.PREFETCH, 1))
    while states(host)[0] is not PageState.WRITING:
        time.sleep(0.001)
    other = make_run([5, 6, 7], [1, 2, 3])
    transfers.start(copy_of(other, CopyKind.PREFETCH, 2))
    assert next_ack(transfers).op == 2
    transfers.look_up(StoreLookup(1, RUN.digests))
    assert next_found(transfers) == (1, (3,))
    assert states(host) == [PageState.WRITING] * 3
    check_close_ends(transfers)
    assert states(host) == [PageState.WRITING] * 3  # late bytes make nothing valid after the end


class Stuck(SimStore):
    """Not even closing it wakes what hangs in it."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        threading.Event().wait()
        return 0

    put = get


def test_the_end_waits_for_no_store_that_never_answers(host: HostPool) -> None:
    transfers = StoreTransfers(Stuck(), host)
    for op in range(8):
        transfers.start(copy_of(make_run([op + 1], [op]), CopyKind.PREFETCH, op))
    transfers.start(copy_of(written(host, make_run([12], [99])), CopyKind.UPLOAD, 9))
    check_close_ends(transfers)


def test_uploads_that_were_begun_are_ended_before_the_end(host: HostPool) -> None:
    store = SimStore()
    transfers = StoreTransfers(store, host, max_upload_bytes_per_s=PAGE_BYTES / 3600, close_timeout_s=TIMEOUT_S)
    for page in (3, 4, 9):
        transfers.start(copy_of(written(host, make_run([page], [page])), CopyKind.UPLOAD, page))
    transfers.close()
    assert store.stats().num_pages == 3


class Broken(SimStore):
    def exists(self, keys: Sequence[bytes]) -> int:
        raise ZeroDivisionError("a store that keeps no promise")


def test_a_thread_that_fails_is_heard_of(make: Callable[..., StoreTransfers]) -> None:
    transfers = make(Broken())
    transfers.look_up(StoreLookup(1, RUN.digests))
    with pytest.raises(InvariantError, match="keeps no promise"):
        next_ack(transfers)


FRAMES = np.array([5, 11], dtype=np.int32)
TAIL = TailImage(FRAMES, RUN.namespace, RUN.digests[-1], history=tuple(RUN.digests))


def write_tail(host: HostPool, image: TailImage) -> bytes:
    """Fills the frames of a tail; returns their bytes."""
    host.begin_tail(image)
    for frame in image.frames.tolist():
        host.buffer(frame)[:] = content(bytes([frame]), PAGE_BYTES).data
    host.finish(image.frames)
    return b"".join(bytes(host.buffer(frame)) for frame in image.frames.tolist())


def copy_of_tail(kind: CopyKind, run: PageRun | None = None, frames: Sequence[int] = FRAMES) -> PageCopy:
    image = replace(TAIL, frames=np.array(frames, dtype=np.int32))
    return PageCopy(7, kind, NOTHING, NOTHING if run is None else run.pages, 0, run, image=image)


@pytest.fixture
def stored(host: HostPool) -> tuple[SimStore, bytes]:
    """A store with the pages and the tail behind them, and the bytes of this."""
    store, image = filled_store(RUN), write_tail(host, TAIL)
    transfers = StoreTransfers(store, host, **DEFAULTS)
    transfers.start(copy_of_tail(CopyKind.UPLOAD))
    ack = next_ack(transfers)
    assert (ack.op, ack.reason, ack.num_pages, ack.num_bytes) == (7, "", 2, 2 * PAGE_BYTES)
    store.close = lambda: None  # type: ignore[method-assign]
    transfers.close()
    assert store.stats().num_pages == len(RUN.digests) + 1
    return store, image


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_tail_comes_with_the_history_before_it(
    is_alone: bool, host: HostPool, make: Callable[..., StoreTransfers], stored: tuple[SimStore, bytes]
) -> None:
    store, image = stored
    transfers = make(store)
    transfers.start(copy_of_tail(CopyKind.PREFETCH, None if is_alone else RUN, (8, 2)))
    ack = next_ack(transfers)
    assert (ack.reason, ack.num_pages) == ("", 2 if is_alone else 5)
    assert states(host) == [PageState.FREE if is_alone else PageState.VALID] * 3
    assert [host.records.state(frame) for frame in (8, 2)] == [PageState.VALID] * 2
    assert bytes(host.buffer(8)) + bytes(host.buffer(2)) == image
    assert host.records.digest(8) == TAIL.digest


class Used(SimStore):
    """Records what each call names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[bytes]] = []

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        self.calls.append([*before, *keys])
        return super().get(keys, buffers)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        self.calls.append([*before, *keys])
        return super().put(keys, buffers)


def test_all_of_its_history_is_used_with_a_tail(host: HostPool, make: Callable[..., StoreTransfers]) -> None:
    store = Used()
    SimStore.put(store, [*map(store_key, RUN.digests)], [memoryview(bytearray(PAGE_BYTES))] * 3)
    transfers = make(store)
    write_tail(host, TAIL)
    part = replace(make_run([7], [3]), digests=RUN.digests[2:])
    for copy in (
        copy_of_tail(CopyKind.UPLOAD),
        copy_of_tail(CopyKind.PREFETCH, None, (8, 2)),
        copy_of_tail(CopyKind.PREFETCH, part, (3, 6)),
    ):
        transfers.start(copy)
        next_ack(transfers)
    keys = [*map(store_key, RUN.digests), tail_key(TAIL.digest)]
    assert store.calls == [keys, keys, keys]


def test_the_page_before_a_run_is_used_with_it(host: HostPool, make: Callable[..., StoreTransfers]) -> None:
    store, first = Used(), written(host, make_run([3], [1]))
    transfers = make(store)
    second = written(host, replace(make_run([4], [2]), parent=first.digests[0]))
    for run in (first, second):
        for kind in (CopyKind.UPLOAD, CopyKind.PREFETCH):
            if kind is CopyKind.PREFETCH:
                host.free(run.pages)
            transfers.start(copy_of(run, kind))
            next_ack(transfers)
    keys = [store_key(each.digests[0]) for each in (first, second)]
    assert store.calls == [keys[:1], keys[:1], keys, keys]


def test_a_tail_is_not_stored_where_a_page_before_it_is_missing(
    host: HostPool, make: Callable[..., StoreTransfers]
) -> None:
    store = filled_store(RUN)
    del store._pages[store_key(RUN.digests[1])]
    write_tail(host, TAIL)
    transfers = make(store)
    transfers.start(copy_of_tail(CopyKind.UPLOAD))
    ack = next_ack(transfers)
    assert (ack.reason, ack.num_pages) == (REFUSED, 0) and store.stats().num_pages == 2


@pytest.mark.parametrize(
    ("step", "num_pages"),
    [(Step(Fault.LIE, after=3), 3), (Step(Fault.FAIL, after=3), 3), (Step(Fault.LIE, after=1), 1)],
)
def test_a_tail_that_is_damaged_or_whose_history_is_does_not_come(
    step: Step, num_pages: int, host: HostPool, make: Callable[..., StoreTransfers], stored: tuple[SimStore, bytes]
) -> None:
    store, _ = stored
    store._script = iter([step])
    transfers = make(store)
    transfers.start(copy_of_tail(CopyKind.PREFETCH, RUN, (8, 2)))
    ack = next_ack(transfers)
    assert (ack.reason, ack.num_pages) == (NOT_DELIVERED, num_pages)
    assert [host.records.state(frame) for frame in (8, 2)] == [PageState.FREE] * 2


def test_a_tail_of_which_a_frame_changed_is_not_stored(host: HostPool, make: Callable[..., StoreTransfers]) -> None:
    store = SimStore()
    write_tail(host, TAIL)
    assert host.wait_checksums(TIMEOUT_S)
    host.buffer(11)[0] ^= 1
    transfers = make(store)
    transfers.start(copy_of_tail(CopyKind.UPLOAD))
    ack = next_ack(transfers)
    assert (ack.reason, ack.num_pages) == (GARBLED, 0) and store.stats().num_pages == 0


@pytest.mark.parametrize(
    ("num_here", "missing", "found"),
    [(0, (), (2, 3)), (0, (1,), ()), (1, (1,), ()), (2, (0, 1), (2, 3)), (2, (2,), (2,)), (3, (0, 1, 2), (2, 3))],
)
def test_a_lookup_finds_the_tails_behind_pages_that_are_here_or_there(
    num_here: int,
    missing: tuple[int, ...],
    found: tuple[int, ...],
    make: Callable[..., StoreTransfers],
    stored: tuple[SimStore, bytes],
) -> None:
    store, _ = stored
    for at in missing:
        del store._pages[store_key(RUN.digests[at])]
    more = make_run([1, 2, 5, 6, 7], [1, 2, 3, 4, 5])
    blank = [memoryview(bytearray(PAGE_BYTES))]
    store.put([store_key(more.digests[3])], blank)
    store.put([tail_key(more.digests[1])], blank)
    transfers = make(store)
    transfers.look_up(StoreLookup(7, more.digests, num_here, needs_tail=True))
    assert next_found(transfers) == (7, found)


def test_a_lookup_finds_the_deepest_of_many_tails(
    make: Callable[..., StoreTransfers], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = make_run([*range(1, 13)], [*range(12)]), SimStore()
    for key in (store_key, tail_key):
        store.put([*map(key, run.digests)], [memoryview(bytearray(PAGE_BYTES))] * 12)
    transfers = make(store)
    transfers.look_up(StoreLookup(7, run.digests, needs_tail=True))
    assert next_found(transfers) == (7, tuple(range(13 - MAX_ENDS, 13)))
    monkeypatch.setattr(store_transfers, "MAX_PAGES_BEFORE", 2)
    transfers.look_up(StoreLookup(8, run.digests, needs_tail=True))
    assert next_found(transfers) == (8, (10, 11, 12))
