"""Reads tensors from files into memory of any device, in the order of the files, with reads ahead of copies."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from hiserve.models.checkpoint import StoredTensor

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
NUM_THREADS = 8  # for a disk, its queue depth; from the page cache 16 and 24 were no faster
NUM_BUFFERS = 2  # of a thread: it reads into one while the other is copied
_SHOWN_BYTES = 256 << 20  # less is read before a progress bar could be seen
_LOG_S = 10.0
_LOOK_S = 0.25  # between two looks at how much has been read


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Whole elements of one tensor within a chunk.

    Attributes:
        begin: Bytes from the start of the chunk.
        stored: Type in the file.
        target: Contiguous, ``[n]``: destination, on any device; of any floating-point type, or of the stored one.
    """

    begin: int
    stored: torch.dtype
    target: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.target.numel() * self.stored.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the file can be read into the target: it is on the CPU and of the stored type."""
        return self.target.device.type == "cpu" and self.target.dtype == self.stored


@dataclass(slots=True)
class FileChunk:
    """Bytes of one file that are read at once."""

    path: Path
    begin: int  # offset in the file
    num_bytes: int = 0
    parts: list[TensorSpan] = field(default_factory=list)  # of one tensor or of adjacent ones

    def takes(self, path: Path, begin: int, num_bytes: int, stored: torch.dtype, limit: int) -> bool:
        """Whether these bytes follow the chunk, fit into it, and would be aligned to their type."""
        follows = self.path == path and self.begin + self.num_bytes == begin
        return follows and self.num_bytes + num_bytes <= limit and self.num_bytes % stored.itemsize == 0


def plan_chunks(wanted: Sequence[tuple[StoredTensor, Tensor]], piece_bytes: int = PIECE_BYTES) -> list[FileChunk]:
    """Returns the chunks to read, ordered by file and offset.

    ``wanted`` is each tensor with its target: contiguous, with as many elements. ``piece_bytes``, the most bytes of a
    chunk, is a multiple of 8.
    """
    pieces: list[FileChunk] = []
    for tensor, target in sorted(wanted, key=lambda each: (each[0].path, each[0].begin)):
        stored, flat = TORCH_DTYPES[tensor.dtype], target.view(-1)
        most = piece_bytes // stored.itemsize
        for first in range(0, flat.numel(), most):
            part_of = flat[first : first + most]
            begin, num_bytes = tensor.begin + first * stored.itemsize, part_of.numel() * stored.itemsize
            if not pieces or not pieces[-1].takes(tensor.path, begin, num_bytes, stored, piece_bytes):
                pieces.append(FileChunk(tensor.path, begin))
            pieces[-1].parts.append(TensorSpan(pieces[-1].num_bytes, stored, part_of))
            pieces[-1].num_bytes += num_bytes
    return pieces


# Types of stored weights, in the spelling of the format; bytes are of packed ones.
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I64": torch.int64,
    "I32": torch.int32,
}


def read_chunks(pieces: Sequence[FileChunk], device: torch.device) -> None:
    """Reads every chunk into its targets. All bytes have arrived when it returns, also on a CUDA device.

    Threads take chunks in order. Bytes that need no conversion are read directly into targets on the CPU; others pass
    through buffers, pinned for a CUDA device, and are converted and copied on the caller's current stream. ``device`` is
    that of all targets.

    Raises:
        OSError: A file cannot be read; ``EOFError``: it is shorter than it was.
    """
    is_cuda, waiting = device.type == "cuda", deque(pieces)
    num_threads, most = min(NUM_THREADS, len(pieces)), max((chunk.num_bytes for chunk in pieces), default=0)
    with ExitStack() as stack:
        pins = _Pins(device) if is_cuda else None
        buffers = [_Buffer(memory, pins) for memory in _memory(NUM_BUFFERS * num_threads, most)]
        if pins is not None:
            stack.callback(pins.close)
        readers = [_Reader(waiting, buffers[i::num_threads], device) for i in range(num_threads)]
        pool = stack.enter_context(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read-weights"))
        stack.callback(waiting.clear)  # after a failure the others end with the chunk that they read
        advance = stack.enter_context(_progress(sum(chunk.num_bytes for chunk in pieces)))
        running, num_told = {pool.submit(reader.run) for reader in readers}, 0
        while running:
            ended, running = wait(running, _LOOK_S, return_when=FIRST_EXCEPTION)
            for each in ended:
                each.result()
            num_read = sum(reader.num_bytes for reader in readers)
            advance(num_read - num_told)
            num_told = num_read


def _memory(count: int, num_bytes: int) -> list[Tensor]:
    """Returns whole pages of one allocation, each uint8 ``[n]`` with ``n`` at least ``num_bytes``."""
    stride = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, max(1, count * stride), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # after a fork a write would move pages that the device reads
    held = torch.frombuffer(memory, dtype=torch.uint8)
    return [held[i * stride : (i + 1) * stride] for i in range(count)]


class _Reader:
    """What one thread does: it takes chunks until none is left, and reads each while its last one is copied.

    From the page cache to a GPU a chunk took 0.3 ms beside its copy, of 1 to 8 MiB and on 8 to 24 threads: so chunks are long,
    and a file stays open.

    Attributes:
        num_bytes: That were read.
    """

    def __init__(self, waiting: deque[FileChunk], buffers: list[_Buffer], device: torch.device) -> None:
        self.num_bytes = 0
        self._waiting = waiting
        self._buffers = buffers
        is_cuda = device.type == "cuda"
        self._on_stream = torch.cuda.stream(torch.cuda.current_stream(device)) if is_cuda else nullcontext()

    def run(self) -> None:
        """Returns when its bytes have arrived, or fails when no copy runs."""
        with self._on_stream, closing(_OpenFile()) as file:
            try:
                for buffer in cycle(self._buffers):
                    try:
                        chunk = self._waiting.popleft()
                    except IndexError:
                        break
                    buffer.load(chunk, file.of(chunk.path))
                    buffer.unload(chunk)
                    self.num_bytes += chunk.num_bytes
            finally:
                for buffer in self._buffers:
                    buffer.wait()


class _OpenFile:
    """The file that a thread reads; one at a time, for chunks come in the order of the files."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def of(self, path: Path) -> int:
        """Returns the descriptor of a file, until the next call."""
        if path != self._path:
            self.close()
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._path = path
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._descriptor

    def close(self) -> None:
        if self._path is not None:
            os.close(self._descriptor)
            self._path = None


