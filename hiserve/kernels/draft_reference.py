"""The draft kernels in plain torch: vectorised, of fixed shape, without a host sync. ``DraftOps`` documents each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hiserve.core.drafts import DraftLayout
from hiserve.core.forward import ForwardInputs
from hiserve.kernels.draft_ops import DraftProgress, StepHiddenStates, draft_forward
from hiserve.kernels.reference import PADDING_PAGE
from hiserve.kernels.step_ops import RowTensors
from hiserve.kernels.tree_reference import grow, write_trees

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
    row_len, num_places, token_rows = state.tokens.shape[1], width * page_size, layout.token_rows
    table = _own_pages(rows, legal, state, width)
    first = first * legal
    kv_lens = (first + layout.num_tokens).clamp_(max=num_places)
    places = first.index_select(0, token_rows) + layout.offsets
    pages = table[token_rows, (places // page_size).clamp_(max=width - 1)].long()
    pages.masked_fill_(places >= min(row_len, num_places), PADDING_PAGE)
    flat = rows.index_select(0, token_rows) * row_len + places.clamp(max=row_len - 1)
    is_used = torch.arange(width, device=table.device) * page_size < kv_lens[:, None]
    return draft_forward(
        layout,
        kv_lens=kv_lens,
        page_table=torch.where(is_used, table, PADDING_PAGE),
        input_ids=state.tokens.view(-1).index_select(0, flat),
        positions=places,
        slots=pages * page_size + places % page_size,
    )


def _own_pages(rows: Tensor, legal: Tensor, state: RowTensors, width: int) -> Tensor:
    """Each row's pages, int32 ``[B, width]``; the padding page instead of those that do not belong to it any more."""
    table = state.page_table.index_select(0, rows).narrow(1, 0, width)
    owners = state.entry_owner.index_select(0, rows).narrow(1, 0, width)
    num_pages = state.page_owner.shape[0]
    is_own = (table >= 0) & (table < num_pages) & legal[:, None]
    is_own &= state.page_owner[table.clamp(0, num_pages - 1).long()] == owners
    return torch.where(is_own, table, PADDING_PAGE)


def draft_hidden_states(step: StepHiddenStates) -> Tensor:
    rows, first = step.rows, step.first * step.legal
    pages = _pages_of(first - 1, torch.arange(rows.shape[0], device=rows.device), step)
    at_boundary, kept = step.page_hidden.index_select(0, pages), step.last.index_select(0, rows)
    before = torch.where((first % step.page_size == 0)[:, None], at_boundary, kept)
    before.masked_fill_((first == 0)[:, None], 0)
    computed = step.hidden_states.index_select(0, _step_tokens(step).clamp_(min=0))
    return torch.where((step.offsets == 0)[:, None], before.index_select(0, step.token_rows), computed)


def keep_hidden_states(step: StepHiddenStates, state: RowTensors) -> None:
    hidden_states, token_rows, legal = step.hidden_states, step.token_rows, step.legal
    first, computed_len = step.first * legal, state.computed_len.index_select(0, step.rows) * legal
    index = (step.qo_indptr[:-1] + computed_len - 1 - first).clamp_(0, hidden_states.shape[0] - 1)
    _write(step.last, step.rows, hidden_states.index_select(0, index), legal)
    ends = first.index_select(0, token_rows) + step.offsets  # after each token of the step
    is_end = (ends % step.page_size == 0) & (step.offsets > 0) & (ends <= computed_len.index_select(0, token_rows))
    pages = _pages_of(ends - 1, token_rows, step)
    index = _step_tokens(step).clamp_(min=0)
    _write(step.page_hidden, pages, hidden_states.index_select(0, index), is_end & (pages != PADDING_PAGE))


def note_drafted(step: StepHiddenStates, state: RowTensors, progress: DraftProgress) -> None:
    rows, legal, page_size = step.rows, step.legal, step.page_size
    first, table = step.first * legal, step.page_table
    pages, entries = table.reshape(-1).long(), torch.arange(table.shape[1], device=table.device)
    first_page, computed_len = first // page_size, state.computed_len.index_select(0, rows)
    is_drafted = progress.is_drafted.index_select(0, pages).view_as(table) == 1
    is_missing = ~(is_drafted & (table != PADDING_PAGE)) & (entries < first_page[:, None])
    behind_missing = (is_missing * (entries + 1)).amax(1)
    ends = first + step.qo_indptr.diff()
    behind_step = (ends + (page_size - 1)) // page_size
    goes_on = progress.taken_len.index_select(0, rows) == first
    start = torch.where(goes_on, progress.start_page.index_select(0, rows), behind_step)
    start = torch.where(first % page_size == 0, behind_missing, start)
    # A step that begins in a page that is left out attends over keys of that page that no head computed.
    start = torch.where(start > first_page, torch.maximum(start, behind_step), start)
    is_own = torch.where(legal, rows, 0)
    progress.start_page.index_copy_(0, is_own, start * legal)
    progress.taken_len.index_copy_(0, is_own, computed_len * legal)
    is_done = (entries >= torch.maximum(start, first_page)[:, None]) & (table != PADDING_PAGE) & legal[:, None]
    is_done &= (entries + 1) * page_size <= computed_len[:, None]
    done = is_done.view(-1)
    progress.is_drafted.index_copy_(0, torch.where(done, pages, PADDING_PAGE), done.to(progress.is_drafted.dtype))


