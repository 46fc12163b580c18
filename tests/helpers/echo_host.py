"""A host tier for the echo executor: copies take their time, may fail, and leave garbage until they have ended."""

from __future__ import annotations

import numpy as np

from hiserve.core.plan import BatchPlan
from hiserve.core.transfers import CopyAck, CopyKind, PageCopy
from tests.helpers.echo_states import BROKEN, State

GARBAGE, IMAGE = -9, -8
FRAMES = 2  # of a snapshot


class EchoHost:
    """Carries copies out when they end, in any legal order: at a random poll, or when a step waits for them.

    Args:
        pool: The device's slots.
        page_size: Tokens per page.
        num_pages: Host pages, page 0 included.
        fail_rate: Share of the copies that fail.
        seed: Of everything that is left to chance.

    Attributes:
        fail_rate: As given; a test may change it.
        num_waits: Loads that a step waited for.
        num_failed: Copies that failed, by kind.
        slots: Of snapshots on the device; their images are kept by their frames.
    """

    def __init__(self, pool: np.ndarray, page_size: int, num_pages: int, *, fail_rate: float, seed: int) -> None:
        self._device = pool.reshape(-1, page_size)
        self._host = np.full((num_pages, page_size), GARBAGE, dtype=np.int64)
        self._rng = np.random.default_rng(seed)
        self.fail_rate = fail_rate
        self._open: list[PageCopy] = []
        self._acks: list[CopyAck] = []
        self.num_pages = num_pages
        self.num_waits = 0
        self.num_failed = dict.fromkeys(CopyKind, 0)
        self.slots: list[State] = []
        self._images: dict[bytes, State] = {}

    def start(self, plan: BatchPlan) -> None:
        self._host[plan.host_release] = GARBAGE
        for copy in plan.copies:
            self._put(copy, GARBAGE)
            if copy.image is not None and copy.kind is CopyKind.LOAD:
                self.slots[copy.slots[0]] = BROKEN
            self._open.append(copy)

    def wait(self, loads: tuple[int, ...]) -> None:
        for copy in [copy for copy in self._open if copy.op in loads]:
            self.num_waits += 1
            self._end(copy)

    def poll(self, must_end: bool) -> list[CopyAck]:
        ending = [copy for copy in self._open if self._rng.random() < 0.3]
        for copy in ending or self._open[: int(must_end)]:
            self._end(copy)
        acks, self._acks = self._acks, []
        return acks

    def _put(self, copy: PageCopy, value: np.ndarray | int) -> None:
        if copy.kind is CopyKind.LOAD:
            self._device[copy.device_pages] = value
        else:
            self._host[copy.host_pages] = value

    def _move_snapshot(self, copy: PageCopy) -> None:
        """Copies the snapshot of a tail, whose image has two frames of its own."""
        if copy.image is None:
            return
        (slot,), frames = copy.slots.tolist(), copy.image.frames
        assert frames.size == FRAMES
        if copy.kind is CopyKind.LOAD:
            assert (self._host[frames] == IMAGE).all(), f"load {copy.op} reads frames that others have written"
            self.slots[slot] = self._images[frames.tobytes()]
        else:
            self._host[frames] = IMAGE
            self._images[frames.tobytes()] = self.slots[slot]

    def _end(self, copy: PageCopy) -> None:
        self._open.remove(copy)
        is_load = copy.kind is CopyKind.LOAD
        reason = "broken" if self._rng.random() < self.fail_rate else ""
        if reason:
            self.num_failed[copy.kind] += 1
        else:
            source = self._host[copy.host_pages] if is_load else self._device[copy.device_pages]
            assert (source != GARBAGE).all(), f"copy {copy.op} reads pages that nothing was written to"
            self._put(copy, source)
            self._move_snapshot(copy)
        self._acks.append(CopyAck(copy.op, reason, num_bytes=copy.host_pages.size, seconds=1e-4))
