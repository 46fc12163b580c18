"""Builds a step's inputs: eager steps and captured ones by the same code, of exact size or padded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs
from hiserve.core.plan import BatchPlan, Int32Array
from hiserve.core.upload import upload
from hiserve.kernels.step_ops import StepColumns, StepMetadata
from hiserve.runners.device_rows import DeviceRows


@dataclass(frozen=True, slots=True, eq=False)
class BatchColumns:
    """A plan of B rows and T tokens on the device; S rows sample, the next token of P tokens is scored.

    Attributes:
        step: What the kernels take.
        qo_indptr: int32 ``[B + 1]``.
        sampling: int64 ``[S]``. Which of the B rows sample.
        logits_rows: int64 ``[S * width + P]``. See ``ForwardInputs``.
        scored: int64 ``[P]``. Tokens, as indices into T, whose next token is scored.
        q_lens: int32 ``[B]``, on the host. Tokens of each row.
        kv_bounds: int32 ``[B]``, on the host. Upper bounds of their lengths.
        num_decode: Rows up to the last that has one token before its drafts. See ``ForwardInputs``.
        width: Most tokens that a row may emit: 1, and its drafts.
        max_kv_len: Upper bound of all lengths, of any step that these tensors will stand for.
    """

    step: StepColumns
    qo_indptr: Tensor
    sampling: Tensor
    logits_rows: Tensor
    scored: Tensor
    q_lens: Int32Array
    kv_bounds: Int32Array
    num_decode: int
    width: int
    max_kv_len: int


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step on the device: B rows, of which S sample; the next token of P tokens is scored.

    Attributes:
        forward: What the model takes.
        rows: int64 ``[B]``.
        legal: bool ``[B]``. Rows that passed the check; the others read and write the sink.
        num_draft: int64 ``[B]``.
        sampling: int64 ``[S]``. Which of the B rows sample.
        width: Most tokens that a row may emit: each of the S rows has so many rows of logits, the last repeated
            where a row has fewer drafts.
        scored_tokens: int64 ``[P]``. Known tokens to score, in plan order: those that follow the tokens of
            ``forward.logits_rows[S * width:]``. None when P is 0.
    """

    forward: ForwardInputs
    rows: Tensor
    legal: Tensor
    num_draft: Tensor
    sampling: Tensor
    width: int
    scored_tokens: Tensor | None


def upload_columns(plan: BatchPlan, rows: DeviceRows) -> BatchColumns:
    """Carries a plan to the device, in one copy."""
    max_kv_len = int(plan.max_len.max())
    assert max_kv_len <= rows.max_len, f"step {plan.step_id} plans {max_kv_len} tokens; a row holds {rows.max_len}"
    assert (plan.num_new <= plan.max_len).all(), f"step {plan.step_id}: {plan.num_new} new of {plan.max_len} tokens"
    assert (plan.num_scored <= plan.num_new).all(), f"step {plan.step_id}: {plan.num_scored} of {plan.num_new} scored"
    num_new, num_draft = plan.num_new.astype(np.int64), plan.num_draft.astype(np.int64)
    indptr = np.zeros(num_new.size + 1, dtype=np.int64)
    np.cumsum(num_new, out=indptr[1:])
    token_rows = np.repeat(np.arange(num_new.size), num_new)
    offsets = np.arange(indptr[-1]) - indptr[token_rows]
    sampling = np.flatnonzero(plan.samples)
    scored = np.flatnonzero(offsets < plan.num_scored[token_rows])
    decoding = np.flatnonzero(num_new - num_draft == 1)
    width = 1 + int(num_draft.max())
    # A row's last token and the drafts behind it; the last of them stands for drafts that it lacks.
    drafts = num_draft[sampling, None]
    drawn_from = indptr[sampling + 1, None] - 1 - drafts + np.minimum(np.arange(width), drafts)
    columns = upload(
        (
            plan.rows.astype(np.int64),
            num_new,
            num_draft,
            plan.samples,
            plan.max_len.astype(np.int64),
            token_rows,
            offsets,
            indptr.astype(np.int32),
            sampling,
            np.concatenate((drawn_from.reshape(-1), scored)),
            scored,
        ),
        rows.device,
    )
    qo_indptr, sampled, logits_rows, scored_tokens = columns[7:]
    return BatchColumns(
        step=StepColumns(*columns[:7]),
        qo_indptr=qo_indptr,
        sampling=sampled,
        logits_rows=logits_rows,
        scored=scored_tokens,
        q_lens=plan.num_new,
        kv_bounds=plan.max_len,
        num_decode=int(decoding[-1]) + 1 if decoding.size else 0,
        width=width,
        max_kv_len=max_kv_len,
    )


