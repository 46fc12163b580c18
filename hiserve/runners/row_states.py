"""What rows carry along: how far their states are advanced, the snapshots wanted of them, and those that they start from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hiserve.core.forward import RowMemory
from hiserve.core.plan import NO_SNAPSHOTS, BatchPlan, RowAdmit, SnapshotWrites
from hiserve.core.upload import upload
from hiserve.kernels.step_ops import StateTensors


class RowStates:
    """Recurrent states of R permanent rows, and rings of their last inputs.

    Nothing is cleared when a row changes hands: a state of no tokens reads as empty, whatever the memory holds.

    Attributes:
        tensors: As the step kernels take them.
        rehearses: Rows may start behind tokens without a state: the results of their steps mean nothing.

    Args:
        num_rows: R, row 0 included.
        device: Of all tensors.
        memory: Of each group, at least one; the layers first.
    """

    def __init__(self, num_rows: int, device: torch.device, memory: Sequence[RowMemory]) -> None:
        self._memory = tuple(memory)
        self._num_slots = min(each.snapshots.shape[1] for each in self._memory)
        self.rehearses = False
        self._has_snapshots = any(each.snapshots[0, 0].numel() for each in self._memory)
        lens, at, slot = (torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(3))
        self.tensors = StateTensors(lens=lens, snap_at=at, snap_slot=slot)
        self._device = device
        self._starts: dict[
            int, RowAdmit
        ] = {}  # by row: those that have a snapshot to start from, before their first step

    def forget(self) -> None:
        """Resets all rows."""
        for each in (self.tensors.lens, self.tensors.snap_at, self.tensors.snap_slot):
            each.zero_()
        self._starts.clear()

    def clear(self, rows: Tensor, host_rows: Sequence[int]) -> None:
        """Takes their states and the snapshots that are wanted of them away from rows; ``rows`` is int64, on the device."""
        for each in (self.tensors.lens, self.tensors.snap_at, self.tensors.snap_slot):
            each.index_fill_(0, rows, 0)
        for row in host_rows:
            self._starts.pop(row, None)

    def admit(self, admit: Sequence[RowAdmit], rows: Tensor, computed_len: Tensor) -> None:
        """Notes the snapshots that rows start from; their states then cover the computed tokens."""
        for each in admit:
            is_right = each.num_computed == 0 or each.restore_slot or not self._has_snapshots or self.rehearses
            assert is_right, f"row {each.row} starts after {each.num_computed} tokens without a state"
            assert 0 <= each.restore_slot < self._num_slots, f"slot {each.restore_slot} of {self._num_slots}"
            if each.restore_slot:
                self._starts[each.row] = each
        self.tensors.lens.index_copy_(0, rows, computed_len)

    def assign(self, writes: SnapshotWrites) -> None:
        """Notes the snapshots that are wanted of rows."""
        if writes is NO_SNAPSHOTS or not writes.rows.size:
            return
        assert writes.slots.max() < self._num_slots, f"slots {writes.slots} of {self._num_slots}"
        columns = (each.astype(np.int64) for each in (writes.rows, writes.boundaries, writes.slots))
        rows, boundaries, slots = upload(tuple(columns), self._device)
        self.tensors.snap_at.index_copy_(0, rows, boundaries)
        self.tensors.snap_slot.index_copy_(0, rows, slots)

    def waits(self, plan: BatchPlan) -> bool:
        """Whether a row of the step starts from a snapshot: the loads that the step reads must have arrived before."""
        return bool(self._starts) and any(row in self._starts for row in plan.rows.tolist())

    def restore(self, plan: BatchPlan) -> None:
        """Copies their snapshots to the rows of which this is the first step, on the current stream."""
        starts = [self._starts.pop(row) for row in plan.rows.tolist() if row in self._starts]
        if not starts:
            return
        columns = [(each.row, each.restore_slot, each.num_computed) for each in starts]
        host_rows, host_slots, ends = np.array(columns, dtype=np.int64).T
        rows, slots = upload((host_rows, host_slots), self._device)
        for each in self._memory:
            if each.rows.dim() == 5:  # states
                each.rows.index_copy_(1, rows, each.snapshots.index_select(1, slots))
            elif kept := each.snapshots.shape[2]:
                ring = each.rows.shape[2]
                positions = ends[:, None] - kept + np.arange(kept)
                (places,) = upload(((host_rows[:, None] * ring + positions % ring).reshape(-1),), self._device)
                newest = each.snapshots.index_select(1, slots).flatten(1, 2)
                each.rows.flatten(1, 2).index_copy_(1, places, newest)
