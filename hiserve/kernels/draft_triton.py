"""The draft kernels in Triton. ``DraftOps`` documents each; ``draft_reference`` has their twins."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.core.drafts import DraftLayout
from hiserve.core.forward import ForwardInputs
from hiserve.core.plan import MAX_FOLLOWING
from hiserve.kernels.draft_ops import DraftProgress, StepHiddenStates, draft_forward
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.reference import PADDING_PAGE
from hiserve.kernels.step_inputs import put_tokens
from hiserve.kernels.step_ops import RowTensors
from hiserve.kernels.tree_growth import grow, write_trees

__all__ = [
    "draft_hidden_states",
    "draft_inputs",
    "draft_ngrams",
    "draft_window",
    "grow",
    "keep_hidden_states",
    "note_drafted",
    "write_trees",
]

_TABLE_BLOCK = 4096
_TOKEN_BLOCK = 256
_INPUT_WARPS = 8
_HIDDEN_BLOCK = 2048
# Most of these are views of one upload or of a batch, so alignment varies: do not compile a variant for each.
_VARYING = [
    *("rows", "first", "num", "legal", "token_rows", "offsets", "qo_indptr", "table"),
    *("kv_lens", "input_ids", "positions", "slots", "num_rows", "num_tokens", "table_stride", "width"),
]
_WINDOW_VARYING = [
    *("rows", "first", "legal", "qo_indptr", "kv_lens", "table", "left_lens", "left_table"),
    *("table_stride", "left_stride", "width"),
]
_WINDOW_TABLE_BLOCK = 1024
_NGRAM_BLOCK = 4096
_NGRAM_WARPS = 8


def draft_inputs(
    rows: Tensor,
    first: Tensor,
    legal: Tensor,
    layout: DraftLayout,
    state: RowTensors,
    *,
    page_size: int,
    width: int,
) -> ForwardInputs:
    num_rows, num_tokens, device = rows.shape[0], layout.token_rows.shape[0], rows.device
    out = draft_forward(
        layout,
        kv_lens=torch.empty(num_rows, dtype=torch.int64, device=device),
        page_table=torch.full((num_rows, width), PADDING_PAGE, dtype=torch.int32, device=device),
        input_ids=torch.empty(num_tokens, dtype=torch.int32, device=device),
        positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
        slots=torch.empty(num_tokens, dtype=torch.int64, device=device),
    )
    _draft_inputs[(num_rows + triton.cdiv(num_tokens, _TOKEN_BLOCK),)](
        rows, first, layout.num_tokens, legal, layout.token_rows, layout.offsets, state.tokens, state.page_table,
        state.entry_owner, state.page_owner, out.kv_lens, out.page_table, out.input_ids, out.positions, out.slots,
        num_rows, num_tokens, out.page_table.stride(0), width, state.page_table.shape[1], state.page_owner.shape[0],
        state.tokens.shape[1],
        SINK=PADDING_PAGE, PAGE_SIZE=page_size, TABLE_BLOCK=_TABLE_BLOCK, TOKEN_BLOCK=_TOKEN_BLOCK,
        num_warps=_INPUT_WARPS, **early_launch(device),
    )  # fmt: skip
    return out


def draft_hidden_states(step: StepHiddenStates) -> Tensor:
    hidden_states = _check_hidden_states(step)
    num_tokens, size = step.token_rows.shape[0], hidden_states.shape[1]
    out = torch.empty((num_tokens, size), dtype=hidden_states.dtype, device=hidden_states.device)
    block = min(_HIDDEN_BLOCK, triton.next_power_of_2(size))
    _draft_hidden_states[(num_tokens, triton.cdiv(size, block))](
        hidden_states, step.last, step.page_hidden, step.rows, step.first, step.token_rows, step.offsets, step.legal,
        step.qo_indptr, step.page_table, out, hidden_states.stride(0), step.last.stride(0), step.page_hidden.stride(0),
        step.page_table.stride(0), size,
        PAGE_SIZE=step.page_size, BLOCK=block, **early_launch(hidden_states.device),
    )  # fmt: skip
    return out


def keep_hidden_states(step: StepHiddenStates, state: RowTensors) -> None:
    hidden_states = _check_hidden_states(step)
    size = hidden_states.shape[1]
    block = min(_HIDDEN_BLOCK, triton.next_power_of_2(size))
    _keep_hidden_states[(step.token_rows.shape[0], triton.cdiv(size, block))](
        hidden_states, step.last, step.page_hidden, step.rows, step.first, step.token_rows, step.offsets, step.legal,
        step.qo_indptr, step.page_table, state.computed_len, hidden_states.stride(0), step.last.stride(0),
        step.page_hidden.stride(0), step.page_table.stride(0), size,
        SINK=PADDING_PAGE, PAGE_SIZE=step.page_size, BLOCK=block, **early_launch(hidden_states.device),
    )  # fmt: skip


def _check_hidden_states(step: StepHiddenStates) -> Tensor:
    hidden_states = step.hidden_states
    for kept in (step.last, step.page_hidden):
        assert kept.dtype == hidden_states.dtype, f"hidden states of {hidden_states.dtype} are kept as {kept.dtype}"
        assert kept.shape[1] == hidden_states.shape[1], f"of {hidden_states.shape[1]} elements {kept.shape[1]} are kept"
        assert kept.stride(1) == hidden_states.stride(1) == 1, (
            f"elements {kept.stride()} and {hidden_states.stride()} apart"
        )
    return hidden_states


@triton.jit(do_not_specialize=_VARYING)
def _draft_inputs(  # type: ignore[no-untyped-def]
    rows, first, num, legal, token_rows, offsets, tokens, page_table, entry_owner, page_owner, kv_lens, table,
    input_ids, positions, slots, num_rows, num_tokens, table_stride, width, num_entries, num_pages, row_len,
    SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, TABLE_BLOCK: tl.constexpr, TOKEN_BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program copies the table of one row or, after the rows, fills a block of tokens."""
    program = tl.program_id(0).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    if program < num_rows:
        row = tl.load(rows + program)
        is_legal = tl.load(legal + program) != 0
        kv_len = tl.where(is_legal, tl.load(first + program), 0) + tl.load(num + program)
        kv_len = tl.minimum(kv_len, width * PAGE_SIZE)
        tl.store(kv_lens + program, kv_len)
        num_used = tl.cdiv(kv_len, PAGE_SIZE).to(tl.int32)
        num_read = tl.where(is_legal, num_used, 0)
        for begin in range(0, num_used, TABLE_BLOCK):
            entry = begin + tl.arange(0, TABLE_BLOCK)
            flat = row * num_entries + entry
            page = _own_page(page_table, entry_owner, page_owner, flat, entry < num_read, num_pages, SINK)
            tl.store(table + program * table_stride + entry, page, mask=entry < num_used)
    else:
        token = (program - num_rows) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
        mask = token < num_tokens
        number = tl.load(token_rows + token, mask=mask, other=0)
        token_row = tl.load(rows + number, mask=mask, other=0)
        may_read = tl.load(legal + number, mask=mask, other=0) != 0
        place = tl.load(first + number, mask=may_read, other=0) + tl.load(offsets + token, mask=mask, other=0)
        may_read = may_read & (place < row_len) & (place < width * PAGE_SIZE)
        flat_token = token_row * num_entries + place // PAGE_SIZE
        token_page = _own_page(page_table, entry_owner, page_owner, flat_token, may_read, num_pages, SINK)
        input_id = tl.load(tokens + token_row * row_len + tl.minimum(place, row_len - 1), mask=mask, other=0)
        put_tokens(token, mask, input_id, place, token_page, input_ids, positions, slots, PAGE_SIZE)


