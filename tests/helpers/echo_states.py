"""Recurrent states for the echo executor: hashes of tokens, folded, snapshotted and restored as a device does it."""

from __future__ import annotations

import zlib

import numpy as np

from hiserve.core.plan import BatchPlan

State = tuple[int, int]  # tokens that it covers, and their hash
EMPTY: State = (0, 0)
BROKEN: State = (-1, -1)


def fold(state: State, tokens: np.ndarray) -> State:
    """The state after more tokens."""
    length, hashed = state
    return length + tokens.size, zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int32).tobytes(), hashed)


class EchoStates:
    """The state of each row, which lags behind its drafts, and the slots of snapshots.

    Attributes:
        slots: What each slot holds.
        num_stored: Snapshots that were stored.
        num_restored: Rows that started from one.
        num_broken: Rows that started from one whose load had failed; whoever planned them ignores their results.
    """

    def __init__(self, max_rows: int, num_slots: int) -> None:
        self._states = [EMPTY] * (max_rows + 1)
        self._at = np.zeros(max_rows + 1, dtype=np.int64)
        self._slot = np.zeros(max_rows + 1, dtype=np.int64)
        self._starts = np.zeros(max_rows + 1, dtype=np.int64)
        self.slots = [BROKEN] * num_slots
        self.num_stored = self.num_restored = self.num_broken = 0

    def apply(self, plan: BatchPlan) -> None:
        for admit in plan.admit:
            self._states[admit.row] = EMPTY if admit.num_computed == 0 else BROKEN
            self._starts[admit.row] = admit.restore_slot
            self._at[admit.row] = self._slot[admit.row] = 0
            assert (admit.restore_slot > 0) == (admit.num_computed > 0), f"row {admit.row} starts without its snapshot"
        writes = plan.snapshots
        assert np.unique(writes.rows).size == writes.rows.size and (writes.slots > 0).all()
        for row, boundary in zip(writes.rows.tolist(), writes.boundaries.tolist(), strict=True):
            length = self._states[row][0]
            assert length < boundary, f"row {row} is at {length} and is to store at {boundary}"
        self._at[writes.rows], self._slot[writes.rows] = writes.boundaries, writes.slots

    def step(self, row: int, tokens: np.ndarray) -> None:
        """Folds the certain tokens of a step, of all that a row has (int32 ``[state_end]``)."""
        if self._starts[row]:
            self._states[row], self._starts[row] = self.slots[self._starts[row]], 0
            self.num_restored += 1
            self.num_broken += self._states[row] == BROKEN
        state, at = self._states[row], int(self._at[row])
        if state == BROKEN:
            self.spoil([row])
            return
        if state[0] < at <= tokens.size:
            self.slots[self._slot[row]] = fold(state, tokens[state[0] : at])
            self.num_stored += 1
        self._states[row] = fold(state, tokens[state[0] :])
        assert self._states[row] == fold(EMPTY, tokens), (
            f"the state of row {row} is not that of its {tokens.size} tokens"
        )

    def spoil(self, rows: list[int]) -> None:
        """Leaves a step half done: what it would have stored is garbage, and so are the states of its rows."""
        for row in rows:
            if self._states[row][0] < self._at[row]:
                self.slots[self._slot[row]] = BROKEN
            self._states[row], self._at[row], self._starts[row] = BROKEN, 0, 0