def draft_window(
    rows: Tensor, first: Tensor, legal: Tensor, made: ForwardInputs, progress: DraftProgress, *, page_size: int
) -> ForwardInputs:
    width = made.page_table.shape[1]
    last = torch.minimum(first, made.kv_lens - 1) // page_size
    skipped = torch.minimum(progress.start_page.index_select(0, rows), last) * legal
    entries = (torch.arange(width, device=rows.device) + skipped[:, None]).clamp_(max=width - 1)
    return replace(made, kv_lens=made.kv_lens - skipped * page_size, page_table=made.page_table.gather(1, entries))


def _step_tokens(step: StepHiddenStates) -> Tensor:
    """The step's token before each draft token, int64 ``[T + B]``; for a row's first, an earlier row's or -1."""
    return step.qo_indptr.index_select(0, step.token_rows) + step.offsets - 1


def _pages_of(places: Tensor, table_rows: Tensor, step: StepHiddenStates) -> Tensor:
    """The pages of positions, int64 ``[n]``; for a position outside the table its first or last page."""
    return step.page_table[table_rows, (places // step.page_size).clamp_(0, step.page_table.shape[1] - 1)].long()


def _write(kept: Tensor, index: Tensor, values: Tensor, is_kept: Tensor) -> None:
    """Writes the values that are kept; entry 0 receives zeros for the others."""
    kept.index_copy_(0, torch.where(is_kept, index, 0), torch.where(is_kept[:, None], values, 0))


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
    row_len = state.tokens.shape[1]
    known_len = state.known_len.index_select(0, rows)[:, None]
    tokens = state.tokens.narrow(1, 0, min(max_known, row_len)).index_select(0, rows)
    num_agree, distance = _latest(tokens, known_len, min_ngram, max_ngram)
    index = torch.arange(num_draft, device=rows.device)
    places = known_len + index
    sources = (known_len - distance + index % distance).clamp_(min=0)
    drafts = tokens.gather(1, sources)
    if (num_following := continuations.shape[1] - 2) > 0:
        num_since, agreed = _follow(tokens, known_len, continuations)
        followed = continuations.gather(1, 2 + (num_since + index).clamp_(0, num_following - 1))
        drafts = torch.where((agreed > num_agree) & (num_since + index < num_following), followed, drafts)
    is_placed = (known_len > 0) & (places < row_len)
    flat = torch.where(is_placed, rows[:, None] * row_len + places, 0)
    state.tokens.view(-1).index_copy_(0, flat.view(-1), torch.where(is_placed, drafts, 0).view(-1))


def _follow(tokens: Tensor, known_len: Tensor, continuations: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of each row since its continuation began, int64 ``[S, 1]``; how many agree with it, 0 where one of these differs."""
    begin, agreed, following = continuations[:, :1], continuations[:, 1:2], continuations[:, 2:]
    num_since, index = known_len - begin, torch.arange(following.shape[1], device=tokens.device)
    got = tokens.gather(1, (begin + index).clamp_(0, tokens.shape[1] - 1))
    is_followed = ((got == following) | (index >= num_since)).all(1, keepdim=True)
    is_followed &= (agreed > 0) & (num_since >= 0) & (num_since < following.shape[1])
    return num_since, torch.where(is_followed, agreed + num_since, 0)


def _latest(tokens: Tensor, known_len: Tensor, min_ngram: int, max_ngram: int) -> tuple[Tensor, Tensor]:
    """How many tokens agree where most do, int64 ``[S, 1]``, and how many lie between there and the last; 0 and 1 without a match."""
    width = tokens.shape[1]
    ends = torch.arange(width, dtype=torch.int32, device=tokens.device)
    agrees = ends < known_len - 1
    score = torch.zeros_like(tokens)
    for back in range(min(max_ngram, width)):
        wanted = tokens.gather(1, (known_len - 1 - back).clamp_(min=0))
        agrees[:, :back] = False
        agrees[:, back:] &= tokens[:, : width - back] == wanted
        score += agrees
    # The longest match wins, and of these the latest.
    best = score.mul_(width).add_(ends).amax(1, keepdim=True).long()
    is_found = best >= min_ngram * width
    return best // width * is_found, torch.where(is_found, known_len - 1 - best % width, 1)
