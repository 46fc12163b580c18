"""Builds a step's inputs from the plan and the rows, and checks the rows on the way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs
from hiserve.core.plan import BatchPlan, Int32Array
from hiserve.core.upload import upload
from hiserve.kernels.reference import is_last_loc_legal, is_table_owned, last_loc
from hiserve.runners.rows import DeviceRows


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step on the device: B rows, of which S sample; the next token of P tokens is scored.

    Attributes:
        forward: What the model takes.
        rows: int64 ``[B]``.
        legal: bool ``[B]``. Rows that passed the check; the others read and write the sink.
        sampling: int64 ``[S]``. Which of the B rows sample.
        host_sampling_rows: int32 ``[S]``. Row numbers of those, on the host.
        scored_tokens: int64 ``[P]``. Known tokens to score, in plan order: those that follow the tokens of
            ``forward.logits_rows[S:]``. None when P is 0.
    """

    forward: ForwardInputs
    rows: Tensor
    legal: Tensor
    sampling: Tensor
    host_sampling_rows: Int32Array
    scored_tokens: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """The plan on the device; fields as in ``BatchPlan``, ``ForwardInputs`` and ``StepInputs``.

    ``scored`` is int64 ``[P]``: tokens, as indices into T, whose next token is scored.
    """

    rows: Tensor
    num_new: Tensor
    samples: Tensor
    max_len: Tensor
    token_rows: Tensor
    offsets: Tensor
    qo_indptr: Tensor
    sampling: Tensor
    logits_rows: Tensor
    scored: Tensor


def build_inputs(plan: BatchPlan, rows: DeviceRows) -> StepInputs:
    """Gathers the step's tokens, positions, slots and page tables. Lengths are the device's own."""
    max_kv_len = int(plan.max_len.max())
    assert max_kv_len <= rows.max_len, f"step {plan.step_id} plans {max_kv_len} tokens; a row holds {rows.max_len}"
    assert (plan.num_new <= plan.max_len).all(), f"step {plan.step_id}: {plan.num_new} new of {plan.max_len} tokens"
    assert (plan.num_scored <= plan.num_new).all(), f"step {plan.step_id}: {plan.num_scored} of {plan.num_new} scored"
    columns = _upload(plan, rows.device)
    width = -(-max_kv_len // rows.page_size)
    table = rows.page_table.index_select(0, columns.rows).narrow(1, 0, width)
    computed_len = rows.computed_len.index_select(0, columns.rows)
    legal = _check(columns, rows, table, computed_len)
    table = table * legal[:, None]  # an illegal row reads and writes page 0, the sink, from position 0
    computed_len = computed_len * legal
    positions = computed_len.index_select(0, columns.token_rows) + columns.offsets
    flat = columns.rows.index_select(0, columns.token_rows) * rows.max_len + positions
    pages = table[columns.token_rows, positions // rows.page_size].long()
    return StepInputs(
        forward=ForwardInputs(
            input_ids=rows.tokens.view(-1).index_select(0, flat),
            positions=positions,
            slots=pages * rows.page_size + positions % rows.page_size,
            token_rows=columns.token_rows,
            qo_indptr=columns.qo_indptr,
            kv_lens=computed_len + columns.num_new,
            page_table=table,
            logits_rows=columns.logits_rows,
            q_lens=plan.num_new,
            kv_bounds=plan.max_len,
            max_kv_len=max_kv_len,
        ),
        rows=columns.rows,
        legal=legal,
        sampling=columns.sampling,
        host_sampling_rows=plan.rows[plan.samples],
        scored_tokens=_next_tokens(rows.tokens, flat, columns.scored) if plan.num_scored.any() else None,
    )


def _next_tokens(tokens: Tensor, flat: Tensor, scored: Tensor) -> Tensor:
    """Returns the tokens that follow; of an illegal row, whose places mean nothing, any token."""
    places = (flat.index_select(0, scored) + 1).clamp_(max=tokens.numel() - 1)
    return tokens.view(-1).index_select(0, places).long()


def _upload(plan: BatchPlan, device: torch.device) -> _Columns:
    num_new = plan.num_new.astype(np.int64)
    indptr = np.zeros(num_new.size + 1, dtype=np.int64)
    np.cumsum(num_new, out=indptr[1:])
    token_rows = np.repeat(np.arange(num_new.size), num_new)
    offsets = np.arange(indptr[-1]) - indptr[token_rows]
    sampling = np.flatnonzero(plan.samples)
    scored = np.flatnonzero(offsets < plan.num_scored[token_rows])
    return _Columns(
        *upload(
            (
                plan.rows.astype(np.int64),
                num_new,
                plan.samples,
                plan.max_len.astype(np.int64),
                token_rows,
                offsets,
                indptr.astype(np.int32),
                sampling,
                np.concatenate((indptr[sampling + 1] - 1, scored)),
                scored,
            ),
            device,
        )
    )


def _check(columns: _Columns, rows: DeviceRows, table: Tensor, computed_len: Tensor) -> Tensor:
    """Whether each row may run: bool ``[B]``. Its slots are its own, and the plan fits its lengths."""
    end = computed_len + columns.num_new
    known_len = rows.known_len.index_select(0, columns.rows)
    owners = rows.entry_owner.index_select(0, columns.rows).narrow(1, 0, table.shape[1])
    location = last_loc(table, computed_len, rows.page_size)
    num_slots = rows.num_pages * rows.page_size
    return (
        is_last_loc_legal(location, computed_len, rows.page_size, num_slots)
        & is_table_owned(table, owners, rows.page_owner, end, rows.page_size)
        & (end <= columns.max_len)
        & torch.where(columns.samples, (end == known_len) & (end < rows.max_len), end <= known_len)
    )
