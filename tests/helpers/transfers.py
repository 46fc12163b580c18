"""Both pools, an engine between them, and a hand on what copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.cache.storage.host import HostPool
from hiserve.cache.storage.segment import PageLayout, Segment
from hiserve.cache.storage.transfer import ThreadTransfers, TransferEngine
from hiserve.core.kv_groups import CacheGroupSpec, Space
from hiserve.core.transfers import CopyAck, CopyKind, PageCopy, TailImage
from tests.helpers.host import PAGE_SIZE, TENANTS, make_layout, make_run
from tests.helpers.waiting import PATIENCE_S

NUM_PAGES = 12
GROUPS = (
    CacheGroupSpec(name="kv", num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32"),
    CacheGroupSpec(name="draft", num_layers=1, num_kv_heads=1, head_dim=6, dtype="bfloat16"),
)
# Beside them layers with a window: the image of a window page takes three pages of the host.
WINDOWED = (
    *GROUPS,
    CacheGroupSpec(name="swa", num_layers=6, num_kv_heads=2, head_dim=5, dtype="float32", space=Space.WINDOW),
    CacheGroupSpec(name="low", num_layers=2, num_kv_heads=1, head_dim=3, dtype="bfloat16", space=Space.WINDOW),
)
# With states and rings, too: the image of a snapshot takes two pages.
CARRIED = (
    CacheGroupSpec(
        name="state",
        num_layers=3,
        num_kv_heads=2,
        head_dim=7,
        value_dim=9,
        dtype="float32",
        codec="state",
        space=Space.ROW,
    ),
    CacheGroupSpec(
        name="inputs",
        num_layers=3,
        num_kv_heads=1,
        head_dim=11,
        dtype="bfloat16",
        codec="inputs",
        space=Space.ROW,
        ring=8,
        snapshot_rows=3,
    ),
    CacheGroupSpec(
        name="lost", num_layers=2, num_kv_heads=1, head_dim=5, dtype="float32", codec="inputs", space=Space.ROW, ring=4
    ),
)
PAGE_BYTES = PageLayout(GROUPS, PAGE_SIZE).page_bytes
THREAD, DIRECT, LAYERED, STAGED = "thread", "direct", "layered", "staged"  # the CPU's; the CUDA one's mechanisms


class TransferBench:
    """An engine of one make.

    Attributes:
        begun: Orders that the engine's thread has taken up.
        may_copy: Cleared by a test that wants the thread to stop before its next copy.
    """

    def __init__(
        self, make: str, *, groups: Sequence[CacheGroupSpec] = GROUPS, num_pages: int = NUM_PAGES, **options: Any
    ) -> None:
        self.groups = tuple(groups)
        self.page_bytes = PageLayout([each for each in groups if each.space is Space.HISTORY], PAGE_SIZE).page_bytes
        self.num_pages = num_pages
        self.begun: list[int] = []
        self._by_layer = make == LAYERED
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.segment = Segment.anonymous(make_layout(num_pages, self.page_bytes))
        hold = options.pop("hold", self._hold)
        options = {"max_queued_bytes": 1 << 40, "max_offload_bytes_per_s": 1e15} | options
        self.engine = self._make_engine(make, options)
        hold_copies(self.engine, hold)
        generator = torch.Generator().manual_seed(5)
        snapshots = [each.snapshots for each in self.device.carried.values()]
        for plane in (*self.planes(), *self.planes(Space.WINDOW), *snapshots):
            plane.copy_(torch.randn(plane.shape, generator=generator))
        if make != THREAD:
            self.fill(0, 0.0)  # the first launch loads the kernel, which waits for the device
            torch.cuda.current_stream().synchronize()

    def _make_engine(self, make: str, options: dict[str, Any]) -> TransferEngine:
        sizes = self.num_pages, 2, self.num_pages  # window pages, rows and snapshots
        if make == THREAD:
            self.host = HostPool(self.segment, self.groups, num_threads=1)
            self.device = DevicePool(self.groups, self.num_pages, PAGE_SIZE, "cpu", *sizes)
            self.ready()
            return ThreadTransfers(self.device, self.host, **options)
        from hiserve.cache.storage.cuda_transfer import CudaTransfers
        from hiserve.cache.storage.prefault import CudaRegistrar

        self.host = HostPool(self.segment, self.groups, num_threads=1, registrar=CudaRegistrar(0))
        self.device = DevicePool(self.groups, self.num_pages, PAGE_SIZE, "cuda", *sizes)
        self.ready()
        direct = 0 if make == STAGED else self.page_bytes
        least = 0 if make == LAYERED else 1 << 20
        options = {"max_direct_page_bytes": direct, "min_layer_bytes": least} | options
        return CudaTransfers(self.device, self.host, **options)

    def ready(self) -> None:
        self.host.clear()
        assert self.host.prefault.wait(self.num_pages, 60), self.host.prefault.failure

    def _hold(self, copy: PageCopy) -> None:
        self.begun.append(copy.op)
        self.may_copy.wait()

    def planes(self, space: Space = Space.HISTORY) -> Iterator[torch.Tensor]:
        for group in self.groups:
            if group.space is space:
                for layer in self.device.layers(group.name):
                    yield from (layer.k, layer.v)

    def page(self, page: int, space: Space = Space.HISTORY) -> torch.Tensor:
        """All of a page on the device, as float32 on the CPU."""
        pieces = [plane[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].float().flatten() for plane in self.planes(space)]
        return torch.cat(pieces).cpu()

    def pages(self, space: Space = Space.HISTORY) -> torch.Tensor:
        """All pages, ``[num_pages, elements]``; see ``page``."""
        return torch.stack([self.page(page, space) for page in range(self.num_pages)])

    def fill(self, page: int, value: float, space: Space = Space.HISTORY) -> None:
        for plane in self.planes(space):
            plane[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = value

    def store(self, op: int, device: Sequence[int], host: Sequence[int], after_step: int = 0) -> None:
        run = make_run(host, [100 + page for page in device])
        self.engine.start(PageCopy(op, CopyKind.OFFLOAD, ints(device), ints(host), after_step, run))

    def load(self, op: int, device: Sequence[int], host: Sequence[int], after_step: int = 0) -> None:
        copy = PageCopy(op, CopyKind.LOAD, ints(device), ints(host), after_step)
        self.engine.start(copy, by_layer=self._by_layer)

    def snapshots(self) -> torch.Tensor:
        """What all slots hold, ``[num_slots, elements]``, as float32 on the CPU."""
        kept = [each.snapshots.transpose(0, 1).flatten(1).float() for each in self.device.carried.values()]
        return torch.cat(kept, dim=1).cpu()

    def store_tail(
        self,
        op: int,
        windows: Sequence[int],
        frames: Sequence[int],
        after_step: int = 0,
        slots: Sequence[int] = (),
    ) -> None:
        nothing, image = ints([]), make_image(frames)
        tail = (ints(windows), image, ints(slots))
        self.engine.start(PageCopy(op, CopyKind.OFFLOAD, nothing, nothing, after_step, None, *tail))

    def load_tail(
        self,
        op: int,
        windows: Sequence[int],
        frames: Sequence[int],
        after_step: int = 0,
        device: Sequence[int] = (),
        host: Sequence[int] = (),
        slots: Sequence[int] = (),
    ) -> None:
        """Loads pages and the tail at their end."""
        tail = (ints(windows), make_image(frames), ints(slots))
        copy = PageCopy(op, CopyKind.LOAD, ints(device), ints(host), after_step, None, *tail)
        self.engine.start(copy, by_layer=self._by_layer)

    def acks(self, count: int) -> list[CopyAck]:
        found: list[CopyAck] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < deadline, f"{found} of {count}"
            found += self.engine.poll(0.01)
        return found

    def close(self) -> None:
        self.may_copy.set()
        self.engine.close()
        self.host.close()
        self.segment.close()


def hold_copies(transfers: Any, hold: Callable[[PageCopy], str | None] | None) -> None:
    """Calls ``hold`` in the engine's thread before each copy, of tails that are copied together with each.

    The copies fail for the reason that it returns, if any.
    """
    vars(transfers).pop("_execute", None)
    if hold is not None:
        carry_out = transfers._execute
        transfers._execute = lambda *copies: next(filter(None, map(hold, copies)), "") or carry_out(*copies)


def make_image(frames: Sequence[int]) -> TailImage:
    """Of a tail behind a page that nobody has anything to do with."""
    return TailImage(ints(frames), TENANTS[0], bytes(16))


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)
