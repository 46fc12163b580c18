"""The step kernels in plain torch: vectorised, of fixed shape, without a host sync. ``StepOps`` documents each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hiserve.core.forward import StateRows
from hiserve.kernels.noise import gumbel
from hiserve.kernels.reference import PADDING_PAGE, is_last_loc_legal, is_table_owned, last_loc
from hiserve.kernels.sampling import argmax, masked
from hiserve.kernels.step_ops import (
    FreeDraws,
    RowTensors,
    StateTensors,
    StepInputs,
    TokenMasks,
    TreeTensors,
    WindowTensors,
)

SAMPLE_STREAM = 0
MASK_BITS = 63  # of a node's mask that are used


def fill_inputs(inputs: StepInputs, state: RowTensors, *, page_size: int) -> None:
    forward = inputs.forward
    width = forward.page_table.shape[1]
    table = state.page_table.index_select(0, inputs.rows).narrow(1, 0, width)
    computed_len = state.computed_len.index_select(0, inputs.rows)
    legal = _check(inputs, state, table, computed_len, page_size)
    nodes = None if state.trees is None or forward.tree_mask is None else _nodes(inputs, state.trees)
    table = torch.where(
        legal[:, None], table, PADDING_PAGE
    )  # an illegal row reads and writes the padding page, from position 0
    computed_len = computed_len * legal
    positions = computed_len.index_select(0, forward.token_rows) + inputs.offsets
    flat = inputs.rows.index_select(0, forward.token_rows) * state.tokens.shape[1] + positions
    pages = table[forward.token_rows, positions // page_size].long()
    kv_lens = computed_len + inputs.num_new
    is_used = torch.arange(width, device=table.device) * page_size < kv_lens[:, None]
    inputs.legal.copy_(legal)
    forward.kv_lens.copy_(kv_lens)
    forward.page_table.copy_(torch.where(is_used, table, forward.page_table))
    forward.input_ids.copy_(state.tokens.view(-1).index_select(0, flat))
    forward.positions.copy_(positions)
    if nodes is not None and forward.tree_mask is not None:
        forward.tree_mask.copy_(nodes)
        depths = (nodes[:, None] >> torch.arange(MASK_BITS, device=table.device) & 1).sum(1) - 1
        forward.positions.copy_(torch.where(nodes == 0, positions, positions - inputs.offsets + depths))
    forward.slots.copy_(pages * page_size + positions % page_size)
    if forward.window_table is not None and forward.window_slots is not None and state.windows is not None:
        table = state.windows.table.index_select(0, inputs.rows).narrow(1, 0, width)
        table = torch.where(legal[:, None], table, PADDING_PAGE)
        pages = table[forward.token_rows, positions // page_size].long()
        first = (computed_len - state.windows.size + 1).clamp_(min=0) // page_size
        is_seen = is_used & (torch.arange(width, device=table.device) >= first[:, None])
        forward.window_table.copy_(torch.where(is_seen, table, forward.window_table))
        forward.window_slots.copy_(pages * page_size + positions % page_size)
    if forward.state is not None and state.states is not None:
        _fill_states(inputs, state.states, computed_len, forward.state)


def _nodes(inputs: StepInputs, trees: TreeTensors) -> Tensor:
    """The mask of each token that is a node, int64 ``[T]``; 0 of the others."""
    token_rows = inputs.forward.token_rows
    node = inputs.offsets.clamp(max=trees.masks.shape[1] - 1)
    masks = trees.masks.view(-1)[inputs.rows.index_select(0, token_rows) * trees.masks.shape[1] + node]
    return masks * (inputs.num_draft.index_select(0, token_rows) > 0)


def _fill_states(inputs: StepInputs, states: StateTensors, computed_len: Tensor, filled: StateRows) -> None:
    """Fills what a forward reads of carried states; ``computed_len`` is that of the step's rows, 0 of illegal ones."""
    rows = inputs.rows * inputs.legal
    filled.rows.copy_(rows)
    filled.starts.copy_(computed_len)
    filled.state_ends.copy_(computed_len + inputs.num_new - inputs.num_draft)
    for target, source in (
        (filled.state_lens, states.lens),
        (filled.snap_at, states.snap_at),
        (filled.snap_slots, states.snap_slot),
    ):
        target.copy_(source.index_select(0, rows) * inputs.legal)


