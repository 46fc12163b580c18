"""What rows carry along: lengths, wanted snapshots, and the start from one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.core.forward import GroupedKV
from hiserve.core.kv_groups import CacheGroupSpec, CachePlan, Space
from hiserve.core.plan import BatchPlan, RowAdmit, SnapshotWrites, TableWrites
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.inputs import build_inputs
from hiserve.runners.row_states import RowStates
from tests.helpers.plans import GREEDY, int32

PAGE, NUM_ROWS, NUM_SLOTS, RING, KEPT = 4, 4, 3, 5, 3
STATE = CacheGroupSpec(
    name="state", num_layers=2, num_kv_heads=2, head_dim=3, value_dim=4, dtype="float64", codec="state", space=Space.ROW
)
INPUTS = CacheGroupSpec(
    name="inputs",
    num_layers=2,
    num_kv_heads=1,
    head_dim=6,
    dtype="float32",
    codec="inputs",
    space=Space.ROW,
    ring=RING,
    snapshot_rows=KEPT,
)
PAGES = CacheGroupSpec(name="kv", num_layers=1, num_kv_heads=2, head_dim=8, dtype="float32")


def make_pool() -> DevicePool:
    pool = DevicePool([PAGES, STATE, INPUTS], 9, PAGE, "cpu", num_rows=NUM_ROWS, num_snapshots=NUM_SLOTS)
    for memory in pool.carried.values():
        for each in (memory.rows, memory.snapshots):
            each.copy_(torch.arange(each.numel()).view_as(each) + each.numel())
    return pool


def make_rows(pool: DevicePool) -> tuple[DeviceRows, RowStates]:
    rows = DeviceRows(NUM_ROWS - 1, 24, PAGE, 9, "cpu", carried=tuple(pool.carried.values()))
    assert rows.states is not None
    return rows, rows.states


def admit(row: int, num_tokens: int, num_computed: int = 0, slot: int = 0) -> RowAdmit:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return RowAdmit(row, tokens, num_tokens, num_computed, GREEDY, restore_slot=slot)


def plan(*admitted: RowAdmit, rows: list[int], snapshots: SnapshotWrites | None = None) -> BatchPlan:
    made = BatchPlan(
        step_id=1,
        rows=int32(rows),
        num_new=int32([1] * len(rows)),
        num_draft=int32([0] * len(rows)),
        samples=np.zeros(len(rows), dtype=bool),
        num_scored=int32([0] * len(rows)),
        max_len=int32([20] * len(rows)),
        admit=admitted,
    )
    return made if snapshots is None else replace(made, snapshots=snapshots)


def test_layers_see_the_snapshots_of_what_rows_carry_along() -> None:
    pool = make_pool()
    kv, delta = pool.model_layers(
        CachePlan(
            groups=(PAGES, STATE, INPUTS), layers=(("kv", 0), ("state", 1)), beside=((("inputs", 0),), (("inputs", 1),))
        )
    )
    assert isinstance(kv, GroupedKV) and isinstance(delta, GroupedKV)
    assert kv.k.shape == (9 * PAGE, 2, 8) and set(kv.snapshots) == {"inputs"}
    assert delta.k.shape == (NUM_ROWS, 2, 3, 4)
    assert torch.equal(delta.snapshots["state"], pool.carried["state"].snapshots[1])
    assert torch.equal(delta.snapshots["inputs"], pool.carried["inputs"].snapshots[1])
    assert delta.snapshots["inputs"].shape == (NUM_SLOTS, KEPT, 6)
    carried = (each for memory in pool.carried.values() for each in (memory.rows, memory.snapshots))
    assert pool.num_bytes == pool.storage("kv").nbytes + sum(each.nbytes for each in carried)


def test_a_row_without_a_snapshot_starts_empty_whatever_its_memory_holds() -> None:
    rows, states = make_rows(make_pool())
    states.tensors.lens.fill_(7)
    states.tensors.snap_slot.fill_(1)
    rows.apply(plan(admit(2, 9), rows=[2]))
    assert states.tensors.lens.tolist() == [7, 7, 0, 7]
    assert states.tensors.snap_slot.tolist() == [1, 1, 0, 1]


def test_a_snapshot_is_read_before_the_first_step_of_its_row_and_at_no_other_time() -> None:
    pool = make_pool()
    rows, states = make_rows(pool)
    first = plan(admit(2, 14, 12, 1), admit(3, 9), rows=[3])
    rows.apply(first)
    assert not states.waits(first)
    assert states.tensors.lens.tolist() == [0, 0, 12, 0]
    before = pool.carried["state"].rows.clone()
    states.restore(first)
    assert torch.equal(pool.carried["state"].rows, before)
    for memory in pool.carried.values():
        memory.snapshots.add_(0.5)  # it has arrived meanwhile
    step = plan(rows=[3, 2])
    rows.apply(step)
    assert states.waits(step)
    states.restore(step)
    state, inputs = pool.carried["state"], pool.carried["inputs"]
    assert torch.equal(state.rows[:, 2], state.snapshots[:, 1])
    before[:, 2] = state.snapshots[:, 1]
    assert torch.equal(state.rows, before), "another row has changed"
    for kept, position in enumerate(range(12 - KEPT, 12)):
        assert torch.equal(inputs.rows[:, 2, position % RING], inputs.snapshots[:, 1, kept])
    assert not states.waits(step)


def test_a_row_that_changes_hands_starts_from_no_snapshot_of_its_last_request() -> None:
    rows, states = make_rows(make_pool())
    rows.apply(plan(admit(2, 12, 8, 1), rows=[3]))
    step = plan(admit(2, 5), rows=[2])
    rows.apply(step)
    assert not states.waits(step)
    assert states.tensors.lens[2] == 0


def test_a_row_cannot_start_behind_tokens_whose_state_is_lost() -> None:
    rows, _ = make_rows(make_pool())
    with pytest.raises(AssertionError, match="starts after 8 tokens without a state"):
        rows.apply(plan(admit(2, 12, 8), rows=[2]))
    with pytest.raises(AssertionError, match="slot 3 of 3"):
        rows.apply(plan(admit(2, 12, 8, NUM_SLOTS), rows=[2]))


def test_wanted_snapshots_reach_the_step_and_padding_wants_none() -> None:
    rows, states = make_rows(make_pool())
    wanted = SnapshotWrites(int32([2, 3]), int32([4, 8]), int32([2, 1]))
    table = TableWrites(int32([2]), int32([0]), int32([1]), int32([5]))
    made = replace(plan(admit(2, 3), admit(3, 5), rows=[2, 3], snapshots=wanted), table=table)
    rows.apply(made)
    state = build_inputs(made, rows).forward.state
    assert state is not None
    assert state.rows.tolist() == [2, 0]  # row 3 has no page
    assert state.snap_at.tolist() == [4, 0]
    assert state.snap_slots.tolist() == [2, 0]
    assert state.state_ends.tolist() == [1, 1]
    rows.apply(plan(rows=[], snapshots=SnapshotWrites(int32([2]), int32([0]), int32([0]))))
    assert states.tensors.snap_slot.tolist() == [0, 0, 0, 1]
    rows.forget()
    assert not states.tensors.snap_slot.any() and not states.tensors.lens.any()