def uniform_columns(varying: Tensor, width: int, max_kv_len: int) -> BatchColumns:
    """Columns of a captured step, in which every row computes ``width`` tokens and samples.

    Args:
        varying: int64 ``[2, B]`` on the device: rows and bounds of their lengths, filled before each replay.
        width: 1, and the drafts of every row.
        max_kv_len: Upper bound of all lengths of any replay.
    """
    num_rows, device = varying.shape[1], varying.device
    each_row = torch.arange(num_rows, device=device)
    each_token = torch.arange(num_rows * width, device=device)
    return BatchColumns(
        step=StepColumns(
            rows=varying[0],
            num_new=torch.full_like(each_row, width),
            num_draft=torch.full_like(each_row, width - 1),
            samples=torch.ones_like(each_row, dtype=torch.bool),
            max_len=varying[1],
            token_rows=each_token // width,
            offsets=each_token % width,
        ),
        qo_indptr=torch.arange(0, num_rows * width + 1, width, dtype=torch.int32, device=device),
        sampling=each_row,
        logits_rows=each_token,
        scored=each_token[:0],
        q_lens=np.full(num_rows, width, dtype=np.int32),
        kv_bounds=np.full(num_rows, max_kv_len, dtype=np.int32),
        num_decode=num_rows,
        width=width,
        max_kv_len=max_kv_len,
    )


def build_inputs(plan: BatchPlan, rows: DeviceRows) -> StepInputs:
    """Builds an eager step: as large as its plan."""
    inputs = gather_inputs(upload_columns(plan, rows), rows)
    return replace(inputs, forward=replace(inputs.forward, is_shown=False)) if plan.is_cold else inputs


def gather_inputs(columns: BatchColumns, rows: DeviceRows, out: StepInputs | None = None) -> StepInputs:
    """Gathers the step's tokens, positions, slots and page tables. Lengths are the device's own; nothing waits for them.

    Args:
        columns: The plan.
        rows: Unchanged.
        out: Inputs of the same columns to write into, of which none are scored; None for new ones.
    """
    step = columns.step
    width = -(-columns.max_kv_len // rows.page_size)
    if out is not None:
        rows.ops.step_inputs(step, rows.state, page_size=rows.page_size, width=width, out=_metadata(out))
        return out
    made = rows.ops.step_inputs(step, rows.state, page_size=rows.page_size, width=width)
    return StepInputs(
        forward=ForwardInputs(
            input_ids=made.input_ids,
            positions=made.positions,
            slots=made.slots,
            token_rows=step.token_rows,
            qo_indptr=columns.qo_indptr,
            kv_lens=made.kv_lens,
            page_table=made.page_table,
            logits_rows=columns.logits_rows,
            q_lens=columns.q_lens,
            kv_bounds=columns.kv_bounds,
            num_decode=columns.num_decode,
            max_kv_len=columns.max_kv_len,
        ),
        rows=step.rows,
        legal=made.legal,
        num_draft=step.num_draft,
        sampling=columns.sampling,
        width=columns.width,
        scored_tokens=_next_tokens(columns, made.positions, rows) if columns.scored.shape[0] else None,
    )


def put_tokens(inputs: ForwardInputs, static: ForwardInputs, size: int) -> None:
    """Copies a step's tokens, where they are and where they go to the first places of a graph's; what pads it goes to the sink.

    Args:
        inputs: T tokens.
        static: Those that the graph reads.
        size: Tokens of the graph, T or more.
    """
    num_tokens = inputs.input_ids.shape[0]
    static.input_ids[:num_tokens].copy_(inputs.input_ids)
    static.positions[:num_tokens].copy_(inputs.positions)
    static.slots[:num_tokens].copy_(inputs.slots)
    static.slots[num_tokens:size].zero_()


def _metadata(inputs: StepInputs) -> StepMetadata:
    forward = inputs.forward
    return StepMetadata(
        legal=inputs.legal,
        kv_lens=forward.kv_lens,
        page_table=forward.page_table,
        input_ids=forward.input_ids,
        positions=forward.positions,
        slots=forward.slots,
    )


def _next_tokens(columns: BatchColumns, positions: Tensor, rows: DeviceRows) -> Tensor:
    """Returns the tokens that follow; of an illegal row, whose places mean nothing, any token."""
    owners = columns.step.rows.index_select(0, columns.step.token_rows.index_select(0, columns.scored))
    places = positions.index_select(0, columns.scored) + 1
    flat = owners * rows.max_len + places.clamp_(max=rows.max_len - 1)
    return rows.tokens.view(-1).index_select(0, flat).long()