def _check(inputs: StepInputs, state: RowTensors, table: Tensor, computed_len: Tensor, page_size: int) -> Tensor:
    """Whether each row may run: bool ``[B]``. Its pages belong to it, and the plan fits its lengths."""
    end = computed_len + inputs.num_new
    known_len = state.known_len.index_select(0, inputs.rows)
    owners = state.entry_owner.index_select(0, inputs.rows).narrow(1, 0, table.shape[1])
    location = last_loc(table, computed_len, page_size)
    # The last token that a row may emit is at ``end``.
    is_known = torch.where(
        inputs.samples,
        (end - inputs.num_draft == known_len) & (end < state.tokens.shape[1]),
        end <= known_len,
    )
    legal = (
        is_last_loc_legal(location, computed_len, page_size, state.page_owner.shape[0] * page_size)
        & (computed_len >= 0)
        & is_table_owned(table, owners, state.page_owner, end, page_size)
        & (end <= inputs.max_len)
        & is_known
    )
    return legal if state.windows is None else legal & _owns_window(inputs, state.windows, computed_len, page_size)


def _owns_window(inputs: StepInputs, windows: WindowTensors, computed_len: Tensor, page_size: int) -> Tensor:
    """Whether each row owns the window pages that it reads or writes; those below its window may be anything."""
    width = inputs.forward.page_table.shape[1]
    table, owners = (
        each.index_select(0, inputs.rows).narrow(1, 0, width) for each in (windows.table, windows.entry_owner)
    )
    first = (computed_len - windows.size + 1).clamp_(min=0) // page_size
    end = computed_len + inputs.num_new
    return is_table_owned(table, owners, windows.page_owner, end, page_size, first)


def accept(drawn: Tensor, sampling_rows: Tensor, num_draft: Tensor, state: RowTensors) -> Tensor:
    index = torch.arange(drawn.shape[1], device=drawn.device)
    places = state.known_len.index_select(0, sampling_rows)[:, None] + index
    places.clamp_(max=state.tokens.shape[1] - 1)
    drafts = state.tokens.view(-1)[sampling_rows[:, None] * state.tokens.shape[1] + places]
    agrees = (drafts == drawn) & (index < num_draft[:, None])
    return agrees.to(torch.int64).cumprod(1).sum(1).add_(1)


def walk(drawn: Tensor, sampling_rows: Tensor, num_draft: Tensor, state: RowTensors) -> tuple[Tensor, Tensor]:
    assert state.trees is not None, "rows without trees"
    index = torch.arange(drawn.shape[1], device=drawn.device)
    masks = state.trees.masks.index_select(0, sampling_rows)[:, : drawn.shape[1]]
    parents, is_draft = masks ^ (1 << index), (index > 0) & (index <= num_draft[:, None])
    places = (state.known_len.index_select(0, sampling_rows)[:, None] - 1 + index).clamp_(0, state.tokens.shape[1] - 1)
    tokens = state.tokens.view(-1)[sampling_rows[:, None] * state.tokens.shape[1] + places]
    node = torch.zeros_like(num_draft)[:, None]
    counts, path = torch.ones_like(num_draft), [node]
    for _ in range(min(state.trees.max_depth, drawn.shape[1] - 1)):
        is_next = is_draft & (parents == masks.gather(1, node)) & (tokens == drawn.gather(1, node))
        node = torch.where(is_next.any(1, keepdim=True), is_next.int().argmax(1, keepdim=True), node)
        counts += is_next.any(1)
        path.append(node)
    return counts, torch.cat(path, 1)


def move(storages: Sequence[Tensor], slots: Tensor, starts: Tensor, path: Tensor, counts: Tensor) -> None:
    depth, begin = torch.arange(path.shape[1], device=slots.device), starts.long()[:, None]
    is_moved = depth < counts[:, None]
    # The others stay in the slot of the root, which no path moves.
    sources, targets = (
        slots[begin + torch.where(is_moved, each, 0)].flatten() for each in (path, depth.expand_as(path))
    )
    for storage in storages:
        storage.index_copy_(2, targets, storage.index_select(2, sources))


