"""Weights from files: in order, several pieces at once, every element where it belongs."""

from __future__ import annotations

import logging
import mmap
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiserve.models import reading
from hiserve.models.checkpoint import StoredTensor, stored_tensors
from hiserve.models.reading import ProgressLog, plan_chunks, read_chunks
from tests.helpers.waiting import PATIENCE_S

CPU = torch.device("cpu")
SEED = 17
PIECE = 1024


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files: tensors larger than a piece, many small ones, types whose sizes do not divide the next one's place."""
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)

    def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors: list[dict[str, Tensor]] = [{}, {}]
    for number, made in enumerate(tensors):
        made[f"large.{number}"] = drawn(70, 101, dtype=torch.bfloat16)
        made[f"wide.{number}"] = drawn(33, 100, dtype=torch.float32)
        made[f"double.{number}"] = drawn(700, dtype=torch.float64)
        made |= {f"small.{number}.{i}": drawn(i + 1, dtype=torch.float16) for i in range(40)}
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, made in zip(paths, tensors, strict=True):
        save_file(made, path)
    return paths


def read(files: list[Path], dtype: torch.dtype | None) -> tuple[list[reading.FileChunk], dict[str, Tensor]]:
    stored = {name: tensor for path in reversed(files) for name, tensor in stored_tensors(path).items()}
    targets = {
        name: torch.full(tensor.shape, torch.nan, dtype=dtype or reading.TORCH_DTYPES[tensor.dtype])
        for name, tensor in stored.items()
    }
    pieces = plan_chunks([(stored[name], targets[name]) for name in stored], PIECE)
    read_chunks(pieces, CPU)
    return pieces, targets


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64], ids=str)
def test_every_element_is_that_of_the_file(files: list[Path], dtype: torch.dtype | None) -> None:
    _, targets = read(files, dtype)
    wanted = load_file(files[0]) | load_file(files[1])
    assert targets.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(targets[name], tensor.to(dtype or tensor.dtype)), name


def test_what_a_read_leaves_out_is_read_next(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, begin: preadv(fd, [view[:300] for view in views], begin))
    _, targets = read(files, None)
    wanted = load_file(files[0]) | load_file(files[1])
    assert all(torch.equal(targets[name], tensor) for name, tensor in wanted.items())


def test_a_file_that_goes_on_where_another_ends_is_another_piece() -> None:
    def stored(path: str, begin: int) -> StoredTensor:
        return StoredTensor(path=Path(path), dtype="F32", shape=(4,), begin=begin)

    wanted = [(stored("a", 64), torch.empty(4)), (stored("b", 80), torch.empty(4)), (stored("b", 96), torch.empty(4))]
    pieces = plan_chunks(wanted, PIECE)
    assert [(chunk.path.name, chunk.begin, chunk.num_bytes) for chunk in pieces] == [("a", 64, 16), ("b", 80, 32)]


def test_pieces_are_in_the_order_of_the_files_and_no_byte_is_read_twice(files: list[Path]) -> None:
    pieces, _ = read(files, torch.float32)
    places = [(chunk.path, chunk.begin) for chunk in pieces]
    assert places == sorted(places)
    assert max(chunk.num_bytes for chunk in pieces) <= PIECE
    for path in files:
        own = [chunk for chunk in pieces if chunk.path == path]
        assert [chunk.begin + chunk.num_bytes for chunk in own[:-1]] == [chunk.begin for chunk in own[1:]]
        assert own[-1].begin + own[-1].num_bytes == path.stat().st_size
        assert len(own) < 2 + path.stat().st_size / PIECE * 1.2, "small tensors are read together"