class _Pins:
    """Memory that is pinned for copies to a CUDA device. Threads may pin side by side."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._pinned: list[Tensor] = []
        self._has_failed = False

    def add(self, memory: Tensor) -> None:
        """Pins whole pages, uint8 ``[n]`` on the CPU."""
        with torch.cuda.device(self.device):
            error = self._cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if error == self._cuda.cudaError.success:
            self._pinned.append(memory)
        elif not self._has_failed:  # copies are still correct, but wait for the driver's own buffers
            self._has_failed = True
            logger.warning("buffers for weights cannot be pinned: %s", self._cuda.cudaGetErrorString(error))

    def close(self) -> None:
        """Unpins all, after the last copy."""
        for memory in self._pinned:
            error = self._cuda.cudaHostUnregister(memory.data_ptr())
            assert error == self._cuda.cudaError.success, f"unpinning buffers: {self._cuda.cudaGetErrorString(error)}"


class _Buffer:
    """Memory for one chunk at a time, of one thread: loaded, unloaded, then loaded again."""

    def __init__(self, memory: Tensor, pins: _Pins | None) -> None:
        self._memory = memory
        self._pins = pins
        self._has_been_pinned = False
        self._copied = None if pins is None else torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def load(self, chunk: FileChunk, file: int) -> None:
        """Reads a chunk of an open file after the last copy from the buffer; directly into the targets where it can."""
        self.wait()
        if all(part.is_direct for part in chunk.parts):
            for part in chunk.parts:
                _read(file, part.target.view(torch.uint8), chunk.begin + part.begin, chunk.path)
        else:
            _read(file, self._memory[: chunk.num_bytes], chunk.begin, chunk.path)
        if self._pins is not None and not self._has_been_pinned:
            # After a read, which made the pages: threads do that side by side, and the driver one after the other.
            self._pins.add(self._memory)
            self._has_been_pinned = True

    def unload(self, chunk: FileChunk) -> None:
        """Copies a loaded chunk to its targets; asynchronous on a CUDA device."""
        if all(part.is_direct for part in chunk.parts):
            return
        for part in chunk.parts:
            held = self._memory[part.begin : part.begin + part.num_bytes].view(part.stored)
            if self._pins is not None and part.stored != part.target.dtype:
                # The copy below would convert on the host, outside pinned memory.
                held = held.to(self._pins.device, non_blocking=True)
            with torch.inference_mode():  # of this thread: the caller may have made its targets in that mode
                part.target.copy_(held, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Waits for the copies of the last ``unload``."""
        if self._copied is not None:
            self._copied.synchronize()


def _read(fd: int, into: Tensor, begin: int, path: Path) -> None:
    view, done = memoryview(into.numpy()), 0  # type: ignore[arg-type]
    while done < len(view):
        count = os.preadv(fd, [view[done:]], begin + done)
        if count == 0:
            raise EOFError(f"{path.name} ends after {begin + done} bytes")
        done += count


@contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields a callback for bytes read, which updates a progress bar on a terminal and writes to the log elsewhere."""
    console = Console(file=sys.stderr)
    has_bar = console.is_terminal and num_bytes >= _SHOWN_BYTES
    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    begin_s = time.monotonic()
    with Progress(*columns, console=console, disable=not has_bar, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("weights", total=num_bytes)
        notes = ProgressLog(num_bytes, is_quiet=has_bar or num_bytes < _SHOWN_BYTES)

        def advance(count: int) -> None:
            bar.advance(task, count)
            notes.advance(count)

        yield advance
    taken_s = time.monotonic() - begin_s
    logger.info("read %.2f GiB of weights in %.2f s: %s", num_bytes / 2**30, taken_s, rate(num_bytes, taken_s))


class ProgressLog:
    """Logs the progress every ten seconds. ``clock`` is monotonic, in seconds."""

    def __init__(self, num_bytes: int, *, is_quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_bytes = num_bytes
        self._is_quiet = is_quiet
        self._clock = clock
        self._begin_s = self._last_s = clock()
        self._done = 0

    def advance(self, count: int) -> None:
        """Adds bytes that have been read."""
        self._done += count
        now_s = self._clock()
        if self._is_quiet or now_s < self._last_s + _LOG_S:
            return
        self._last_s = now_s
        left_s = (now_s - self._begin_s) * (self._num_bytes - self._done) / self._done
        shares = (self._done / 2**30, self._num_bytes / 2**30)
        speed = rate(self._done, now_s - self._begin_s)
        logger.info("weights: %.2f of %.2f GiB read, %s, %.0f s left", *shares, speed, left_s)


def rate(num_bytes: int, seconds: float) -> str:
    """Returns bytes over seconds as text."""
    return f"{num_bytes / 2**30 / max(seconds, 1e-9):.2f} GiB/s"