def advance(inputs: StepInputs, drawn: Tensor, counts: Tensor, state: RowTensors) -> Tensor:
    rows, legal, sampling, kv_lens = inputs.rows, inputs.legal, inputs.sampling, inputs.forward.kv_lens
    counts = counts * legal.index_select(0, sampling)
    _write_tokens(rows.index_select(0, sampling), drawn, counts, state)
    num_refused = torch.zeros_like(kv_lens)
    num_refused.index_copy_(0, sampling, inputs.num_draft.index_select(0, sampling) + 1 - counts)
    known_len = state.known_len.index_select(0, rows).index_add_(0, sampling, counts)
    state.computed_len.index_copy_(0, rows, (kv_lens - num_refused) * legal)
    state.known_len.index_copy_(0, rows, known_len * legal)
    if state.states is not None:
        state.states.lens.index_copy_(0, rows, (kv_lens - inputs.num_draft) * legal)
    return torch.cat((legal.to(torch.int32), counts.to(torch.int32), drawn.view(-1).to(torch.int32)))


def _write_tokens(rows: Tensor, drawn: Tensor, counts: Tensor, state: RowTensors) -> None:
    """Appends the first ``counts`` tokens to each row; entry 0 of the padding row receives 0 for the others."""
    index = torch.arange(drawn.shape[1], device=drawn.device)
    is_emitted = index < counts[:, None]
    places = (rows * state.tokens.shape[1] + state.known_len.index_select(0, rows))[:, None] + index
    flat = torch.where(is_emitted, places, 0).view(-1)
    tokens = torch.where(is_emitted, drawn, 0).view(-1).to(torch.int32)
    state.tokens.view(-1).index_copy_(0, flat, tokens)


def greedy(logits: Tensor, masks: TokenMasks | None = None) -> Tensor:
    return argmax(_widened(logits, masks))


def draw_free(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    is_drawn: Tensor | None,
    masks: TokenMasks | None = None,
) -> Tensor:
    wide = _widened(logits, masks)
    noise = gumbel(seed, choice, position, SAMPLE_STREAM, wide.shape[1]).to(wide.dtype)
    draws = FreeDraws(temperature, seed, choice, position, is_drawn)
    return argmax(_scores(wide, wide.amax(-1, keepdim=True), noise, draws))


def best_entries(logits: Tensor, first: int, draws: FreeDraws | None, masks: TokenMasks | None) -> Tensor:
    size = logits.shape[1]
    if masks is not None:
        masks = replace(masks, words=masks.words[:, first // 32 : -(-(first + size) // 32)])
    wide = _widened(logits, masks)
    maximum = wide.amax(-1, keepdim=True)
    if draws is None:
        scores, noise = wide, torch.zeros_like(wide)
    else:
        noise = gumbel(*draws[1:4], SAMPLE_STREAM, size, first).to(wide.dtype)
        scores = _scores(wide, maximum, noise, draws)
    best = scores.argmax(-1, keepdim=True)
    return torch.cat((wide.gather(1, best), noise.gather(1, best), maximum, (best + first).to(wide.dtype)), 1)


def join_entries(entries: Tensor, draws: FreeDraws | None) -> Tensor:
    scores, noise, maximum, tokens = entries.permute(2, 1, 0)
    if draws is not None:
        scores = _scores(scores, maximum.amax(-1, keepdim=True), noise, draws)
    scores = scores.masked_fill(scores.isnan(), torch.inf)
    is_best = scores == scores.amax(-1, keepdim=True)
    best: Tensor = tokens.masked_fill(~is_best, torch.inf).amin(-1).long()
    return best


def _scores(logits: Tensor, maximum: Tensor, noise: Tensor, draws: FreeDraws) -> Tensor:
    """Returns what a free draw maximizes, of ``[S, n]`` logits with noise and of ``[S, 1]`` their rows' maxima."""
    # At least the smallest normal number: a temperature may underflow in float32, and 0 / 0 is NaN.
    divisor = draws.temperature.to(logits.dtype).clamp_(min=torch.finfo(logits.dtype).tiny)
    # The maximum is subtracted, so that a tiny temperature gives -inf for the others and never inf.
    scores = (logits - maximum).div_(divisor[:, None]).add_(noise)
    return scores if draws.is_drawn is None else torch.where(draws.is_drawn[:, None], scores, logits)


def _widened(logits: Tensor, masks: TokenMasks | None) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if masks is None else masked(wide, masks.entries, masks.words)
