"""Attention by our own Triton kernels: one for leading rows of one small width, one for the rows behind them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.kernels.attention_decode import MAX_TOKENS, choose_num_splits, decode
from hiserve.kernels.attention_extend import extend

_SMS_OF_THE_INTERPRETER = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Some adjacent rows of the step; tensors are views of the step's.

    Attributes:
        num_tokens: Tokens of these rows.
        qo_indptr: Counts from the first token of the step.
        kv_lens: As in the step.
        page_table: As in the step.
        max_q_len: Most tokens of one row.
        has_fresh: There are rows that have no prefix.
        has_prefixed: There may be rows that have one.
    """

    num_tokens: int
    qo_indptr: Tensor
    kv_lens: Tensor
    page_table: Tensor
    max_q_len: int
    has_fresh: bool
    has_prefixed: bool


class TritonAttention:
    """Reads lengths on the device; of the host's it uses only how many tokens rows have.

    Args:
        shape: Of the model.
    """

    needs_host_lengths = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._tree_mask: Tensor | None = None
        self._even: _Rows | None = None
        self._others: _Rows | None = None
        self._num_splits = 1

    def captured(self, num_rows: int, width: int) -> Attention:
        """Returns itself: for rows of one small width, launches depend on nothing but the arguments."""
        assert width <= MAX_TOKENS, f"{width} tokens a row"
        return self

    def plan(self, inputs: ForwardInputs) -> None:
        """Decides which kernel computes which rows, and into how many parts rows are split."""
        q_lens, width = inputs.q_lens, int(inputs.q_lens[0])
        num_even = 0
        if width <= MAX_TOKENS:
            differs = q_lens != width
            num_even = int(differs.argmax()) if differs.any() else len(q_lens)
        self._tree_mask = inputs.tree_mask
        self._even = _cut(inputs, 0, num_even) if num_even else None
        self._others = _cut(inputs, num_even, len(q_lens)) if num_even < len(q_lens) else None
        self._num_splits = choose_num_splits(
            max(1, num_even),
            width,
            inputs.max_kv_len,
            (self._shape.num_heads, self._shape.num_kv_heads),
            _num_sms(inputs),
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int) -> Tensor:
        """Attends in one or two launches for each kind of rows."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        shape, rows = self._shape, self._even
        window = shape.windows[layer] if shape.windows else None
        sinks = shape.sinks[layer] if shape.sinks else None
        if rows is not None:
            decode(
                q[: rows.num_tokens],
                kv,
                rows.qo_indptr,
                rows.kv_lens,
                rows.page_table,
                max_q_len=rows.max_q_len,
                page_size=shape.page_size,
                scale=shape.head_dim**-0.5,
                num_splits=self._num_splits,
                out=out[: rows.num_tokens],
                window=window,
                sinks=sinks,
                hides_first=shape.hides_first,
                tree_mask=self._tree_mask,
            )
        if (rows := self._others) is not None:
            extend(
                q,
                k,
                v,
                kv,
                rows.qo_indptr,
                rows.kv_lens,
                rows.page_table,
                max_q_len=rows.max_q_len,
                page_size=shape.page_size,
                scale=shape.head_dim**-0.5,
                out=out,
                window=window,
                sinks=sinks,
                hides_first=shape.hides_first,
                tree_mask=self._tree_mask,
                has_fresh=rows.has_fresh,
                has_prefixed=rows.has_prefixed,
            )
        return out


def _cut(inputs: ForwardInputs, first: int, end: int) -> _Rows:
    q_lens, kv_bounds = inputs.q_lens[first:end], inputs.kv_bounds[first:end]
    return _Rows(
        num_tokens=int(q_lens.sum()),
        qo_indptr=inputs.qo_indptr[first : end + 1],
        kv_lens=inputs.kv_lens[first:end],
        page_table=inputs.page_table[first:end],
        max_q_len=int(q_lens.max()),
        has_fresh=bool((kv_bounds == q_lens).any()),
        has_prefixed=bool((kv_bounds > q_lens).any()),
    )


def _num_sms(inputs: ForwardInputs) -> int:
    device = inputs.kv_lens.device
    if device.type != "cuda":
        return _SMS_OF_THE_INTERPRETER
    return torch.cuda.get_device_properties(device).multi_processor_count
