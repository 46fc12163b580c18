"""Which tokens of which rows a draft forward computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hiserve.core.drafts import DraftStep
from hiserve.core.plan import Int32Array
from hiserve.core.upload import upload


@dataclass(frozen=True, slots=True, eq=False)
class DraftLayout:
    """B rows and T tokens in row order.

    Attributes:
        num_tokens: int64 ``[B]``. Tokens of each row.
        token_rows: int64 ``[T]``. Which of the B rows a token belongs to.
        offsets: int64 ``[T]``. The token's index among those of its row.
        qo_indptr: int32 ``[B + 1]``. Row b has tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]``.
        step_indptr: int32 ``[B + 1]``. Likewise of the step before, in which each row had one token less.
        q_lens: int32 ``[B]``, on the host. Tokens of each row.
        kv_bounds: int32 ``[B]``, on the host. Upper bounds of what they attend over.
        max_kv_len: Of them all.
        num_decode: Rows whose bounds are not exact: those that drafts were verified for, all of them here.
    """

    num_tokens: Tensor
    token_rows: Tensor
    offsets: Tensor
    qo_indptr: Tensor
    step_indptr: Tensor
    q_lens: Int32Array
    kv_bounds: Int32Array
    max_kv_len: int
    num_decode: int

    def within(self, max_kv_len: int) -> DraftLayout:
        """The same, where no row attends over more than so many tokens."""
        return replace(self, kv_bounds=np.full_like(self.kv_bounds, max_kv_len), max_kv_len=max_kv_len)


def draft_layout_of(step: DraftStep, max_kv_len: int) -> DraftLayout:
    """Returns the tokens of a step and the one behind them, of each row; carried to the device in one copy.

    Args:
        step: The step.
        max_kv_len: Places of a row's pages: the token behind a row's last place attends to these alone.
    """
    q_lens = step.q_lens + np.int32(1)
    num_tokens = q_lens.astype(np.int64)
    indptr = np.zeros(q_lens.size + 1, dtype=np.int64)
    np.cumsum(num_tokens, out=indptr[1:])
    rows = np.repeat(np.arange(q_lens.size), num_tokens)
    offsets = np.arange(indptr[-1]) - indptr[rows]
    own = (indptr - np.arange(indptr.size)).astype(np.int32)
    columns = upload((num_tokens, rows, offsets, indptr.astype(np.int32), own), step.rows.device)
    counts, token_rows, token_offsets, qo_indptr, step_indptr = columns
    bounds = np.minimum(step.kv_bounds + np.int32(1), np.int32(max_kv_len))
    return DraftLayout(
        num_tokens=counts,
        token_rows=token_rows,
        offsets=token_offsets,
        qo_indptr=qo_indptr,
        step_indptr=step_indptr,
        q_lens=q_lens,
        kv_bounds=bounds,
        max_kv_len=int(bounds.max()),
        num_decode=q_lens.size,
    )


def even_draft_layout(num_rows: int, width: int, max_kv_len: int, device: torch.device) -> DraftLayout:
    """Returns ``width`` tokens of each row, made on the device."""
    each_row, each_token = torch.arange(num_rows, device=device), torch.arange(num_rows * width, device=device)
    indptr = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    lens = np.full(num_rows, width, dtype=np.int32)
    return DraftLayout(
        num_tokens=torch.full_like(each_row, width),
        token_rows=each_token // width,
        offsets=each_token % width,
        qo_indptr=indptr * width,
        step_indptr=indptr * (width - 1),
        q_lens=lens,
        kv_bounds=np.full_like(lens, max_kv_len),
        max_kv_len=max_kv_len,
        num_decode=num_rows,
    )