def test_several_pieces_are_read_at_once_and_ahead_of_their_copies(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the first reads ends only when all threads read."""
    together, preadv = threading.Barrier(reading.NUM_THREADS), os.preadv
    seen: list[int] = []

    def wait(fd: int, views: list[memoryview], begin: int) -> int:
        seen.append(begin)
        if len(seen) <= reading.NUM_THREADS:
            together.wait(PATIENCE_S)
        return preadv(fd, views, begin)

    monkeypatch.setattr(reading.os, "preadv", wait)
    pieces, _ = read(files, torch.float32)
    assert len(pieces) > reading.NUM_BUFFERS * reading.NUM_THREADS, "buffers are not used again"
    assert not together.broken


def test_what_needs_no_conversion_is_read_straight_to_its_place(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "copy_", lambda *_args, **_named: pytest.fail("it was copied"))
    read(files, None)


def test_a_file_that_shrinks_while_it_is_read_is_named(files: list[Path]) -> None:
    stored = stored_tensors(files[0])
    target = torch.empty(stored["large.0"].shape, dtype=torch.bfloat16)
    pieces = plan_chunks([(stored["large.0"], target)], PIECE)
    os.truncate(files[0], stored["large.0"].begin + 5000)
    with pytest.raises(EOFError, match=r"a\.safetensors ends after"):
        read_chunks(pieces, CPU)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-weights")]


def test_after_a_failure_the_other_threads_take_no_chunk(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, begun = threading.Event(), list[int]()

    class Waiting(deque[reading.FileChunk]):
        def clear(self) -> None:
            super().clear()
            stopped.set()

    def fail_first(_fd: int, _into: Tensor, begin: int, path: Path) -> None:
        begun.append(begin)
        if begin == first.begin:
            raise EOFError(path.name)
        assert stopped.wait(PATIENCE_S)

    pieces, _ = read(files[:1], torch.float32)
    first = pieces[0]
    monkeypatch.setattr(reading, "deque", Waiting)
    monkeypatch.setattr(reading, "_read", fail_first)
    with pytest.raises(EOFError, match=r"a\.safetensors"):
        read_chunks(pieces, CPU)
    assert stopped.is_set() and len(begun) <= reading.NUM_THREADS < len(pieces)


def test_each_byte_counts_once_in_the_progress(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    told, is_shown, read_some = list[int](), threading.Event(), reading._read

    def advance(count: int) -> None:
        told.append(count)
        if count:
            is_shown.set()

    def read_after_the_first(fd: int, into: Tensor, begin: int, path: Path) -> None:
        if begin != pieces[0].begin or path != pieces[0].path:
            assert is_shown.wait(PATIENCE_S), "no progress after the first chunk"
        read_some(fd, into, begin, path)

    pieces, _ = read(files, torch.float32)
    monkeypatch.setattr(reading, "_LOOK_S", 0.001)
    monkeypatch.setattr(reading, "_read", read_after_the_first)
    monkeypatch.setattr(reading, "_progress", lambda _num_bytes: nullcontext(advance))
    read_chunks(pieces, CPU)
    assert sum(told) == sum(chunk.num_bytes for chunk in pieces)
    assert sum(count > 0 for count in told) > 1


def test_targets_that_were_made_in_inference_mode_are_converted_too(files: list[Path]) -> None:
    with torch.inference_mode():
        _, targets = read(files, torch.float32)
        assert torch.equal(targets["large.0"], load_file(files[0])["large.0"].float())


def test_no_child_shares_the_pages_of_buffers() -> None:
    """After a fork a write would move pages that the device reads."""
    for memory in reading._memory(2, 5000):
        assert memory.numel() == 2 * mmap.PAGESIZE
        assert "dc" in flags_of(memory.data_ptr())


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    is_found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_found = int(found[1], 16) <= address < int(found[2], 16)
        elif is_found and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:x}")


def test_nothing_is_left_open(files: list[Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    read(files, None)
    assert len(os.listdir("/proc/self/fd")) == before


class Event:
    """Of a buffer: its copy runs until it is waited for."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._is_copying = False

    def record(self) -> None:
        thread = threading.get_ident()
        assert self._driver.streams.get(thread) == "the caller's", "a copy that the caller does not wait for"
        self._is_copying = True
        self._driver.num_copying[thread] += 1
        self._driver.told.append("copy")

    def synchronize(self) -> None:
        self._driver.num_copying[threading.get_ident()] -= self._is_copying
        self._is_copying = False
        self._driver.told.append("wait")


class Driver:
    """What ``reading`` asks of a CUDA device, whose memory is the CPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool) -> None:
        self.pinned = set[int]()  # addresses
        self.told: list[str] = []  # what was done, by all threads
        self.num_copying = Counter[int]()  # buffers of each thread
        self.streams = dict[int, str]()  # by thread
        self._asked = set[int]()
        self._refuses = refuses
        runtime = SimpleNamespace(
            cudaError=SimpleNamespace(success=0),
            cudaHostRegister=self._register,
            cudaHostUnregister=self._unregister,
            cudaGetErrorString=lambda _error: "no memory may be locked",
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_named: Event(self))
        monkeypatch.setattr(torch.cuda, "device", lambda _given: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: "the caller's")
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        preadv = os.preadv

        def read_one(fd: int, views: list[memoryview], begin: int) -> int:
            assert self.num_copying[threading.get_ident()] < reading.NUM_BUFFERS, (
                "a buffer is read into while it is copied"
            )
            count = preadv(fd, views, begin)
            self.told.append("read")
            return count

        monkeypatch.setattr(os, "preadv", read_one)
        monkeypatch.setattr(reading.TensorSpan, "is_direct", False)

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        self.streams[threading.get_ident()] = stream
        yield
        del self.streams[threading.get_ident()]

    def _register(self, address: int, _num_bytes: int, _flags: int) -> int:
        self.told.append("pin")
        assert address not in self._asked, "a buffer is pinned twice"
        self._asked.add(address)
        if self._refuses:
            return 1
        self.pinned.add(address)
        return 0

    def _unregister(self, address: int) -> int:
        assert self.told[-1] == "wait" or self.told[-1] == "unpin", "a copy may still run"
        self.told.append("unpin")
        self.pinned.remove(address)
        return 0


@pytest.mark.parametrize("refuses", [False, True], ids=["pinned", "refused"])
def test_a_buffer_is_pinned_once_after_its_first_read(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: bool
) -> None:
    """A read makes a buffer's pages, on the thread that reads; pinning all of them first took as long as the copies of 6 GiB."""
    driver = Driver(monkeypatch, refuses=refuses)
    stored = stored_tensors(files[0])
    targets = {name: torch.empty(each.shape, dtype=reading.TORCH_DTYPES[each.dtype]) for name, each in stored.items()}
    pieces = plan_chunks([(stored[name], targets[name]) for name in stored], PIECE // 2)
    assert len(pieces) > reading.NUM_BUFFERS * reading.NUM_THREADS, "buffers are not used again"
    read_chunks(pieces, torch.device("cuda"))
    assert all(torch.equal(targets[name], tensor) for name, tensor in load_file(files[0]).items())
    assert driver.told.index("read") < driver.told.index("pin"), "a buffer was pinned before it was read into"
    assert driver.told.count("copy") == len(pieces)
    assert not driver.pinned, "memory is still pinned"
    assert driver.told.count("unpin") == (0 if refuses else driver.told.count("pin"))
    assert caplog.text.count("cannot be pinned: no memory may be locked") == int(refuses)


def test_memory_is_unpinned_after_a_failure_when_no_copy_runs(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch, refuses=False)
    stored = stored_tensors(files[0])["large.0"]
    pieces = plan_chunks([(stored, torch.empty(stored.shape, dtype=torch.bfloat16))], PIECE)
    os.truncate(files[0], stored.begin + 5000)
    with pytest.raises(EOFError, match=r"a\.safetensors ends after"):
        read_chunks(pieces, torch.device("cuda"))
    assert "unpin" in driver.told
    assert not driver.pinned, "memory is still pinned"


def test_a_log_gets_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    log = ProgressLog(8 << 30, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for _ in range(8):
            now[0] += 4.0
            log.advance(1 << 30)
    assert [record.getMessage() for record in caplog.records] == [
        "weights: 3.00 of 8.00 GiB read, 0.25 GiB/s, 20 s left",
        "weights: 6.00 of 8.00 GiB read, 0.25 GiB/s, 8 s left",
    ]
