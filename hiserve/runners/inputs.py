"""Builds a step's inputs: eager steps and captured ones by the same code, of exact size or padded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs, StateRows
from hiserve.core.plan import BatchPlan, Int32Array
from hiserve.core.upload import upload
from hiserve.kernels.reference import PADDING_PAGE
from hiserve.kernels.step_ops import StepInputs
from hiserve.runners.device_rows import DeviceRows


def build_inputs(plan: BatchPlan, rows: DeviceRows) -> StepInputs:
    """Builds an eager step: as large as its plan. Lengths are the device's own; nothing waits for them."""
    inputs = _upload(plan, rows)
    fill_inputs(inputs, rows)
    scored = inputs.forward.logits_rows[inputs.sampling.shape[0] * inputs.width :]
    if scored.shape[0]:
        inputs = replace(inputs, scored_tokens=_next_tokens(inputs, scored, rows))
    return replace(inputs, forward=replace(inputs.forward, wants_hidden_states=False)) if plan.is_cold else inputs


def uniform_inputs(varying: Tensor, width: int, max_kv_len: int, rows: DeviceRows) -> StepInputs:
    """Returns the inputs of a captured step, not filled: every row computes ``width`` tokens and samples.

    Args:
        varying: int64 ``[2, B]`` on the device: rows and bounds of their lengths, written before each replay.
        width: 1, and the drafts of every row.
        max_kv_len: Upper bound of all lengths of any replay.
        rows: The permanent rows.
    """
    num_rows, device = varying.shape[1], varying.device
    each_row = torch.arange(num_rows, device=device)
    each_token = torch.arange(num_rows * width, device=device)
    return StepInputs(
        rows=varying[0],
        num_new=torch.full_like(each_row, width),
        num_draft=torch.full_like(each_row, width - 1),
        samples=torch.ones_like(each_row, dtype=torch.bool),
        max_len=varying[1],
        offsets=each_token % width,
        sampling=each_row,
        width=width,
        legal=torch.empty_like(each_row, dtype=torch.bool),
        path=new_path(rows, num_rows, width),
        forward=_unfilled(
            rows,
            has_drafts=width > 1,
            token_rows=each_token // width,
            qo_indptr=torch.arange(0, num_rows * width + 1, width, dtype=torch.int32, device=device),
            logits_rows=each_token,
            q_lens=np.full(num_rows, width, dtype=np.int32),
            kv_bounds=np.full(num_rows, max_kv_len, dtype=np.int32),
            max_kv_len=max_kv_len,
            num_decode=num_rows,
        ),
    )


def fill_inputs(inputs: StepInputs, rows: DeviceRows) -> None:
    """Checks the rows and gathers tokens, positions, slots and page tables; in a graph, in each replay."""
    rows.ops.fill_inputs(inputs, rows.state, page_size=rows.page_size)


def put_tokens(inputs: ForwardInputs, static: ForwardInputs, size: int) -> None:
    """Copies a step's tokens, positions and slots into a graph's; the slots of its other tokens are on the padding page.

    Args:
        inputs: T tokens.
        static: Tensors that the graph reads.
        size: Tokens of the graph, at least T.
    """
    num_tokens = inputs.input_ids.shape[0]
    static.input_ids[:num_tokens].copy_(inputs.input_ids)
    static.positions[:num_tokens].copy_(inputs.positions)
    static.slots[:num_tokens].copy_(inputs.slots)
    static.slots[num_tokens:size].zero_()
    if static.window_slots is not None and inputs.window_slots is not None:
        static.window_slots[:num_tokens].copy_(inputs.window_slots)
        static.window_slots[num_tokens:size].zero_()