@triton.jit
def _own_page(page_table, entry_owner, page_owner, flat, mask, num_pages, SINK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pages of some entries; the padding page instead of those that do not, or no longer, belong to the row."""
    page = tl.load(page_table + flat, mask=mask, other=SINK)
    is_own = mask & (page >= 0) & (page < num_pages)
    owner = tl.load(page_owner + page, mask=is_own, other=0)
    is_own = is_own & (owner == tl.load(entry_owner + flat, mask=mask, other=0))
    return tl.where(is_own, page, SINK)


@triton.jit(do_not_specialize=_VARYING)
def _draft_hidden_states(  # type: ignore[no-untyped-def]
    hidden_states, last, page_hidden, rows, first, token_rows, offsets, legal, qo_indptr, table, out, hidden_stride,
    last_stride, page_hidden_stride, table_stride, size,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program copies a block of the hidden state for one draft token."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    number, offset = tl.load(token_rows + token), tl.load(offsets + token)
    start = tl.where(tl.load(legal + number) != 0, tl.load(first + number), 0)
    follows = (offset == 0) & (start > 0)
    starts_page = follows & (start % PAGE_SIZE == 0)
    entry = tl.where(starts_page, start // PAGE_SIZE - 1, 0)
    page = tl.load(table + number * table_stride + entry).to(tl.int64)
    row = tl.load(rows + number)
    computed = tl.load(qo_indptr + number).to(tl.int64) + offset - 1
    # At most one of the three is read.
    in_row, in_page = element < tl.where(follows, size, 0), element < tl.where(starts_page, size, 0)
    value = tl.load(last + row * last_stride + element, mask=in_row & ~in_page, other=0.0)
    value = tl.load(page_hidden + page * page_hidden_stride + element, mask=in_page, other=value)
    in_step = element < tl.where(offset > 0, size, 0)
    value = tl.load(hidden_states + computed * hidden_stride + element, mask=in_step, other=value)
    tl.store(out + token * size + element, value, mask=element < size)


@triton.jit(do_not_specialize=_VARYING)
def _keep_hidden_states(  # type: ignore[no-untyped-def]
    hidden_states, last, page_hidden, rows, first, token_rows, offsets, legal, qo_indptr, table, computed_len,
    hidden_stride, last_stride, page_hidden_stride, table_stride, size,
    SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program stores a block of the hidden state of the token before one draft token, if later steps need it."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    number, offset = tl.load(token_rows + token), tl.load(offsets + token)
    row, is_computed = tl.load(rows + number), (tl.load(legal + number) != 0) & (offset > 0)
    end, computed = tl.load(first + number) + offset, tl.load(computed_len + row)  # after the token
    is_last = is_computed & (end == computed)
    ends_page = is_computed & (end <= computed) & (end % PAGE_SIZE == 0)
    page = tl.load(table + number * table_stride + end // PAGE_SIZE - 1, mask=ends_page, other=SINK).to(tl.int64)
    ends_page = ends_page & (page != SINK)
    index = tl.load(qo_indptr + number).to(tl.int64) + offset - 1
    to_row, to_page = element < tl.where(is_last, size, 0), element < tl.where(ends_page, size, 0)
    value = tl.load(hidden_states + index * hidden_stride + element, mask=to_row | to_page, other=0.0)
    tl.store(last + row * last_stride + element, value, mask=to_row)
    tl.store(page_hidden + page * page_hidden_stride + element, value, mask=to_page)


def note_drafted(step: StepHiddenStates, state: RowTensors, progress: DraftProgress) -> None:
    _note_drafted[(step.rows.shape[0],)](
        step.rows, step.first, step.legal, step.qo_indptr, step.page_table, state.computed_len, progress.is_drafted,
        progress.start_page, progress.taken_len, step.page_table.stride(0), progress.is_drafted.stride(0),
        SINK=PADDING_PAGE, PAGE_SIZE=step.page_size, BLOCK=_WINDOW_TABLE_BLOCK, **early_launch(step.rows.device),
    )  # fmt: skip


def draft_window(
    rows: Tensor, first: Tensor, legal: Tensor, made: ForwardInputs, progress: DraftProgress, *, page_size: int
) -> ForwardInputs:
    num_rows, width = made.page_table.shape
    left = replace(made, kv_lens=torch.empty_like(made.kv_lens), page_table=torch.empty_like(made.page_table))
    _draft_window[(num_rows,)](
        rows, first, legal, made.kv_lens, made.page_table, progress.start_page, left.kv_lens, left.page_table,
        made.page_table.stride(0), left.page_table.stride(0), width,
        PAGE_SIZE=page_size, BLOCK=_WINDOW_TABLE_BLOCK, **early_launch(rows.device),
    )  # fmt: skip
    return left


@triton.jit(do_not_specialize=_WINDOW_VARYING)
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


@triton.jit(do_not_specialize=_WINDOW_VARYING)
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


def draft_ngrams(
    rows: Tensor,
    state: RowTensors,
    continuations: Tensor,
    *,
    num_draft: int,
    min_ngram: int,
    max_ngram: int,
    max_known: int,
) -> None:
    row_len, num_following = state.tokens.shape[1], continuations.shape[1] - 2
    assert num_following <= MAX_FOLLOWING, f"continuations of {num_following} tokens; the most is {MAX_FOLLOWING}"
    assert max_known > 0 and max_ngram * row_len < 2**31, f"{max_ngram} of {row_len} tokens have no 32-bit score"
    _draft_ngrams[(rows.shape[0],)](
        rows, state.known_len, state.tokens, continuations, row_len, num_draft, num_following,
        MIN_NGRAM=min_ngram, MAX_NGRAM=max_ngram, BLOCK=_NGRAM_BLOCK, DRAFT_BLOCK=triton.next_power_of_2(num_draft),
        FOLLOW_BLOCK=MAX_FOLLOWING, num_warps=_NGRAM_WARPS, **early_launch(rows.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "continuations", "num_draft", "num_following"])
def _draft_ngrams(  # type: ignore[no-untyped-def]
    rows, known_len, tokens, continuations, row_len, num_draft, num_following,
    MIN_NGRAM: tl.constexpr, MAX_NGRAM: tl.constexpr, BLOCK: tl.constexpr, DRAFT_BLOCK: tl.constexpr,
    FOLLOW_BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program reads one row's known tokens once and copies what follows the best match, or its continuation's rest."""
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row = tl.load(rows + tl.program_id(0))
    known = tl.load(known_len + row).to(tl.int32)
    text = tokens + row * row_len
    best = tl.full((BLOCK,), -1, tl.int32)
    for start in range(0, known - 1, BLOCK):
        end = start + tl.arange(0, BLOCK)
        agrees = end < known - 1
        num_equal = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(MAX_NGRAM):
            agrees = agrees & (end >= back)
            wanted = tl.load(text + known - 1 - back, mask=known > back, other=0)
            agrees = agrees & (tl.load(text + end - back, mask=agrees, other=0) == wanted)
            num_equal += agrees.to(tl.int32)
        # The longest match wins, and of these the latest.
        best = tl.maximum(best, tl.where(num_equal >= MIN_NGRAM, num_equal * row_len + end, -1))
    score = tl.max(best, 0)
    num_agree = tl.where(score < 0, 0, score // row_len)
    distance = tl.where(score < 0, 1, known - 1 - score % row_len)
    # The continuation is followed where the tokens since it began are its first ones.
    continuation = continuations + tl.program_id(0) * (2 + num_following)
    begin, agreed = tl.load(continuation), tl.load(continuation + 1)
    following, num_since = continuation + 2, known - begin
    num_left = tl.where((agreed > 0) & (num_since >= 0), num_following - num_since, 0)
    since = tl.arange(0, FOLLOW_BLOCK)
    is_since = since < tl.where(num_left > 0, num_since, 0)
    got = tl.load(text + begin + since, mask=is_since, other=0)
    wanted = tl.load(following + since, mask=is_since, other=0)
    num_left = tl.where(tl.max((got != wanted).to(tl.int32), 0) == 0, num_left, 0)
    num_left = tl.where(agreed + num_since > num_agree, num_left, 0)
    index = tl.arange(0, DRAFT_BLOCK)
    num_placed = tl.where(known > 0, tl.minimum(num_draft, row_len - known), 0)
    is_placed, is_following = index < num_placed, index < tl.minimum(num_left, num_placed)
    draft = tl.load(text + known - distance + index % distance, mask=is_placed, other=0)
    draft = tl.where(is_following, tl.load(following + num_since + index, mask=is_following, other=0), draft)
    tl.store(text + known + index, draft, mask=is_placed)
