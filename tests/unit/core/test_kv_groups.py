"""KV groups: bytes of a slot, of what a row carries along, and of its snapshot."""

from __future__ import annotations

import msgspec
import pytest

from hiserve.core.kv_groups import CacheGroupSpec, CachePlan, Space

GROUP = CacheGroupSpec(name="kv", num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16")


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4), ("float64", 8)])
def test_a_slot_holds_key_and_value_of_every_head_and_layer(dtype: str, size: int) -> None:
    assert msgspec.structs.replace(GROUP, dtype=dtype).slot_bytes == 2 * 3 * 2 * 16 * size


STATE = CacheGroupSpec(
    name="delta_state",
    num_layers=3,
    num_kv_heads=4,
    head_dim=8,
    value_dim=16,
    dtype="float32",
    codec="state",
    space=Space.ROW,
)
INPUTS = CacheGroupSpec(
    name="delta_inputs",
    num_layers=3,
    num_kv_heads=1,
    head_dim=40,
    dtype="bfloat16",
    codec="inputs",
    space=Space.ROW,
    ring=9,
    snapshot_rows=3,
)


def plan_of(*groups: CacheGroupSpec) -> CachePlan:
    return CachePlan(groups=groups, layers=(("kv", 0),))


def test_a_row_carries_its_state_and_all_of_its_ring_and_a_snapshot_the_newest_rows() -> None:
    state, row = 3 * 4 * 8 * 16 * 4, 3 * 40 * 2
    assert (STATE.row_bytes, STATE.snapshot_bytes) == (state, state)
    assert (INPUTS.row_bytes, INPUTS.snapshot_bytes) == (9 * row, 3 * row)
    plan = plan_of(GROUP, STATE, INPUTS)
    assert (plan.row_bytes, plan.snapshot_bytes) == (state + 9 * row, state + 3 * row) and plan.has_snapshots
    assert plan.page_bytes(Space.HISTORY, 4) == 4 * GROUP.slot_bytes and plan.page_bytes(Space.ROW, 4) == 0


def test_a_page_has_a_row_for_each_ratio_of_its_tokens() -> None:
    rare = msgspec.structs.replace(GROUP, name="rare", ratio=4)
    assert (rare.page_rows(16), rare.page_bytes(16)) == (4, 4 * GROUP.slot_bytes)
    assert plan_of(GROUP, rare).page_bytes(Space.HISTORY, 16) == 20 * GROUP.slot_bytes
    with pytest.raises(AssertionError, match="rows of 4 tokens in pages of 6"):
        rare.page_rows(6)


def test_a_ring_that_is_empty_at_each_boundary_needs_no_snapshot() -> None:
    plan = plan_of(GROUP, msgspec.structs.replace(INPUTS, snapshot_rows=0))
    assert plan.row_bytes == INPUTS.row_bytes and not plan.has_snapshots
    assert (GROUP.row_bytes, GROUP.snapshot_bytes) == (0, 0) and not plan_of(GROUP).has_snapshots
