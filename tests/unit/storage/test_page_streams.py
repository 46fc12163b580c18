"""Copies through streams in whatever order these run: right bytes, in few pieces, and stores give way before each."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hiserve.cache.storage import page_streams
from hiserve.cache.storage.cuda_transfer import CudaTransfers
from hiserve.cache.storage.page_streams import PageStreams
from hiserve.cache.storage.transfer import TransferQueue
from hiserve.core.kv_groups import Space
from hiserve.core.transfers import CopyKind, PageCopy
from tests.helpers.fake_cuda import FakeCuda, install
from tests.helpers.host import make_run
from tests.helpers.transfers import THREAD, WINDOWED, TransferBench, hold_copies, ints, make_image
from tests.helpers.waiting import PATIENCE_S

NUM_PAGES, PAGES_PER_SLOT, PAGES_PER_PIECE = 60, 3, 7
SEED = random.randrange(2**32)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferBench]:
    bench = TransferBench(THREAD, num_pages=NUM_PAGES)
    monkeypatch.setattr(bench.host.prefault, "pages_per_piece", PAGES_PER_PIECE)
    yield bench
    bench.close()


def make_streams(bench: TransferBench, kind: CopyKind, *, direct: bool = False) -> PageStreams:
    streams = PageStreams(
        bench.device,
        bench.host,
        kind,
        staging_bytes=2 * PAGES_PER_SLOT * bench.page_bytes,
        max_direct_page_bytes=bench.page_bytes if direct else 0,
        min_layer_bytes=0,
    )
    streams.compile()
    return streams


def orders(rng: random.Random) -> list[tuple[list[int], list[int]]]:
    """Device pages and host pages of a few orders that share none; half of the host's are adjacent."""
    ours, theirs = rng.sample(range(1, NUM_PAGES), 44), list(range(10, 54))
    theirs[:22] = rng.sample(theirs[:22], 22)
    cuts = [0, *sorted(rng.sample(range(1, 44), 4)), 44]
    return [(ours[a:b], theirs[a:b]) for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("direct", [False, True])
def test_every_byte_arrives_whichever_stream_runs_first(
    bench: TransferBench, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for _ in range(30):
        device = FakeCuda(rng.randrange(2**32))
        with monkeypatch.context() as patch:
            install(patch, device)
            before = [bench.page(page) for page in range(NUM_PAGES)]
            told = orders(rng)
            for kind in (CopyKind.OFFLOAD, CopyKind.LOAD):
                streams = make_streams(bench, kind, direct=direct)
                for op, (ours, theirs) in enumerate(told):
                    streams.begin(PageCopy(op, kind, ints(ours), ints(theirs), 0), None, lambda room: None)
                    device.run(rng.randrange(20))
                device.run()
                if kind is CopyKind.OFFLOAD:
                    for plane in bench.planes():
                        plane.zero_()
            assert not any(stream.ops for stream in device.streams)
        for page in {page for ours, _ in told for page in ours}:
            assert torch.equal(bench.page(page), before[page]), page


@pytest.fixture
def windowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferBench]:
    """Beside the pages those of windows, whose images take three pages of the host each."""
    bench = TransferBench(THREAD, groups=WINDOWED, num_pages=NUM_PAGES)
    monkeypatch.setattr(bench.host.prefault, "pages_per_piece", PAGES_PER_PIECE)
    yield bench
    bench.close()


@pytest.mark.parametrize("direct", [False, True])
def test_every_byte_of_a_resume_point_arrives_whichever_stream_runs_first(
    windowed: TransferBench, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """H10. Frames lie anywhere; slots have room for one image, and a tail has several."""
    print(f"seed {SEED}")
    rng, bench = random.Random(SEED), windowed
    history, windows = bench.pages(), bench.pages(Space.WINDOW)
    for _ in range(20):
        device = FakeCuda(rng.randrange(2**32))
        with monkeypatch.context() as patch:
            install(patch, device)
            store, load = (make_streams(bench, kind, direct=direct) for kind in (CopyKind.OFFLOAD, CopyKind.LOAD))
            there, nothing = ints(rng.sample(range(1, NUM_PAGES), 29)), ints([])
            host, image = there[:14], make_image(there[14:])
            ours, into = (ints(rng.sample(range(1, NUM_PAGES), 14)) for _ in range(2))
            tail, tail_into = ours[:5], into[:5]
            for order in (
                PageCopy(1, CopyKind.OFFLOAD, ours, host, 0),
                PageCopy(2, CopyKind.OFFLOAD, nothing, nothing, 0, None, tail, image),
            ):
                store.begin(order, None, lambda room: None)
                device.run(rng.randrange(20))
            device.run()
            load.begin(PageCopy(3, CopyKind.LOAD, into, host, 0, None, tail_into, image), None, lambda room: None)
            device.run()
            assert not any(stream.ops for stream in device.streams)
        history[into], windows[tail_into] = history[ours], windows[tail]
        assert torch.equal(bench.pages(), history) and torch.equal(bench.pages(Space.WINDOW), windows)


def test_the_last_event_of_a_load_is_behind_its_tail(windowed: TransferBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for it, whichever layer they ask for: a load of a model with window pages is not split by layers."""
    print(f"seed {SEED}")
    bench, nothing = windowed, ints([])
    windows = bench.pages(Space.WINDOW)
    for seed in range(SEED, SEED + 20):
        device = FakeCuda(seed)
        with monkeypatch.context() as patch:
            install(patch, device)
            tail, image = ints([1, 2, 3]), make_image(range(10, 19))
            store, load = (make_streams(bench, kind, direct=True) for kind in (CopyKind.OFFLOAD, CopyKind.LOAD))
            store.begin(PageCopy(1, CopyKind.OFFLOAD, nothing, nothing, 0, None, tail, image), None, lambda room: None)
            device.run()
            order = PageCopy(2, CopyKind.LOAD, ints([4]), ints([5]), 0, None, ints([7, 8, 9]), image)
            flight = load.begin(order, None, lambda room: None, by_layer=True)
            assert flight.layers == () and flight.end_of(4) is flight.end
            device.default.wait_event(flight.end)
            seen: list[torch.Tensor] = []
            device.default.enqueue("forward", lambda seen=seen: seen.append(bench.pages(Space.WINDOW)[7:10]))
            device.run()
        assert torch.equal(seen[0], windows[1:4])
        for page in (7, 8, 9):
            bench.fill(page, 0.0, Space.WINDOW)


@pytest.mark.parametrize("direct", [False, True])
def test_an_offload_reads_what_was_computed_before_its_fence(
    bench: TransferBench, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    print(f"seed {SEED}")
    pages = ints(range(1, 9))
    for seed in range(SEED, SEED + 20):
        device = FakeCuda(seed)
        install(monkeypatch, device)
        streams, fence = make_streams(bench, CopyKind.OFFLOAD, direct=direct), device.cuda.Event()
        device.run()
        fence.record(device.default)
        streams.begin(PageCopy(1, CopyKind.OFFLOAD, pages, pages, 0), fence, lambda room: None)
        num_done = len(device.log)
        device.run()
        done = device.log[num_done:]
        assert done.index((device.default.cuda_stream, "record")) < [what for _, what in done].index("kernel"), done


@pytest.mark.parametrize("kind", [CopyKind.OFFLOAD, CopyKind.LOAD])
def test_adjacent_pages_cross_at_once_unless_they_were_pinned_apart(
    bench: TransferBench, monkeypatch: pytest.MonkeyPatch, kind: CopyKind
) -> None:
    device = FakeCuda()
    install(monkeypatch, device)
    ours, theirs = ints([31, 32, 33, 34, 35, 36, 37, 38, 39]), ints([3, 2, 6, 8, 7, 5, 20, 22, 23])
    make_streams(bench, kind).begin(PageCopy(1, kind, ours, theirs, 0), None, lambda room: None)
    start = bench.host.span(0, 1).data_ptr()
    host = [(run[0] if kind is CopyKind.OFFLOAD else run[1], run[2]) for run in device.runs]
    pages = [((address - start) / bench.page_bytes, num_bytes / bench.page_bytes) for address, num_bytes in host]
    assert pages == [(2, 2), (5, 1), (6, 1), (7, 2), (20, 1), (22, 2)]


@pytest.mark.parametrize("kind", [CopyKind.OFFLOAD, CopyKind.LOAD])
def test_frames_cross_in_their_order_whole_images_at_once(
    windowed: TransferBench, monkeypatch: pytest.MonkeyPatch, kind: CopyKind
) -> None:
    """A slot holds one image; its frames are not sorted, and cut where they were pinned apart."""
    device, nothing = FakeCuda(), ints([])
    install(monkeypatch, device)
    image = make_image([3, 4, 5, 6, 7, 8, 22, 20, 21])
    order = PageCopy(1, kind, nothing, nothing, 0, None, ints([31, 32, 33]), image)
    make_streams(windowed, kind, direct=True).begin(order, None, lambda room: None)
    start = windowed.host.span(0, 1).data_ptr()
    host = [(run[0] if kind is CopyKind.OFFLOAD else run[1], run[2]) for run in device.runs]
    pages = [((address - start) / windowed.page_bytes, size / windowed.page_bytes) for address, size in host]
    assert pages == [(3, 3), (6, 1), (7, 2), (22, 1), (20, 1), (21, 1)]


def tail_order(op: int, windows: list[int], frames: list[int]) -> PageCopy:
    return PageCopy(op, CopyKind.OFFLOAD, ints([]), ints([]), 0, None, ints(windows), make_image(frames))


TAILS = [  # two, one and two window pages, of three frames each
    tail_order(1, [31, 32], [3, 4, 5, 6, 2, 1]),
    tail_order(2, [7], [8, 9, 10]),
    tail_order(3, [33, 34], [11, 12, 13, 22, 20, 21]),
]


def test_tails_of_a_step_are_gathered_at_once_and_cross_at_once(
    windowed: TransferBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cost the calls of one: in the time of calls nobody else has the interpreter."""
    device, bench, calls = FakeCuda(), windowed, list[int]()
    install(monkeypatch, device)
    monkeypatch.setattr(bench.host.prefault, "pages_per_piece", NUM_PAGES)
    monkeypatch.setattr("tests.unit.storage.test_page_streams.PAGES_PER_SLOT", 15)
    streams = make_streams(bench, CopyKind.OFFLOAD, direct=True)
    for first, *others in (TAILS[:1], TAILS):
        num_calls, device.runs = device.num_calls, []
        flight = streams.begin(first, None, lambda room: None, tails=others)
        calls.append(device.num_calls - num_calls)
    assert calls[0] == calls[1] and flight.copies == tuple(TAILS)
    assert [flight.seconds(copy) for copy in TAILS] == [0.4e-3, 0.2e-3, 0.4e-3]
    assert [size / bench.page_bytes for _, _, size in device.runs] == [4, 1, 1, 6, 1, 2], (
        "adjacent ones of two tails are one"
    )
    device.run()
    history, windows = bench.pages(), bench.pages(Space.WINDOW)
    load = make_streams(bench, CopyKind.LOAD, direct=True)
    for copy in TAILS:
        for page in copy.window_pages.tolist():
            bench.fill(page, 0.0, Space.WINDOW)
        order = PageCopy(9, CopyKind.LOAD, ints([]), ints([]), 0, None, copy.window_pages, copy.image)
        load.begin(order, None, lambda room: None)
    device.run()
    assert torch.equal(bench.pages(Space.WINDOW), windows) and torch.equal(bench.pages(), history)


def test_tails_that_wait_behind_a_copy_are_taken_together_as_far_as_one_slot_holds_them(
    windowed: TransferBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a tail behind history is taken with those before it, nor one more than the slot holds."""
    device, begin, begun = FakeCuda(), PageStreams.begin, list[list[int]]()
    install(monkeypatch, device)
    monkeypatch.setattr(windowed.host.prefault, "pages_per_piece", NUM_PAGES)
    limits = {"max_queued_bytes": 1 << 40, "max_offload_bytes_per_s": 1e15}
    staging_bytes = 2 * 9 * windowed.page_bytes * 5 // 2  # slots of nine frames
    engine = CudaTransfers(windowed.device, windowed.host, staging_bytes=staging_bytes, **limits)  # type: ignore[arg-type]
    may_begin = threading.Event()

    def logged(streams: PageStreams, copy: PageCopy, *where: Any, tails: tuple[PageCopy, ...] = (), **how: Any) -> Any:
        begun.append([each.op for each in (copy, *tails)])
        assert may_begin.wait(PATIENCE_S)
        return begin(streams, copy, *where, tails=tails, **how)

    monkeypatch.setattr(PageStreams, "begin", logged)
    pages = ints([40])
    for order in (
        PageCopy(7, CopyKind.OFFLOAD, pages, pages, 0, make_run([40], [40])),
        *TAILS,
        PageCopy(8, CopyKind.OFFLOAD, ints([41]), ints([41]), 0, make_run([41], [41])),
        tail_order(9, [8], [50, 51, 52]),
    ):
        engine.start(order)
    may_begin.set()
    acks: list[Any] = []
    while len(acks) < 6:
        acks += engine.poll(PATIENCE_S)
    engine.close()
    assert [(ack.op, ack.reason) for ack in acks] == [(op, "") for op in (7, 1, 2, 3, 8, 9)]
    assert begun == [[7], [1, 2], [3], [8], [9]]


@pytest.mark.parametrize("kind", [CopyKind.OFFLOAD, CopyKind.LOAD])
def test_the_copy_engine_waits_for_another_stream_after_each_piece(
    bench: TransferBench, monkeypatch: pytest.MonkeyPatch, kind: CopyKind
) -> None:
    print(f"seed {SEED}")
    for seed in range(SEED, SEED + 20):
        device = FakeCuda(seed)
        install(monkeypatch, device)
        streams = make_streams(bench, kind)
        for start in (1, 21):
            pages = ints(range(start, start + 20))
            streams.begin(PageCopy(start, kind, pages, pages, 0), None, lambda room: None)
        device.run()
        crossing = streams._crossing.cuda_stream
        pieces = [number for number, each in enumerate(device.log) if each == (crossing, "cross")]
        assert len(pieces) == 14
        for begin, end in itertools.pairwise(pieces):
            assert (streams._kernels.cuda_stream, "record") in device.log[begin:end], device.log[begin:end]


def test_a_piece_costs_six_calls_and_each_is_announced(bench: TransferBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are time in which nobody else has the interpreter: two kernels here, as there are two groups."""
    device = FakeCuda()
    install(monkeypatch, device)
    for kind in (CopyKind.OFFLOAD, CopyKind.LOAD):
        rooms: list[object] = []
        streams, calls = make_streams(bench, kind), []
        for num_pieces in (1, 5):
            pages = ints(range(1, 1 + num_pieces * PAGES_PER_SLOT))
            before = device.num_calls
            streams.begin(PageCopy(1, kind, pages, pages, 0), None, rooms.append)
            calls.append(device.num_calls - before)
        assert (calls[1] - calls[0]) / 4 == len(bench.groups) + 1 + 4  # kernels, a crossing, events
        assert [room is None for room in rooms] == [True, False] + [True] + 5 * [False]  # None: before all pieces
    rooms = []
    streams = make_streams(bench, CopyKind.OFFLOAD, direct=True)
    streams.begin(PageCopy(1, CopyKind.OFFLOAD, ints([1, 2]), ints([1, 2]), 0), None, rooms.append)
    assert rooms == [None]


@pytest.mark.parametrize("kind", [CopyKind.OFFLOAD, CopyKind.LOAD])
def test_pieces_are_equal_and_nothing_is_left_to_prepare_while_one_crosses(
    bench: TransferBench, monkeypatch: pytest.MonkeyPatch, kind: CopyKind
) -> None:
    """Behind a short piece, or while an order is prepared, the link would be idle."""
    device = FakeCuda()
    install(monkeypatch, device)
    monkeypatch.setattr(bench.host.prefault, "pages_per_piece", NUM_PAGES)
    upload, begun = PageStreams._upload, []

    def logged(streams: PageStreams, ours: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        begun.append("prepared")
        return upload(streams, ours, rows)

    streams = make_streams(bench, kind)
    monkeypatch.setattr(PageStreams, "_upload", logged)
    pages = ints(range(1, PAGES_PER_SLOT + 2))
    wait = lambda room: begun.append("yielded" if room is None else f"{len(device.runs)} crossed")  # noqa: E731
    streams.begin(PageCopy(1, kind, pages, pages, 0), None, wait)
    assert begun == ["yielded", "prepared", "0 crossed", "1 crossed"]
    assert [num_bytes / bench.page_bytes for _, _, num_bytes in device.runs] == [2, 2]


def test_stores_give_way_before_each_piece_and_loads_never(
    bench: TransferBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gave_way: list[int] = []
    begun: list[int] = []
    install(monkeypatch, FakeCuda())
    monkeypatch.setattr(bench.host.prefault, "pages_per_piece", NUM_PAGES)
    monkeypatch.setattr(TransferQueue, "yield_to_launch", lambda queue: gave_way.append(begun[-1]))
    engine = CudaTransfers(
        bench.device,
        bench.host,
        max_queued_bytes=1 << 40,
        max_offload_bytes_per_s=1e15,
        max_direct_page_bytes=0,
        staging_bytes=5 * PAGES_PER_SLOT * bench.page_bytes,
    )
    hold_copies(engine, lambda copy: begun.append(copy.op))  # type: ignore[func-returns-value]
    pages = ints(range(1, 1 + 4 * PAGES_PER_SLOT))
    engine.start(PageCopy(1, CopyKind.OFFLOAD, pages, pages, 0, make_run(pages.tolist(), pages.tolist())))
    acks = [engine.poll(30)]
    engine.start(PageCopy(2, CopyKind.LOAD, pages, pages, 0))
    acks.append(engine.poll(30))
    engine.close()
    assert [(ack.op, ack.reason) for each in acks for ack in each] == [(1, ""), (2, "")]
    assert gave_way == 5 * [1]  # before it is prepared, and before each of four pieces


@pytest.mark.parametrize("kind", [CopyKind.OFFLOAD, CopyKind.LOAD])
def test_copies_of_tails_too_are_compiled_before_the_first_one(
    kind: CopyKind, windowed: TransferBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first tail waits for a compiler."""
    install(monkeypatch, FakeCuda())
    streams, sizes = make_streams(windowed, kind, direct=False), list[int]()
    monkeypatch.setattr(page_streams, "_move", lambda moves, indices: sizes.append(len(moves)))
    streams.compile()
    assert sizes == [2, 2], "the groups of history, and those of windows"


def test_a_load_whose_tail_finds_no_memory_fails_when_its_history_writes_no_more(
    windowed: TransferBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H10. Its pages are free after the answer, and may have a new tenant."""
    device, sizes = FakeCuda(), list[int]()
    install(monkeypatch, device)
    monkeypatch.setattr(windowed.host.prefault, "pages_per_piece", NUM_PAGES)
    engine = CudaTransfers(windowed.device, windowed.host, max_queued_bytes=1 << 40, max_offload_bytes_per_s=1e15)
    device.run()

    def fail(streams: PageStreams, ours: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        sizes.append(ours.size)
        return torch.from_numpy(np.stack((ours, rows))) if ours.size > 1 else torch.empty(1 << 55, dtype=torch.uint8)

    monkeypatch.setattr(PageStreams, "_upload", fail)
    copy = PageCopy(1, CopyKind.LOAD, ints([4, 5]), ints([8, 9]), 0, None, ints([7]), make_image([10, 11, 12]))
    engine.start(copy, by_layer=True)
    acks = engine.poll(PATIENCE_S)
    left = [stream.ops for stream in device.streams if stream.ops]
    engine.close()
    assert [(ack.op, ack.reason) for ack in acks] == [(1, "out_of_memory")] and not engine._by_layer
    assert sizes == [2, 1] and not left and device.log[-1][1] == "kernel"


def test_an_offload_that_fails_between_two_pieces_writes_no_more_after_its_answer(
    windowed: TransferBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host pages are free then, and another offload may fill them."""
    device, move, sizes = FakeCuda(), page_streams._move, list[int]()
    install(monkeypatch, device)
    monkeypatch.setattr(windowed.host.prefault, "pages_per_piece", NUM_PAGES)
    limits = {"max_queued_bytes": 1 << 40, "max_offload_bytes_per_s": 1e15}
    engine = CudaTransfers(windowed.device, windowed.host, max_direct_page_bytes=0, staging_bytes=1, **limits)
    device.run()

    def fail(moves: list[Any], indices: torch.Tensor) -> None:
        sizes.append(indices.shape[1])
        if len(sizes) == 2:
            raise MemoryError
        move(moves, indices)

    monkeypatch.setattr(page_streams, "_move", fail)
    image = make_image([8, 9, 10, 11, 12, 13])
    engine.start(PageCopy(1, CopyKind.OFFLOAD, ints([]), ints([]), 0, None, ints([7, 5]), image))
    acks = engine.poll(PATIENCE_S)
    left = [stream.ops for stream in device.streams if stream.ops]
    engine.close()
    assert [(ack.op, ack.reason) for ack in acks] == [(1, "out_of_memory")]
    assert sizes == [1, 1] and not left and "cross" in {what for _, what in device.log}


def test_the_engine_tells_its_queue_of_launches(bench: TransferBench, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCuda())
    engine = CudaTransfers(bench.device, bench.host, max_queued_bytes=1 << 40, max_offload_bytes_per_s=1e15)
    seen = []
    for tell in (engine.launch_begins, engine.launch_ends, engine.launch_begins, lambda: engine.forward_done(1)):
        tell()
        seen.append(engine._is_launching)
    engine.close()
    assert seen == [True, False, True, False]
