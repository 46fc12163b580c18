"""Triton kernels for the inputs of a step; twins in ``step_reference``."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.forward import ForwardInputs
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.reference import PADDING_PAGE
from hiserve.kernels.step_ops import RowTensors, StepInputs

_TABLE_BLOCK = 4096
_TABLE_WARPS = 8
_TOKEN_BLOCK = 128


class _Windows(NamedTuple):
    """The window tables of the rows, and the part of a step that is read from them."""

    table: Tensor
    entry_owner: Tensor
    page_owner: Tensor
    step_table: Tensor
    slots: Tensor


class _States(NamedTuple):
    """How far the states of the rows are advanced, and the part of a step that is read from it."""

    lens: Tensor
    snap_at: Tensor
    snap_slot: Tensor
    rows: Tensor
    starts: Tensor
    state_lens: Tensor
    state_ends: Tensor
    step_snap_at: Tensor
    step_snap_slots: Tensor


class _Trees(NamedTuple):
    """The trees of the rows' drafts, and the masks of a step's tokens."""

    masks: Tensor
    tree_mask: Tensor


def fill_inputs(inputs: StepInputs, state: RowTensors, *, page_size: int) -> None:
    forward = inputs.forward
    num_rows, num_tokens = inputs.rows.shape[0], forward.token_rows.shape[0]
    early = early_launch(state.tokens.device)
    windows, size, num_window_pages = _windows(forward, state)
    trees, num_nodes = _trees(inputs, state)
    _check_rows[(num_rows,)](
        inputs.rows, inputs.num_new, inputs.num_draft, inputs.samples, inputs.max_len, state.computed_len,
        state.known_len, state.page_table, state.entry_owner, state.page_owner, inputs.legal, forward.kv_lens,
        forward.page_table, windows, _states(forward, state), forward.page_table.stride(0), forward.page_table.shape[1],
        state.page_table.shape[1], state.page_owner.shape[0], state.tokens.shape[1], size, num_window_pages,
        SINK=PADDING_PAGE, PAGE_SIZE=page_size, BLOCK=_TABLE_BLOCK, num_warps=_TABLE_WARPS, **early,
    )  # fmt: skip
    _place_tokens[(triton.cdiv(num_tokens, _TOKEN_BLOCK),)](
        forward.token_rows, inputs.offsets, inputs.rows, inputs.num_new, inputs.num_draft, forward.kv_lens,
        inputs.legal, state.tokens, state.page_table, forward.input_ids, forward.positions, forward.slots, windows,
        trees, num_nodes, num_tokens, state.page_table.shape[1], state.tokens.shape[1],
        SINK=PADDING_PAGE, PAGE_SIZE=page_size, BLOCK=_TOKEN_BLOCK, num_warps=_TOKEN_BLOCK // 32, **early,
    )  # fmt: skip


def _windows(forward: ForwardInputs, state: RowTensors) -> tuple[_Windows | None, int, int]:
    """Returns the tensors of window layers, the window, and the pages of their pool; None where they share their pages."""
    windows, table, slots = state.windows, forward.window_table, forward.window_slots
    if windows is None or table is None or slots is None:
        return None, 0, 0
    assert table.stride() == forward.page_table.stride(), (table.stride(), forward.page_table.stride())
    tensors = _Windows(windows.table, windows.entry_owner, windows.page_owner, table, slots)
    return tensors, windows.size, windows.page_owner.shape[0]


def _trees(inputs: StepInputs, state: RowTensors) -> tuple[_Trees | None, int]:
    """Returns the tensors of trees, and their nodes; None where no row verifies one."""
    if state.trees is None or inputs.forward.tree_mask is None:
        return None, 0
    masks = state.trees.masks
    return _Trees(masks, inputs.forward.tree_mask), masks.shape[1]


def _states(forward: ForwardInputs, state: RowTensors) -> _States | None:
    """Returns the tensors of carried states; None where rows carry nothing."""
    kept, filled = state.states, forward.state
    if kept is None or filled is None:
        return None
    targets = (filled.rows, filled.starts, filled.state_lens, filled.state_ends, filled.snap_at, filled.snap_slots)
    return _States(kept.lens, kept.snap_at, kept.snap_slot, *targets)


# Most of these are views of one upload, at any multiple of 8 bytes: do not compile a variant for each alignment.
_VARYING = [
    *("rows", "num_new", "num_draft", "samples", "max_len", "token_rows", "offsets"),
    *("legal", "kv_lens", "table", "input_ids", "positions", "slots"),
    *("table_stride", "width", "num_tokens", "window", "num_window_pages", "num_nodes"),
]


@triton.jit(do_not_specialize=_VARYING)
def _check_rows(  # type: ignore[no-untyped-def]
    rows, num_new, num_draft, samples, max_len, computed_len, known_len, page_table, entry_owner, page_owner, legal,
    kv_lens, table, windows, states, table_stride, width, num_entries, num_pages, capacity, window, num_window_pages,
    SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program checks one row and copies its tables."""
    number = tl.program_id(0).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row, new = tl.load(rows + number), tl.load(num_new + number)
    computed, known = tl.load(computed_len + row), tl.load(known_len + row)
    end = computed + new
    pages, owners = page_table + row * num_entries, entry_owner + row * num_entries
    # The slot of the last computed token is derived from the length, so only its page can be wrong.
    last_page = tl.load(pages + tl.minimum(tl.maximum(computed - 1, 0) // PAGE_SIZE, width - 1))
    is_placed = (computed <= 0) | ((last_page != SINK) & (last_page >= 0) & (last_page < num_pages))
    # The last token that a row may emit is at ``end``.
    reaches = (end - tl.load(num_draft + number) == known) & (end < capacity)
    is_known = tl.where(tl.load(samples + number) != 0, reaches, end <= known)
    is_legal = (computed >= 0) & is_placed & is_known & (end <= tl.load(max_len + number))
    num_used = tl.minimum(tl.cdiv(end, PAGE_SIZE), width).to(tl.int32)
    num_stale = _count_stale(pages, owners, page_owner, 0, num_used, num_pages, BLOCK)
    if windows is not None:
        first = (tl.maximum(computed - window + 1, 0) // PAGE_SIZE).to(tl.int32)
        its_pages, its_owners = windows.table + row * num_entries, windows.entry_owner + row * num_entries
        num_stale += _count_stale(its_pages, its_owners, windows.page_owner, first, num_used, num_window_pages, BLOCK)
    is_legal = is_legal & (num_stale == 0)
    kv_len = tl.where(is_legal, end, new)
    tl.store(legal + number, is_legal)
    tl.store(kv_lens + number, kv_len)
    if states is not None:
        _fill_states(states, number, row, is_legal, kv_len - new, kv_len - tl.load(num_draft + number))
    num_used = tl.minimum(tl.cdiv(kv_len, PAGE_SIZE), width).to(tl.int32)
    num_read = tl.where(is_legal, num_used, 0)
    _copy_entries(pages, table + number * table_stride, 0, num_read, num_used, SINK, BLOCK)
    if windows is not None:
        first, step_table = tl.where(is_legal, first, 0), windows.step_table + number * table_stride
        _copy_entries(its_pages, step_table, first, num_read, num_used, SINK, BLOCK)


@triton.jit
def _fill_states(states, number, row, is_legal, start, end):  # type: ignore[no-untyped-def]
    """Fills what a forward reads of a row's states; an illegal one is row 0, empty."""
    tl.store(states.rows + number, tl.where(is_legal, row, 0))
    tl.store(states.starts + number, start)
    tl.store(states.state_ends + number, end)
    tl.store(states.state_lens + number, tl.load(states.lens + row, mask=is_legal, other=0))
    tl.store(states.step_snap_at + number, tl.load(states.snap_at + row, mask=is_legal, other=0))
    tl.store(states.step_snap_slots + number, tl.load(states.snap_slot + row, mask=is_legal, other=0))


@triton.jit
def _count_stale(pages, owners, page_owner, first, end, num_pages, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts the entries from ``first`` to ``end`` that are no pages, or pages of another allocation."""
    num_stale = 0
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        is_used = entry < end
        page = tl.load(pages + entry, mask=is_used, other=0)
        owner = tl.load(owners + entry, mask=is_used, other=0)
        is_page = (page >= 0) & (page < num_pages)  # others are not read
        is_stale = (tl.load(page_owner + page, mask=is_used & is_page, other=0) != owner) | ~is_page
        num_stale += tl.sum(is_stale.to(tl.int32), 0)
    return num_stale


@triton.jit
def _copy_entries(pages, table, first, num_read, num_used, SINK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies entries ``first`` to ``num_used`` of a row; the padding page stands for those from ``num_read`` on."""
    for start in range(first, num_used, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        page = tl.load(pages + entry, mask=entry < num_read, other=SINK)
        tl.store(table + entry, page, mask=entry < num_used)


@triton.jit(do_not_specialize=_VARYING)
def _place_tokens(  # type: ignore[no-untyped-def]
    token_rows, offsets, rows, num_new, num_draft, kv_lens, legal, tokens, page_table, input_ids, positions, slots,
    windows, trees, num_nodes, num_tokens, num_entries, capacity,
    SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program fills the inputs of a block of tokens, after ``_check_rows``."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    number = tl.load(token_rows + token, mask=mask, other=0)
    row = tl.load(rows + number, mask=mask, other=0)
    first = tl.load(kv_lens + number, mask=mask, other=0) - tl.load(num_new + number, mask=mask, other=0)
    offset = tl.load(offsets + token, mask=mask, other=0)
    position = first + offset
    is_legal = tl.load(legal + number, mask=mask, other=0) != 0
    page = tl.load(page_table + row * num_entries + position // PAGE_SIZE, mask=mask & is_legal, other=SINK)
    input_id = tl.load(tokens + row * capacity + position, mask=mask, other=0)
    put_tokens(token, mask, input_id, position, page, input_ids, positions, slots, PAGE_SIZE)
    if trees is not None:
        is_node = mask & (tl.load(num_draft + number, mask=mask, other=0) > 0)
        seen = tl.load(trees.masks + row * num_nodes + offset, mask=is_node & (offset < num_nodes), other=0)
        tl.store(trees.tree_mask + token, seen, mask=mask)
        depth = tl.sum((seen[:, None] >> tl.arange(0, 64)[None, :]) & 1, 1) - 1
        tl.store(positions + token, first + depth, mask=mask & (seen != 0))  # the slot is that of its number
    if windows is not None:
        page = tl.load(windows.table + row * num_entries + position // PAGE_SIZE, mask=mask & is_legal, other=SINK)
        tl.store(windows.slots + token, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=mask)


@triton.jit
def put_tokens(token, mask, input_id, position, page, input_ids, positions, slots, PAGE_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a block of a forward's tokens: ids, positions, and slots by their pages."""
    tl.store(input_ids + token, input_id, mask=mask)
    tl.store(positions + token, position, mask=mask)
    tl.store(slots + token, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=mask)
