"""First touch: pages become ready from the first on, keep what they hold, and are pinned in whole pieces."""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hiserve.cache.storage import prefault as touches
from hiserve.cache.storage.prefault import PinningThrottle, Populate, Prefault
from hiserve.cache.storage.segment import Segment
from hiserve.errors import ResourceError
from tests.helpers.clock import Clock
from tests.helpers.host import make_layout
from tests.helpers.waiting import PATIENCE_S

MIB = 1 << 20


class Pins:
    """Registers memory on paper."""

    def __init__(self, fails_after: int = 10**6) -> None:
        self.pieces: dict[int, int] = {}
        self.unregistered: list[int] = []
        self._fails_after = fails_after

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.pieces) == self._fails_after:
            raise OSError(errno.ENOMEM, "no more pins")
        self.pieces[address] = num_bytes

    def unregister(self, address: int) -> None:
        self.unregistered.append(address)


class Gate:
    """Populates the pieces that it was told to let through, and only then returns."""

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)
        self.offsets: list[int] = []

    def __call__(self, offset: int, address: int, num_bytes: int) -> None:
        assert self.let.acquire(timeout=PATIENCE_S)
        self.offsets.append(offset)


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.anonymous(make_layout(16, page_bytes=MIB))
    yield made
    made.close()


def allocated(segment: Segment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_page_becomes_resident_and_keeps_what_it_holds(segment: Segment, num_threads: int) -> None:
    segment.pages[5] = 7
    assert allocated(segment) < 3 * MIB
    prefault = Prefault(segment, num_threads=num_threads, piece_bytes=4 * MIB)
    assert prefault.wait(16, timeout_s=PATIENCE_S)
    assert prefault.num_ready_pages == 16
    assert allocated(segment) >= 16 * MIB
    assert (segment.pages[5] == 7).all()
    assert not segment.pages[6].any()
    prefault.close()


def test_pages_become_ready_piece_by_piece(segment: Segment) -> None:
    gate = Gate()
    prefault = Prefault(segment, num_threads=1, piece_bytes=5 * MIB, populate=gate)
    assert prefault.pages_per_piece == 5
    for expected in (0, 5, 10, 15, 16):
        assert prefault.wait(expected, timeout_s=PATIENCE_S)
        assert prefault.num_ready_pages == expected
        gate.let.release()
    assert gate.offsets == [segment.layout.pages_offset + 5 * MIB * piece for piece in range(4)]
    prefault.close()


def test_a_piece_that_is_done_early_waits_for_those_before_it(segment: Segment) -> None:
    hold, second = threading.Event(), threading.Event()

    def populate(offset: int, address: int, num_bytes: int) -> None:
        if offset == segment.layout.pages_offset:
            assert hold.wait(PATIENCE_S)
        else:
            second.set()

    prefault = Prefault(segment, num_threads=2, piece_bytes=4 * MIB, populate=populate)
    assert second.wait(PATIENCE_S)
    assert not prefault.wait(1, timeout_s=0.05)
    assert prefault.num_ready_pages == 0
    hold.set()
    assert prefault.wait(16, timeout_s=PATIENCE_S)
    prefault.close()


def test_closing_stops_the_work(segment: Segment) -> None:
    gate = Gate()
    prefault = Prefault(segment, num_threads=1, piece_bytes=MIB, populate=gate)
    gate.let.release(2)
    assert prefault.wait(2, timeout_s=PATIENCE_S)
    closing = threading.Thread(target=prefault.close)
    closing.start()
    assert prefault._stop.wait(PATIENCE_S)
    gate.let.release(20)
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert prefault.num_ready_pages <= 3
    assert len(gate.offsets) <= 3


def test_pieces_are_pinned_one_at_a_time(segment: Segment) -> None:
    """Each holds up launches on the device while it lasts."""
    lock = threading.Lock()

    class Alone(Pins):
        def register(self, address: int, num_bytes: int) -> None:
            assert lock.acquire(blocking=False)
            time.sleep(0.002)
            super().register(address, num_bytes)
            lock.release()

    pins = Alone()
    prefault = Prefault(segment, num_threads=4, registrar=pins, piece_bytes=MIB)
    assert prefault.wait(16, timeout_s=PATIENCE_S)
    prefault.close()


@pytest.mark.parametrize(("page_bytes", "num_pages"), [(MIB, 16), (3 * 64, 5000), (5 * 4096 + 64, 200)])
def test_every_page_lies_in_one_pinned_piece(page_bytes: int, num_pages: int) -> None:
    """TC-60: no page lies across two registrations, and no two registrations share a page of memory."""
    segment = Segment.anonymous(make_layout(num_pages, page_bytes=page_bytes))
    pins = Pins()
    prefault = Prefault(segment, registrar=pins, piece_bytes=100_000)
    assert prefault.wait(num_pages, timeout_s=PATIENCE_S)
    start = segment.pages.ctypes.data
    pieces = sorted(pins.pieces.items())
    assert len(pieces) == prefault.num_pieces > 1
    assert all(address % 4096 == 0 for address, _ in pieces)
    assert all(first + length == second for (first, length), (second, _) in itertools.pairwise(pieces))
    assert sum(pins.pieces.values()) == segment.pages.nbytes
    for page in range(num_pages):
        piece = start + page // prefault.pages_per_piece * prefault.pages_per_piece * page_bytes
        assert piece <= start + page * page_bytes
        assert start + (page + 1) * page_bytes <= piece + pins.pieces[piece]
    prefault.close()
    assert sorted(pins.unregistered) == sorted(pins.pieces)
    segment.close()


def test_a_piece_that_cannot_be_pinned_ends_growth_with_the_reason(segment: Segment) -> None:
    pins = Pins(fails_after=2)
    prefault = Prefault(segment, num_threads=1, registrar=pins, piece_bytes=4 * MIB)
    assert not prefault.wait(16, timeout_s=PATIENCE_S)
    assert prefault.num_ready_pages == 8
    assert re.search(r"needs 0.0156 GiB.*after 0.00781 GiB: no more pins.*--host-cache-gib", str(prefault.failure))
    prefault.close()
    assert len(pins.unregistered) == 2


def failing(number: int) -> Callable[[int, int, int], None]:
    def populate(offset: int, address: int, num_bytes: int) -> None:
        if offset >= 8 * MIB:
            raise OSError(number, os.strerror(number))

    return populate


def test_memory_that_runs_out_is_told_with_the_flag_to_lower(segment: Segment) -> None:
    layout = replace(segment.layout)
    prefault = Prefault(segment, num_threads=1, piece_bytes=4 * MIB, populate=failing(errno.ENOMEM))
    assert not prefault.wait(16, timeout_s=PATIENCE_S)
    assert prefault.num_ready_pages == 8
    assert isinstance(prefault.failure, ResourceError)
    assert re.search(r"needs 0.0156 GiB.*after 0.00781 GiB: Cannot allocate.*--host-cache-gib", str(prefault.failure))
    prefault.close()
    assert segment.layout == layout


def test_memory_that_is_not_there_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """A file cut behind our back stands for a full /dev/shm: writing there would kill the process."""
    segment = Segment.named("x", make_layout(16, page_bytes=MIB), tmp_path)
    os.truncate(tmp_path / "hiserve-x", segment.layout.pages_offset + 8 * MIB)
    prefault = Prefault(segment, num_threads=1, piece_bytes=4 * MIB)
    assert not prefault.wait(16, timeout_s=PATIENCE_S)
    assert prefault.num_ready_pages == 8
    assert prefault.failure is not None
    prefault.close()
    segment.close()


def test_an_old_kernel_gets_the_memory_another_way(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "_MADV_POPULATE_WRITE", 9999)  # unknown, as 23 was before Linux 5.14
    segment.pages[1] = 7
    Populate(segment.fd)(segment.layout.pages_offset, segment.pages.ctypes.data, 16 * MIB)
    assert allocated(segment) >= 16 * MIB
    assert (segment.pages[1] == 7).all()


# --- while steps run -------------------------------------------------------------------------------

GIB = 1 << 30


def share_of_pinning(spare_bytes: int, *, step_every_s: float, pinned_s: float = 0.005, pieces: int = 50) -> float:
    """Pins pieces as fast as the pace lets them, while steps are launched; returns the share of the time that takes."""
    clock = Clock(1000.0)
    throttle, begin_s, next_step_s = PinningThrottle(clock), clock.now_s, clock.now_s
    for _ in range(pieces):
        while True:
            while next_step_s <= clock.now_s:
                throttle.step()
                next_step_s += step_every_s
            pause_s = throttle.pause_s(spare_bytes)
            if pause_s == 0:
                break
            clock.now_s = min(clock.now_s + pause_s, next_step_s)
        clock.now_s += pinned_s
        throttle.pinned(pinned_s)
    return pieces * pinned_s / (clock.now_s - begin_s)


def test_pinning_takes_a_small_share_of_the_time_while_steps_run() -> None:
    assert share_of_pinning(GIB, step_every_s=0.005) == pytest.approx(1 / 32, rel=0.05)


def test_pinning_takes_half_of_the_time_when_ready_pages_run_out() -> None:
    assert share_of_pinning(0, step_every_s=0.005) == pytest.approx(1 / 2, rel=0.05)


def test_pinning_never_rests_on_an_idle_device() -> None:
    assert share_of_pinning(GIB, step_every_s=1e9, pieces=1000) > 0.9
    throttle = PinningThrottle(Clock(1000.0))
    throttle.pinned(100.0)
    assert throttle.pause_s(0) == 0


def test_the_pace_is_asked_before_each_piece_with_what_is_ready_and_empty(segment: Segment) -> None:
    class Pace(PinningThrottle):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[int] = []
            self.told: list[float] = []

        def pause_s(self, spare_bytes: int) -> float:
            self.asked.append(spare_bytes)
            return 0.0

        def pinned(self, taken_s: float) -> None:
            self.told.append(taken_s)

    pace, pins = Pace(), Pins()
    prefault = Prefault(segment, num_threads=1, registrar=pins, piece_bytes=4 * MIB, throttle=pace, num_used=lambda: 3)
    assert prefault.wait(16, timeout_s=PATIENCE_S)
    assert pace.asked == [(ready - 3) * MIB for ready in (0, 4, 8, 12)]
    assert len(pace.told) == 4
    prefault.close()


def test_closing_does_not_wait_for_the_pace(segment: Segment) -> None:
    asked = threading.Event()

    class Pace(PinningThrottle):
        def pause_s(self, spare_bytes: int) -> float:
            asked.set()
            return 1e6

    prefault = Prefault(segment, num_threads=2, registrar=Pins(), piece_bytes=4 * MIB, throttle=Pace())
    assert asked.wait(PATIENCE_S)
    assert prefault.num_ready_pages == 0
    prefault.close()
