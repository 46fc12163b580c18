"""The slots in which rows store their states on the way: assigned before a step may pass a boundary, kept once one has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hiserve.cache.index.prefix_cache import Tail, TailPool
from hiserve.core.plan import NO_SNAPSHOTS, BoolArray, Int32Array, Int64Array, SnapshotWrites
from hiserve.core.transfers import NO_PAGES

_NEVER = np.iinfo(np.int32).max


@dataclass(slots=True)
class Store:
    """An assignment: some step that passes the boundary stores the snapshot.

    Attributes:
        boundary: In tokens, whole pages.
        slot: int32 ``[1]``. Held by the row.
        is_wanted: The boundary is worth a tail, whether the row goes on or not.
    """

    boundary: int
    slot: Int32Array
    is_wanted: bool


class RowSnapshots:
    """The part of the rows' state that concerns snapshots.

    The device stores a snapshot in the step that takes the state of a row, which covers the tokens before its drafts, past
    the boundary that was assigned last. While steps are in flight, the length of that state is known within bounds: a row
    gets an assignment if the next step may pass a boundary, above all lengths that the state may have before, and only if
    the former assignment was certainly served. A snapshot counts as stored once the result of a step shows it.

    Args:
        pool: The slots.
        page_size: Tokens between two boundaries.
        num_rows: Rows, the padding row included.

    Attributes:
        folded: int32 ``[R]``. Tokens that the state of each row covers, by the steps whose result is in.
        latest: Of each row, the tail at the last boundary that it has passed with a slot.
    """

    def __init__(self, pool: TailPool, page_size: int, num_rows: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self.folded = np.zeros(num_rows, dtype=np.int32)
        self.latest: dict[int, Tail] = {}
        self._num_in_flight = np.zeros(num_rows, dtype=np.int32)  # steps of the row
        self._num_drafts = np.zeros(num_rows, dtype=np.int32)  # of all of them
        self._last_drafts = np.zeros(num_rows, dtype=np.int32)  # of the last of them
        self._assigned = np.zeros(num_rows, dtype=np.int32)  # the last boundary that was assigned
        self._due = np.full(num_rows, _NEVER, dtype=np.int32)  # the first boundary in ``_stores``
        self._stores: dict[int, list[Store]] = {}
        self._starts: dict[int, Int32Array] = {}  # of rows without a result: the slot that they start from
        self._writes: list[tuple[int, int, int]] = []

    def admit(self, row: int, num_computed: int, tail: Tail | None) -> None:
        """Starts a row behind so many cached tokens, whose tail is on the device or being loaded."""
        slots = NO_PAGES if tail is None else tail.slots
        assert bool(slots.size) == (num_computed > 0), f"row {row} starts at {num_computed} with {slots.size} snapshots"
        self.folded[row] = num_computed
        self._num_in_flight[row] = self._num_drafts[row] = self._last_drafts[row] = self._assigned[row] = 0
        if slots.size:
            self._pool.hold(slots)
            self._starts[row] = slots.copy()

    def start_slot(self, row: int) -> int:
        """Returns the slot of the snapshot that a row starts from; 0 without one."""
        slots = self._starts.get(row, NO_PAGES)
        return int(slots[0]) if slots.size else 0

    def plan(
        self, rows: Int64Array, computed: Int32Array, num_new: Int32Array, num_draft: Int32Array
    ) -> list[tuple[int, int, int]]:
        """Counts a step, and returns the rows that may get an assignment for it: their state may pass a boundary.

        Args:
            rows: int64 ``[B]``.
            computed: int32 ``[B]``. Tokens computed after the step, at most.
            num_new: int32 ``[B]``. Tokens of the step, drafts included.
            num_draft: int32 ``[B]``.

        Returns:
            Of each, the row, and the most tokens that its state covers before the step and after it.
        """
        before, folded = computed - num_new, self.folded[rows]
        is_ahead = self._num_in_flight[rows] > 0
        most = np.where(is_ahead, before - self._last_drafts[rows], folded)
        least = np.where(is_ahead, before - self._num_drafts[rows], folded)
        after = computed - num_draft
        self._num_in_flight[rows] += 1
        self._num_drafts[rows] += num_draft
        self._last_drafts[rows] = num_draft
        is_free = self._assigned[rows] <= least
        passing = (is_free & (after // self._page_size > most // self._page_size)).nonzero()[0]
        return [(int(rows[at]), int(most[at]), int(after[at])) for at in passing.tolist()]

    def assign(self, row: int, boundary: int, *, is_wanted: bool) -> None:
        """Lets the next step of a row that passes a boundary store the snapshot, if there is a slot for it."""
        slot = self._pool.try_allocate()
        if not slot.size:
            return
        stores = self._stores.setdefault(row, [])
        stores.append(Store(boundary, slot, is_wanted))
        self._due[row] = stores[0].boundary
        self._assigned[row] = boundary
        self._writes.append((row, boundary, int(slot[0])))

    def take_writes(self) -> SnapshotWrites:
        """Returns the assignments since the last call."""
        if not self._writes:
            return NO_SNAPSHOTS
        rows, boundaries, slots = np.array(self._writes, dtype=np.int32).T.copy()
        self._writes = []
        return SnapshotWrites(rows, boundaries, slots)

    def want(self, row: int, boundary: int) -> bool:
        """Wants the snapshot of a boundary that was assigned; returns whether it was, and the row will keep it."""
        for store in self._stores.get(row, ()):
            store.is_wanted |= store.boundary == boundary
        return any(store.boundary == boundary for store in self._stores.get(row, ()))

    def settle(self, rows: Int64Array, settled: Int32Array, num_draft: Int32Array) -> None:
        """Counts a step whose result is in.

        Args:
            rows: int64 ``[n]``.
            settled: int32 ``[n]``. Tokens computed by it and those before, rejected drafts included.
            num_draft: int32 ``[n]``. Of these, the drafts of the step.
        """
        self.folded[rows] = settled - num_draft
        self._num_in_flight[rows] -= 1
        self._num_drafts[rows] -= num_draft
        if self._starts:
            for row in set(rows.tolist()) & self._starts.keys():
                self._pool.drop(self._starts.pop(row))

    def is_due(self, rows: Int64Array) -> BoolArray:
        """Returns which rows (int64 ``[n]``) have passed a boundary with a slot, bool ``[n]``."""
        due: BoolArray = self.folded[rows] >= self._due[rows]
        return due

    def take_due(self, row: int, num_published: int) -> list[Store]:
        """Takes the assignments of a row up to both its folded and its published tokens; they are served."""
        stores, end = self._stores.get(row, []), min(int(self.folded[row]), num_published)
        taken = [store for store in stores if store.boundary <= end]
        if taken:
            del stores[: len(taken)]
            self._due[row] = stores[0].boundary if stores else _NEVER
        return taken

    def keep(self, row: int, store: Store, tail: Tail) -> None:
        """Leaves a served assignment to its tail; the tail of the boundary before goes, unless it was used or a row may end there."""
        self._pool.drop(store.slot)  # of a boundary that had a tail, it is free now
        former, self.latest[row] = self.latest.get(row), tail
        if former is not None and former.is_provisional and former not in self.latest.values():
            former.leave_device()

    def release(self, row: int) -> Tail | None:
        """Gives back the slots of a row; returns the tail at the last boundary that it has passed with one."""
        for slot in (self._starts.pop(row, NO_PAGES), *(store.slot for store in self._stores.pop(row, ()))):
            self._pool.drop(slot)
        self._due[row] = _NEVER
        return self.latest.pop(row, None)

    def check(self, rows: Int64Array, settled: Int32Array) -> None:
        """Asserts that states cover no more than ``settled`` (int32 ``[n]``), and that rows hold their slots (for tests)."""
        assert (self.folded[rows] <= settled).all(), f"{rows} are folded to {self.folded[rows]}, settled {settled}"
        assert set(rows.tolist()) >= self._stores.keys() | self._starts.keys() | self.latest.keys()
        held = [*self._starts.values(), *(store.slot for stores in self._stores.values() for store in stores)]
        assert all((self._pool.num_refs[slot] > 0).all() for slot in held), f"slots {held} have no holder"
        for row, stores in self._stores.items():
            boundaries = [store.boundary for store in stores]
            assert boundaries == sorted(set(boundaries)), f"row {row} stores at {boundaries}"
