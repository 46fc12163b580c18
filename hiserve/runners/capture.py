"""CUDA graphs of one device: their sizes; the capture, on a stream of its own; the replay, on the current stream."""

from __future__ import annotations

import ctypes
import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import torch

from hiserve.core.step_faults import fault_of, first_line
from hiserve.distributed.exchange import Exchange, Exchanged
from hiserve.errors import ResourceError

T = TypeVar("T")
_DRIVER = "libcuda.so.1"

logger = logging.getLogger(__name__)

# Small batches differ by much, large ones by little: at most half of a batch is padding, above 32 rows at most a third.
_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# With some hundreds of tokens, each padding token costs time: above 256 at most a fifth of a step is padding.
_SMALL_TOKENS, _LARGE_TOKENS = (8, 16, 32, 64, 96, 128, 192), (768, 896, 1024, 1280, 1536, 1792, 2048)
_MIXED_TOKENS = (64, *range(128, 513, 64))
_TOKENS = (*_SMALL_TOKENS, *range(256, 641, 64), *_LARGE_TOKENS)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Returns ascending sizes of which the last is ``max_rows``, or the largest there is if that is less."""
    return _up_to(_ROWS, max_rows)


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Likewise for tokens; larger steps keep the device busier than their launches keep the host."""
    return _up_to(_TOKENS, max_tokens)


def mixed_buckets(max_tokens: int) -> tuple[int, ...]:
    """Likewise for tokens of steps that are one graph: larger ones are not bound by their launches."""
    return _up_to(_MIXED_TOKENS, max_tokens)


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    if most >= sizes[-1]:
        return sizes
    return (*sizes[: bisect_left(sizes, most)], most)


class Graph:
    """Captured work. Its owner keeps alive every tensor that it reads, and its results.

    Args:
        graph: Captured and kept, not instantiated.
        device: Of it.
        exchange: Of a rank of a group; None runs alone.
        exchanges: In the graph.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        device: torch.device,
        exchange: Exchange | None = None,
        exchanges: tuple[Exchanged, ...] = (),
    ) -> None:
        self._graph = graph
        self._device = device
        self._exchange, self._exchanges = exchange, exchanges
        self.num_nodes = _count_nodes(graph.raw_cuda_graph())  # kernels, copies and fills in it
        graph.instantiate()

    def replay(self) -> None:
        """Launches the graph on the current stream, which must be of the same device."""
        with torch.cuda.device(self._device):
            self._graph.replay()
        if self._exchange is not None:
            self._exchange.replayed(self._exchanges)


class Capture:
    """Captures graphs that share one pool of memory, so at most one of them may run at a time.

    The stream is made for the device by name: one made while another device is current captures nothing, without an
    error. The count of nodes would show it.

    Args:
        device: A CUDA device, with its index.
        exchange: Of a rank of a group; None runs alone.
    """

    def __init__(self, device: torch.device, exchange: Exchange | None = None) -> None:
        assert device.index is not None, f"{device} has no index"
        self._device = device
        self._exchange = exchange
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._open: torch.cuda.CUDAGraph | None = None
        self._broken: list[torch.cuda.CUDAGraph] = []

    @property
    def is_active(self) -> bool:
        """Whether a capture is under way."""
        return self._open is not None

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes the capture stream current, after the work of the stream before, and waits for it at the end."""
        with torch.cuda.device(self._device), without_collections():
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            with torch.cuda.stream(self._stream):
                yield
                self._stream.synchronize()

    def record(self, work: Callable[[], None]) -> Graph:
        """Captures work, which ran at least once before: kernels are compiled and workspaces made outside.

        Raises:
            RuntimeError: Something in it cannot be captured.
        """
        self.begin()
        with ExitStack() as undo:
            undo.callback(self.abandon)
            work()
            undo.pop_all()
        return self.end()

    def begin(self) -> None:
        """Starts a capture on the current stream, which must be that of ``on_stream``."""
        assert self._open is None, "a capture is under way already"
        assert torch.cuda.current_stream(self._device) == self._stream, "graphs are captured on the capture stream"
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Thread-local: threads that copy pages or pin memory may go on meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph
        if self._exchange is not None:
            self._exchange.begin_graph()

    def end(self) -> Graph:
        """Ends the capture.

        Raises:
            RuntimeError: Something in it could not be captured, or there is nothing in it.
        """
        assert self._open is not None, "no capture is under way"
        graph, self._open = self._open, None
        captured = Graph(graph, self._device, self._exchange, self._finish(graph))
        if not captured.num_nodes:
            raise RuntimeError("the captured graph is empty")
        return captured

    def abandon(self) -> None:
        """Ends a capture that failed, if one is under way, and drops it."""
        graph, self._open = self._open, None
        if graph is not None:
            with suppress(RuntimeError):  # it fails again when it ends; the first failure is reported
                self._finish(graph)

    def check_failure(self, error: RuntimeError) -> None:
        """Raises the failure of a capture if what follows it would fail too.

        So do all calls after an illegal access, which persists in the context; and if other ranks of a group may not have
        the failure, exchanges that they would await.

        Raises:
            RuntimeError: The failure of the device, again.
            ResourceError: A rank of a group has no memory.
        """
        self._stream.synchronize()
        if self._exchange is not None and fault_of(error):
            raise ResourceError(
                f"no memory to capture graphs: {first_line(error)}. Lower --kv-pages, or use --graphs off.",
                param="graphs",
            ) from error

    def _finish(self, graph: torch.cuda.CUDAGraph) -> tuple[Exchanged, ...]:
        """Ends the capture of a graph; returns the exchanges in it."""
        exchanges = () if self._exchange is None else self._exchange.end_graph()
        try:
            graph.capture_end()
        except RuntimeError:
            # Up to 2.12 torch does not notify its allocators (pytorch/pytorch#180395). We notify that of the device; that
            # of pinned memory keeps querying the graph, and accepts no other capture for the pool.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            self._broken.append(graph)
            raise
        return exchanges


def capture_sizes(capture: Capture, sizes: Sequence[int], work: Callable[[int], T], message: str) -> dict[int, T]:
    """Captures something for each size, the largest first, so that smaller ones reuse its memory.

    Args:
        capture: Where.
        sizes: Ascending.
        work: Captures one; raises ``RuntimeError`` where that cannot be done.
        message: Logged for each size that fails, with the size and the reason.

    Returns:
        The results of ``work``, by size; sizes that failed are left out.
    """
    captured: dict[int, T] = {}
    with capture.on_stream(), torch.inference_mode():
        for size in reversed(sizes):
            try:
                captured[size] = work(size)
            except RuntimeError as error:
                capture.check_failure(error)
                logger.warning(message, size, str(error).splitlines()[0])
    return captured


@contextmanager
def without_collections() -> Iterator[None]:
    """Disables garbage collection: it may destroy graphs of a former engine, which ends this thread's capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _count_nodes(graph: int) -> int:
    count = ctypes.c_size_t()
    code = ctypes.CDLL(_DRIVER).cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
    assert code == 0, f"cuGraphGetNodes answered {code}"
    return count.value
