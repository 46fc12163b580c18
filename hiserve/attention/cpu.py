"""Attention for CPUs: one fused call per row, over a view of the pool where the row's pages are adjacent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.attention.base import AttentionShape
from hiserve.core.forward import ForwardInputs, LayerKV


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """The keys that a row's tokens see in layers of one window."""

    first: int  # position of the first key that any token sees
    # ``[num_new, kv_len - first]``, added to the scores; None where it would hide nothing, or only a prompt's future.
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _CpuRow:
    """One row of the step."""

    start: int  # first of its tokens
    num_new: int  # its tokens
    kv_len: int  # tokens it attends over
    first_slot: int  # first slot of its keys, if its pages are adjacent
    pages: Tensor | None  # int64 ``[n]``, its pages in order, if they are not adjacent; else None
    seen: Mapping[int | None, _Seen]  # by window


class CpuAttention:
    """Reads the pool in place where pages are adjacent. Does not support hidden positions and tree masks.

    At 500 to 1,000 tokens of context a decode row over adjacent pages costs about half of a gather of
    its pages. A gather by runs of adjacent pages was measured no faster than by pages, so there is none.
    """

    needs_host_lengths = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._page_size = shape.page_size
        self._rows: list[_CpuRow] = []

    def captured(self, num_rows: int, width: int) -> None:
        """Returns None: there are no graphs on a CPU."""

    def ragged(self) -> None:
        """Returns None: there are no graphs on a CPU."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Decides for each row whether its keys are adjacent in the pool."""
        assert inputs.tree_mask is None, "the CPU backend has no tree masks"
        table = inputs.page_table.numpy()
        num_pages = -(-inputs.kv_lens.numpy() // self._page_size)
        after_first = np.arange(1, table.shape[1])
        adjacent = ((np.diff(table) == 1) | (after_first >= num_pages[:, None])).all(1)
        starts, kv_lens = inputs.qo_indptr.tolist(), inputs.kv_lens.tolist()
        windows = self._shape.distinct_windows
        self._rows = []
        for row, (count, one_stretch) in enumerate(zip(num_pages.tolist(), adjacent.tolist(), strict=True)):
            num_new, kv_len = starts[row + 1] - starts[row], kv_lens[row]
            self._rows.append(
                _CpuRow(
                    start=starts[row],
                    num_new=num_new,
                    kv_len=kv_len,
                    first_slot=int(table[row, 0]) * self._page_size,
                    pages=None if one_stretch else torch.from_numpy(table[row, :count].astype(np.int64)),
                    seen={window: self._seen(num_new, kv_len, window) for window in windows},
                )
            )

    def _seen(self, num_new: int, kv_len: int, window: int | None) -> _Seen:
        reach = kv_len if window is None else min(window, kv_len)  # most keys that a token sees
        first = max(0, kv_len - num_new - reach + 1)
        if num_new == 1 or num_new == reach == kv_len:
            return _Seen(first, None)
        before = kv_len - first - num_new
        hidden = torch.full((num_new, before + num_new), -torch.inf, dtype=self._shape.dtype)
        return _Seen(first, hidden.triu(before + 1) + hidden.tril(before - reach))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends row by row; a row without a prefix reads ``k`` and ``v`` instead of the pool."""
        window = self._shape.window(layer)
        sinks = self._shape.sinks[layer] if self._shape.sinks else None
        queries = _heads_first(q)
        new_keys, new_values = _heads_first(k), _heads_first(v)
        pool_keys, pool_values = _heads_first(kv.k), _heads_first(kv.v)
        outputs = []
        for row in self._rows:
            seen = row.seen[window]
            first, num_keys = seen.first, row.kv_len - seen.first
            if row.num_new == row.kv_len:
                keys = new_keys.narrow(2, row.start + first, num_keys)
                values = new_values.narrow(2, row.start + first, num_keys)
            elif row.pages is None:
                keys = pool_keys.narrow(2, row.first_slot + first, num_keys)
                values = pool_values.narrow(2, row.first_slot + first, num_keys)
            else:
                keys = self._gather(kv.k, row.pages, first, num_keys)
                values = self._gather(kv.v, row.pages, first, num_keys)
            attend = F.scaled_dot_product_attention if sinks is None else partial(_attend_with_sinks, sinks)
            attended = attend(
                queries.narrow(2, row.start, row.num_new),
                keys,
                values,
                attn_mask=seen.mask,
                is_causal=seen.mask is None and row.num_new == row.kv_len,
                scale=self._shape.scale,
                enable_gqa=True,
            )
            outputs.append(attended[0].transpose(0, 1))
        joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return joined if out is None else out.copy_(joined)

    def _gather(self, pool: Tensor, pages: Tensor, first: int, num_keys: int) -> Tensor:
        skipped, offset = divmod(first, self._page_size)
        found = pool.view(-1, self._page_size, *pool.shape[1:]).index_select(0, pages[skipped:]).flatten(0, 1)
        return _heads_first(found.narrow(0, offset, num_keys))


def _attend_with_sinks(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
    """Like torch's function for CPUs, by the operator that it calls, which also gives the log of each softmax's sum."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)
    share = torch.sigmoid(lse - sinks[:, None])  # of the keys, the sink included
    attended: Tensor = (out * share[..., None]).to(q.dtype)
    return attended


def _heads_first(x: Tensor) -> Tensor:
    """``[n, heads, head_dim]`` as ``[1, heads, n, head_dim]``, a view."""
    return x.transpose(0, 1).unsqueeze(0)
