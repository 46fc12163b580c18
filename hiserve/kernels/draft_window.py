"""Triton kernels for the pages that a head has computed and attends over; twins in ``draft_reference``."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import ForwardInputs
from hiserve.kernels.draft_ops import DraftProgress, StepHiddenStates
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.reference import PADDING_PAGE
from hiserve.kernels.step_ops import RowTensors

_TABLE_BLOCK = 1024


def note_drafted(step: StepHiddenStates, state: RowTensors, progress: DraftProgress) -> None:
    _note_drafted[(step.rows.shape[0],)](
        step.rows, step.first, step.legal, step.qo_indptr, step.page_table, state.computed_len, progress.is_drafted,
        progress.start_page, progress.taken_len, step.page_table.stride(0), progress.is_drafted.stride(0),
        SINK=PADDING_PAGE, PAGE_SIZE=step.page_size, BLOCK=_TABLE_BLOCK, **early_launch(step.rows.device),
    )  # fmt: skip


def draft_window(
    rows: Tensor, first: Tensor, legal: Tensor, made: ForwardInputs, progress: DraftProgress, *, page_size: int
) -> ForwardInputs:
    num_rows, width = made.page_table.shape
    left = replace(made, kv_lens=torch.empty_like(made.kv_lens), page_table=torch.empty_like(made.page_table))
    _draft_window[(num_rows,)](
        rows, first, legal, made.kv_lens, made.page_table, progress.start_page, left.kv_lens, left.page_table,
        made.page_table.stride(0), left.page_table.stride(0), width,
        PAGE_SIZE=page_size, BLOCK=_TABLE_BLOCK, **early_launch(rows.device),
    )  # fmt: skip
    return left


_VARYING = ["rows", "first", "legal", "qo_indptr", "kv_lens", "table", "left_lens", "left_table"]
_VARYING += ["table_stride", "left_stride", "width"]


@triton.jit(do_not_specialize=_VARYING)
def _note_drafted(  # type: ignore[no-untyped-def]
    rows, first, legal, qo_indptr, table, computed_len, is_drafted, start_page, taken_len, table_stride, drafted_stride,
    SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program handles one row; rows that failed the check store nothing."""
    number = tl.program_id(0).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    is_legal = tl.load(legal + number) != 0
    row = tl.load(rows + number)
    begin = tl.where(is_legal, tl.load(first + number), 0)
    first_page = begin // PAGE_SIZE
    end = begin + (tl.load(qo_indptr + number + 1) - tl.load(qo_indptr + number))
    behind_step = tl.cdiv(end, PAGE_SIZE)
    goes_on = tl.load(taken_len + row) == begin
    start = tl.where(goes_on, tl.load(start_page + row), behind_step)
    is_aligned = begin % PAGE_SIZE == 0
    num_before = tl.where(is_aligned & is_legal, first_page, 0).to(tl.int32)
    behind_missing = tl.zeros((BLOCK,), dtype=tl.int32)
    for entry_block in range(0, num_before, BLOCK):
        entry = entry_block + tl.arange(0, BLOCK)
        is_before = entry < num_before
        page = tl.load(table + number * table_stride + entry, mask=is_before, other=SINK).to(tl.int64)
        flag = tl.load(is_drafted + page * drafted_stride, mask=is_before, other=1)
        is_missing = is_before & ((flag != 1) | (page == SINK))
        behind_missing = tl.where(is_missing, entry + 1, behind_missing)
    start = tl.where(is_aligned, tl.max(behind_missing, 0).to(tl.int64), start)
    start = tl.where(start > first_page, tl.maximum(start, behind_step), start)
    computed = tl.load(computed_len + row)
    tl.store(start_page + row, start, mask=is_legal)
    tl.store(taken_len + row, computed, mask=is_legal)
    from_entry = tl.maximum(start, first_page).to(tl.int32)
    to_entry = tl.where(is_legal, computed // PAGE_SIZE, 0).to(tl.int32)
    for entry_block in range(from_entry, to_entry, BLOCK):
        entry = entry_block + tl.arange(0, BLOCK)
        is_done = entry < to_entry
        page = tl.load(table + number * table_stride + entry, mask=is_done, other=SINK).to(tl.int64)
        tl.store(is_drafted + page * drafted_stride, 1, mask=is_done & (page != SINK))


@triton.jit(do_not_specialize=_VARYING)
def _draft_window(  # type: ignore[no-untyped-def]
    rows, first, legal, kv_lens, table, start_page, left_lens, left_table, table_stride, left_stride, width,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program shifts the table of one row left."""
    number = tl.program_id(0).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    kv_len = tl.load(kv_lens + number)
    is_legal = tl.load(legal + number) != 0
    begin = tl.minimum(tl.where(is_legal, tl.load(first + number), 0), kv_len - 1)
    start = tl.load(start_page + tl.load(rows + number))
    skipped = tl.where(is_legal, tl.minimum(start, begin // PAGE_SIZE), 0)
    tl.store(left_lens + number, kv_len - skipped * PAGE_SIZE)
    for entry_block in range(0, width, BLOCK):
        entry = entry_block + tl.arange(0, BLOCK)
        source = tl.minimum(entry + skipped, width - 1)
        page = tl.load(table + number * table_stride + source, mask=entry < width, other=0)
        tl.store(left_table + number * left_stride + entry, page, mask=entry < width)
