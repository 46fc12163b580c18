"""Weights from files: in order, several pieces at once, every element where it belongs."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import nullcontext
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


def test_nothing_is_left_open(files: list[Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    read(files, None)
    assert len(os.listdir("/proc/self/fd")) == before


class Driver:
    """What ``reading`` asks of a CUDA device, whose memory is the CPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool) -> None:
        self.pinned = set[int]()  # addresses
        self.told: list[str] = []  # what was done, by all threads
        self._asked = set[int]()
        self._refuses = refuses
        runtime = SimpleNamespace(
            cudaError=SimpleNamespace(success=0),
            cudaHostRegister=self._register,
            cudaHostUnregister=self._unregister,
            cudaGetErrorString=lambda _error: "no memory may be locked",
        )
        event = SimpleNamespace(record=lambda: self.told.append("copy"), synchronize=lambda: self.told.append("wait"))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_named: event)
        for name in ("device", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _given: nullcontext())
        preadv = os.preadv

        def read_one(fd: int, views: list[memoryview], begin: int) -> int:
            count = preadv(fd, views, begin)
            self.told.append("read")
            return count

        monkeypatch.setattr(os, "preadv", read_one)
        monkeypatch.setattr(reading.TensorSpan, "is_direct", False)

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
