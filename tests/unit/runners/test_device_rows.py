"""Permanent rows: release, admission, page tables, and what a step leaves behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hiserve.core.plan import BatchPlan, RowAdmit, TableWrites
from hiserve.core.upload import upload
from hiserve.runners.device_rows import DeviceRows
from tests.helpers.plans import GREEDY, int32

PAGE = 4


@pytest.fixture
def rows() -> DeviceRows:
    return DeviceRows(max_rows=3, max_len=12, page_size=PAGE, num_pages=8, device="cpu")


def plan(
    release: list[int] | None = None,
    admit: list[RowAdmit] | None = None,
    writes: list[tuple[int, int, int, int]] | None = None,
) -> BatchPlan:
    """A plan of state changes; ``writes`` are (row, index, page, owner)."""
    columns = np.array(writes or [], dtype=np.int32).reshape(-1, 4).T
    return BatchPlan(
        step_id=1,
        rows=int32([1]),
        num_new=int32([1]),
        num_draft=int32([0]),
        samples=np.array([True]),
        num_scored=int32([0]),
        max_len=int32([1]),
        release=int32(release or []),
        admit=tuple(admit or []),
        table=TableWrites(*columns),
    )


def admit(row: int, tokens: list[int], num_computed: int = 0) -> RowAdmit:
    return RowAdmit(row, int32(tokens), len(tokens), num_computed, GREEDY)


def test_admission_sets_tokens_and_lengths(rows: DeviceRows) -> None:
    rows.apply(plan(admit=[admit(2, [5, 6, 7]), admit(1, [9, 9, 9, 9, 9], num_computed=4)]))
    assert rows.tokens[2, :3].tolist() == [5, 6, 7]
    assert rows.known_len.tolist() == [0, 5, 3, 0]
    assert rows.computed_len.tolist() == [0, 4, 0, 0]


def test_a_table_write_sets_the_entry_and_both_owners(rows: DeviceRows) -> None:
    rows.apply(plan(writes=[(1, 0, 5, 31), (1, 2, 3, 32), (2, 1, 7, 33)]))
    assert rows.page_table[1].tolist() == [5, 0, 3]
    assert rows.entry_owner[1].tolist() == [31, -1, 32]
    assert rows.page_table[2].tolist() == [0, 7, 0]
    assert rows.page_owner.tolist() == [0, -1, -1, 32, -1, 31, -1, 33]


def test_release_comes_before_admission_and_admission_before_the_table(rows: DeviceRows) -> None:
    """One plan that moves row 1 and its page from one request to the next."""
    rows.apply(plan(admit=[admit(1, [1, 2, 3])], writes=[(1, 0, 5, 1), (1, 1, 6, 1)]))
    rows.apply(plan(release=[1], admit=[admit(1, [7, 8])], writes=[(1, 0, 5, 2)]))
    assert rows.known_len[1].item() == 2
    assert rows.tokens[1, :2].tolist() == [7, 8]
    assert rows.page_table[1].tolist() == [5, 0, 0]
    assert rows.entry_owner[1].tolist() == [2, -1, -1]


def test_a_released_row_knows_nothing_and_owns_nothing(rows: DeviceRows) -> None:
    rows.apply(plan(admit=[admit(row, [1, 2, 3, 4, 5], 4) for row in (1, 2)], writes=[(1, 0, 5, 1), (2, 0, 6, 1)]))
    rows.apply(plan(release=[1]))
    assert rows.known_len.tolist() == [0, 0, 5, 0]
    assert rows.computed_len.tolist() == [0, 0, 4, 0]
    assert rows.page_table[:3, 0].tolist() == [0, 0, 6]
    assert rows.entry_owner[:3, 0].tolist() == [-1, -1, 1]


def test_a_new_tenant_inherits_no_entry_of_the_last(rows: DeviceRows) -> None:
    rows.apply(plan(writes=[(1, 0, 5, 1), (1, 1, 6, 1), (2, 0, 7, 1)]))
    rows.apply(plan(admit=[admit(1, [7, 8])]))
    assert rows.entry_owner[1].tolist() == [-1, -1, -1]
    assert rows.entry_owner[2].tolist() == [1, -1, -1]


def test_a_new_tenant_inherits_no_window_entry_of_the_last() -> None:
    rows = DeviceRows(max_rows=3, max_len=12, page_size=PAGE, num_pages=8, device="cpu", window=5, num_window_pages=6)
    assert rows.windows is not None
    writes = TableWrites(*np.array([(1, 0, 5, 7), (1, 1, 2, 8), (2, 0, 3, 9)], dtype=np.int32).T)
    rows.apply(replace(plan(), window_table=writes))
    assert rows.windows.page_owner.tolist() == [0, -1, 8, 9, -1, 7]
    rows.apply(plan(admit=[admit(1, [7, 8])]))
    assert rows.windows.table[:3].tolist() == [[0, 0, 0], [0, 0, 0], [3, 0, 0]]
    assert rows.windows.entry_owner[1:3].tolist() == [[-1, -1, -1], [9, -1, -1]]


def test_a_shared_page_keeps_its_owner_in_every_row(rows: DeviceRows) -> None:
    rows.apply(plan(writes=[(1, 0, 5, 4), (2, 0, 5, 4)]))
    assert rows.page_owner[5].item() == 4
    assert rows.entry_owner[1:3, 0].tolist() == [4, 4]


@pytest.mark.parametrize("page", [0, 8, -1])
def test_writing_the_sink_or_a_page_outside_the_pool_is_our_own_fault(rows: DeviceRows, page: int) -> None:
    with pytest.raises(AssertionError, match="of a pool of 8"):
        rows.apply(plan(writes=[(1, 0, page, 1)]))


@pytest.mark.parametrize(
    ("request_", "match"),
    [(admit(0, [1]), "padding row"), (admit(1, [1, 2], 2), "computed"), (admit(1, [1] * 13), "a row holds 12")],
)
def test_impossible_admissions_are_our_own_fault(rows: DeviceRows, request_: RowAdmit, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        rows.apply(plan(admit=[request_]))


def test_upload_carries_arrays_of_every_kind_and_copies_them() -> None:
    arrays = [
        np.array([[1, 2, 3]], dtype=np.int32),
        np.array([2**40, -1]),
        np.array([True, False, True]),
        np.empty(0, dtype=np.int64),
        np.array([0.5]),
        np.arange(10, dtype=np.int32)[::2],
    ]
    arrays[1].flags.writeable = False
    moved = upload(arrays, torch.device("cpu"))
    assert [each.tolist() for each in moved] == [each.tolist() for each in arrays]
    arrays[4][0] = 9.0
    assert moved[4].item() == 0.5


def test_rows_know_whether_a_page_has_moved_since_the_plan_before(rows: DeviceRows) -> None:
    """The version of the first plan says nothing: there is no step before."""
    moved = []
    for version in (3, 3, 5, 5, 6):
        rows.apply(replace(plan(), relocation_version=version))
        moved.append(rows.has_moved)
    assert moved == [False, False, True, False, True]


def test_a_page_handed_out_for_new_tokens_has_not_been_drafted(rows: DeviceRows) -> None:
    """A page of a prefix, or one that is loaded, says itself whether it has."""
    rows.is_drafted = torch.ones((8, 2))[:, 1]
    writes = plan(writes=[(1, 0, 5, 31), (1, 1, 3, 32), (2, 0, 7, 33)])
    rows.apply(replace(writes, table=replace(writes.table, are_new=np.array([False, True, True]))))
    assert rows.is_drafted.tolist() == [1, 1, 1, 0, 1, 1, 1, 0]
    rows.apply(plan(writes=[(1, 0, 4, 34)]))
    assert rows.is_drafted.sum() == 6


def test_nothing_of_a_rows_next_tenant_was_taken_in(rows: DeviceRows) -> None:
    rows.taken_len.fill_(6)
    rows.apply(plan(release=[2], admit=[admit(1, [7, 8])]))
    assert rows.taken_len.tolist() == [6, 0, 0, 6]
