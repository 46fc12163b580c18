"""Attention for CPUs: one fused call per row, over a view of the pool where the row's pages are adjacent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.attention.base import AttentionShape
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.plan import Int32Array, Int64Array
from hiserve.kernels.row_codecs import load_heads


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """The keys that a row's tokens see in layers of one window."""

    first: int  # position of the first key that any token sees
    # ``[num_new, kv_len - first]``, added to the scores; None where it would hide nothing, or only a prompt's future.
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """The slots of a row's keys in layers of one window."""

    start: int  # position of the first key in ``pages``
    first_slot: int  # of position 0, if the pages are adjacent
    pages: Tensor | None  # int64 ``[n]``, its pages in order, if they are not adjacent; else None


@dataclass(frozen=True, slots=True, eq=False)
class _CpuRow:
    """One row of the step."""

    start: int  # first of its tokens
    num_new: int  # its tokens
    kv_len: int  # tokens it attends over
    places: dict[int | None, _Place]  # by window
    seen: dict[int | None, _Seen]  # by window


class CpuAttention:
    """Reads the pool in place where pages are adjacent. Does not support hidden positions.

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
        table, kv_lens = inputs.page_table.numpy(), inputs.kv_lens.numpy()
        stretches = self._stretches(table, kv_lens, None)
        starts, lengths = inputs.qo_indptr.tolist(), kv_lens.tolist()
        windows = self._shape.distinct_windows
        self._rows = []
        for row, (stretch, kv_len) in enumerate(zip(stretches, lengths, strict=True)):
            num_new = starts[row + 1] - starts[row]
            seen = {window: self._seen(num_new, kv_len, window) for window in windows}
            places = dict.fromkeys(windows, stretch)
            self._rows.append(_CpuRow(start=starts[row], num_new=num_new, kv_len=kv_len, places=places, seen=seen))
        if inputs.tree_mask is not None:
            self._see_trees(inputs.tree_mask, inputs.positions, inputs.num_nodes_before)
        if inputs.window_table is not None:
            self._place_windows(inputs.window_table.numpy(), kv_lens)

    def _see_trees(self, tree_mask: Tensor, positions: Tensor, num_before: int) -> None:
        """Replaces the masks of rows that verify trees: a node sees its ancestors, and what is in its window."""
        has_nodes = tree_mask.numpy() != 0
        for row in self._rows:
            if row.num_new + num_before == 1 or not has_nodes[row.start]:
                continue
            nodes = tree_mask[row.start : row.start + row.num_new, None]
            position = positions[row.start : row.start + row.num_new, None]
            for window, seen in row.seen.items():
                first = max(0, seen.first - num_before)
                keys = torch.arange(first, row.kv_len)
                new = keys - (row.kv_len - row.num_new - num_before)
                hidden = (new >= 0) & (nodes >> new.clamp(min=0) & 1 == 0)
                if window is not None:
                    hidden |= keys <= position - window
                mask = torch.zeros(hidden.shape, dtype=self._shape.dtype).masked_fill_(hidden, -torch.inf)
                row.seen[window] = _Seen(first, mask)

    def _place_windows(self, table: Int32Array, kv_lens: Int64Array) -> None:
        """Takes the keys of layers with a window from pages of their own, whose entries below the window may be anything."""
        for window in self._shape.distinct_windows:
            if window is not None:
                first = np.array([row.seen[window].first for row in self._rows]) // self._page_size
                for row, stretch in zip(self._rows, self._stretches(table, kv_lens, first), strict=True):
                    row.places[window] = stretch

    def _stretches(self, table: Int32Array, kv_lens: Int64Array, first: Int64Array | None) -> list[_Place]:
        """Returns the place of each row's keys, from entry ``first`` (int64 ``[B]``; None is 0) of its table on."""
        num_pages = -(-kv_lens // self._page_size)
        after_first = np.arange(1, table.shape[1])
        adjacent = (np.diff(table) == 1) | (after_first >= num_pages[:, None])
        if first is not None:
            adjacent |= after_first <= first[:, None]
        begins = [0] * num_pages.size if first is None else first.tolist()
        places = []
        for row, (count, one_stretch) in enumerate(zip(num_pages.tolist(), adjacent.all(1).tolist(), strict=True)):
            begin = begins[row]
            first_slot = (int(table[row, begin]) - begin) * self._page_size
            pages = None if one_stretch else torch.from_numpy(table[row, begin:count].astype(np.int64))
            places.append(_Place(begin * self._page_size, first_slot, pages))
        return places

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
            seen, place = row.seen[window], row.places[window]
            first, num_keys = seen.first, row.kv_len - seen.first
            if row.num_new == row.kv_len:
                keys = new_keys.narrow(2, row.start + first, num_keys)
                values = new_values.narrow(2, row.start + first, num_keys)
            elif kv.is_packed:
                keys, values = map(_heads_first, load_heads(kv, self._slots(place, first, num_keys), q.dtype))
            elif place.pages is None:
                keys = pool_keys.narrow(2, place.first_slot + first, num_keys)
                values = pool_values.narrow(2, place.first_slot + first, num_keys)
            else:
                keys = self._gather(kv.k, place.pages, first - place.start, num_keys)
                values = self._gather(kv.v, place.pages, first - place.start, num_keys)
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

    def _slots(self, place: _Place, first: int, num_keys: int) -> Tensor | slice:
        if place.pages is None:
            return slice(place.first_slot + first, place.first_slot + first + num_keys)
        slots = place.pages[:, None] * self._page_size + torch.arange(self._page_size)
        return slots.flatten().narrow(0, first - place.start, num_keys)

    def _gather(self, pool: Tensor, pages: Tensor, first: int, num_keys: int) -> Tensor:
        skipped, offset = divmod(first, self._page_size)
        found = pool.view(-1, self._page_size, *pool.shape[1:]).index_select(0, pages[skipped:]).flatten(0, 1)
        return _heads_first(found.narrow(0, offset, num_keys))


class ExactCpuAttention(CpuAttention):
    """Each token attends by a call of its own, whose shape, and so the order of sums, is that of its position."""

    def plan(self, inputs: ForwardInputs) -> None:
        """Makes a row of each token."""
        super().plan(inputs)
        self._rows = [token for row in self._rows for token in self._tokens(row)]

    def _tokens(self, row: _CpuRow) -> Iterator[_CpuRow]:
        for place in range(row.num_new):
            kv_len = row.kv_len - row.num_new + place + 1
            seen = {window: self._seen(1, kv_len, window) for window in row.seen}
            yield replace(row, start=row.start + place, num_new=1, kv_len=kv_len, seen=seen)


def _attend_with_sinks(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
    """Like torch's function for CPUs, by the operator that it calls, which also gives the log of each softmax's sum."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)
    share = torch.sigmoid(lse - sinks[:, None])  # of the keys, the sink included
    attended: Tensor = (out * share[..., None]).to(q.dtype)
    return attended


def _heads_first(x: Tensor) -> Tensor:
    """``[n, heads, head_dim]`` as ``[1, heads, n, head_dim]``, a view."""
    return x.transpose(0, 1).unsqueeze(0)