def _upload(plan: BatchPlan, rows: DeviceRows) -> StepInputs:
    """Copies a plan to the device, at once."""
    max_kv_len = int(plan.max_len.max())
    assert max_kv_len <= rows.max_len, f"step {plan.step_id} plans {max_kv_len} tokens; a row holds {rows.max_len}"
    assert (plan.num_new <= plan.max_len).all(), f"step {plan.step_id}: {plan.num_new} new of {plan.max_len} tokens"
    assert (plan.num_scored <= plan.num_new).all(), f"step {plan.step_id}: {plan.num_scored} of {plan.num_new} scored"
    new, drafts = plan.num_new.astype(np.int64), plan.num_draft.astype(np.int64)
    indptr = np.zeros(new.size + 1, dtype=np.int64)
    np.cumsum(new, out=indptr[1:])
    rows_of_tokens = np.repeat(np.arange(new.size), new)
    offsets_in_rows = np.arange(indptr[-1]) - indptr[rows_of_tokens]
    sampled = np.flatnonzero(plan.samples)
    scored = np.flatnonzero(offsets_in_rows < plan.num_scored[rows_of_tokens])
    decoding = np.flatnonzero(new - drafts == 1)
    width = 1 + int(drafts.max())
    # A row's last token and its drafts; the last of them stands for drafts that it lacks.
    own_drafts = drafts[sampled, None]
    drawn_from = indptr[sampled + 1, None] - 1 - own_drafts + np.minimum(np.arange(width), own_drafts)
    columns = (
        plan.rows.astype(np.int64),
        new,
        drafts,
        plan.samples,
        plan.max_len.astype(np.int64),
        rows_of_tokens,
        offsets_in_rows,
        indptr.astype(np.int32),
        sampled,
        np.concatenate((drawn_from.reshape(-1), scored)),
    )
    uploaded = upload(columns, rows.device)
    numbers, num_new, num_draft, samples, max_len, token_rows, offsets, qo_indptr, sampling, logits_rows = uploaded
    return StepInputs(
        rows=numbers,
        num_new=num_new,
        num_draft=num_draft,
        samples=samples,
        max_len=max_len,
        offsets=offsets,
        sampling=sampling,
        width=width,
        legal=torch.empty_like(samples),
        path=new_path(rows, sampled.size, width),
        forward=_unfilled(
            rows,
            has_drafts=width > 1,
            token_rows=token_rows,
            qo_indptr=qo_indptr,
            logits_rows=logits_rows,
            q_lens=plan.num_new,
            kv_bounds=plan.max_len,
            max_kv_len=max_kv_len,
            num_decode=int(decoding[-1]) + 1 if decoding.size else 0,
        ),
    )


def _unfilled(
    rows: DeviceRows,
    *,
    has_drafts: bool,
    token_rows: Tensor,
    qo_indptr: Tensor,
    logits_rows: Tensor,
    q_lens: Int32Array,
    kv_bounds: Int32Array,
    max_kv_len: int,
    num_decode: int,
) -> ForwardInputs:
    """Returns inputs with the host's columns; the others are allocated, page tables filled with the padding page."""
    num_rows, num_tokens, device = qo_indptr.shape[0] - 1, token_rows.shape[0], rows.device
    table_width = -(-max_kv_len // rows.page_size)
    has_windows = rows.windows is not None
    table = torch.full((num_rows, table_width), PADDING_PAGE, dtype=torch.int32, device=device)
    return ForwardInputs(
        kv_lens=torch.empty(num_rows, dtype=torch.int64, device=device),
        page_table=table,
        window_table=table.clone() if has_windows else None,
        window_slots=torch.empty(num_tokens, dtype=torch.int64, device=device) if has_windows else None,
        state=None if rows.states is None else no_states(num_rows, device),
        input_ids=torch.empty(num_tokens, dtype=torch.int32, device=device),
        positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
        slots=torch.empty(num_tokens, dtype=torch.int64, device=device),
        token_rows=token_rows,
        qo_indptr=qo_indptr,
        logits_rows=logits_rows,
        q_lens=q_lens,
        kv_bounds=kv_bounds,
        max_kv_len=max_kv_len,
        num_decode=num_decode,
        tree_mask=torch.empty_like(token_rows) if has_drafts and rows.state.trees is not None else None,
    )


def new_path(rows: DeviceRows, num_sampling: int, width: int) -> Tensor | None:
    """Returns memory for ``StepInputs.path`` of rows that verify drafts; None for others."""
    trees = rows.state.trees
    if trees is None or width == 1:
        return None
    return torch.zeros((num_sampling, min(1 + trees.max_depth, width)), dtype=torch.int64, device=rows.device)


def no_states(num_rows: int, device: torch.device) -> StateRows:
    """Returns the states of so many rows that pad a batch."""
    rows, starts, state_lens, state_ends, snap_at, snap_slots = torch.zeros(
        (6, num_rows), dtype=torch.int64, device=device
    ).unbind()
    return StateRows(rows, starts, state_lens, state_ends, snap_at, snap_slots)


def _next_tokens(inputs: StepInputs, scored: Tensor, rows: DeviceRows) -> Tensor:
    """Returns the tokens that follow; of an illegal row, whose positions mean nothing, any token."""
    owners = inputs.rows.index_select(0, inputs.forward.token_rows.index_select(0, scored))
    places = inputs.forward.positions.index_select(0, scored) + 1
    flat = owners * rows.max_len + places.clamp_(max=rows.max_len - 1)
    return rows.tokens.view(-1).index_select(0, flat).long()
