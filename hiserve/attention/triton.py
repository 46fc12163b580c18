"""Attention by our own Triton kernels: one for leading rows of few tokens each, one for the rows after them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.plan import Int32Array
from hiserve.kernels.attention_decode import MAX_TOKENS, decode
from hiserve.kernels.attention_extend import choose_num_parts, extend
from hiserve.kernels.attention_schedule import (
    MAX_QUERIES,
    Schedule,
    ScheduledRows,
    choose_num_extra,
    schedule,
    tile_for,
)
from hiserve.kernels.launch import num_processors


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Adjacent rows of a step, with their page tables and, if layers with a window have pages of their own, with those."""

    all_seen: ScheduledRows
    windows: ScheduledRows

    def of(self, window: int | None) -> ScheduledRows:
        """Returns the rows as layers of a window read them."""
        return self.all_seen if window is None else self.windows


@dataclass(frozen=True, slots=True, eq=False)
class _Others:
    """Rows after those of few tokens."""

    rows: _Rows  # views of the step's; ``qo_indptr`` counts from the first token of the step
    has_fresh: bool  # there are rows without a prefix
    has_prefixed: bool  # there may be rows with a prefix
    has_nodes: bool  # there may be rows that verify trees
    num_parts: int  # parts the keys of each row are split into, in layers without a window


class TritonAttention:
    """Reads lengths on the device. Host lengths only choose kernels and the size of launches.

    The first layer of each window splits the rows of few tokens for the later layers. A graph therefore splits them
    again in each replay, by the lengths in its tensors.
    """

    needs_host_lengths = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._tile = tile_for(shape.head_dim, torch.uint8 if shape.packs_rows else shape.dtype)
        self._splits_at = {shape.windows.index(window) for window in shape.windows} or {shape.first_layer}
        self._tree_mask: Tensor | None = None
        self._short: _Rows | None = None
        self._others: _Others | None = None
        self._num_short = 0
        self._num_extra = 1
        self._schedules: dict[int | None, Schedule] = {}

    def captured(self, num_rows: int, width: int) -> Attention:
        """Returns itself: for rows of one small width, launches depend only on the arguments."""
        assert width <= MAX_TOKENS, f"{width} tokens a row"
        return self

    def ragged(self) -> Attention:
        """Returns itself: launches depend only on bounds."""
        return self

    def plan(self, inputs: ForwardInputs) -> None:
        """Decides which kernel computes which rows."""
        q_lens, num_short = inputs.q_lens, self._count_short(inputs.q_lens)
        self._tree_mask = inputs.tree_mask
        self._schedules = {}
        self._short = self._others = None
        shape = self._shape
        heads, num_sms = (shape.num_heads, shape.num_kv_heads), num_processors(inputs.kv_lens.device)
        if num_short:
            self._short, self._num_short = _cut(inputs, 0, num_short), int(q_lens[:num_short].sum())
            self._num_extra = choose_num_extra(self._short.all_seen, heads, num_sms, self._tile)
        if num_short < len(q_lens):
            assert not inputs.num_nodes_before, (
                f"rows of {q_lens[-1]} tokens and {inputs.num_nodes_before} nodes before them"
            )
            new, bounds = q_lens[num_short:], inputs.kv_bounds[num_short:]
            self._others = _Others(
                _cut(inputs, num_short, len(q_lens)),
                has_fresh=bool((bounds == new).any()),
                has_prefixed=bool((bounds > new).any()),
                has_nodes=bool((new < MAX_TOKENS).any()),
                num_parts=choose_num_parts(new, int(bounds.max()), heads, shape.head_dim, shape.dtype, num_sms=num_sms),
            )

    def _count_short(self, q_lens: Int32Array) -> int:
        """Counts the leading rows whose queries of a KV head fit one program; or all rows, if all are of one length.

        The kernel for the other rows is thus only compiled for rows of many tokens.
        """
        is_long = q_lens > MAX_QUERIES * self._shape.num_kv_heads // self._shape.num_heads
        if is_long[0]:
            return len(q_lens) if q_lens[0] <= MAX_TOKENS and (q_lens == q_lens[0]).all() else 0
        return int(is_long.argmax()) if is_long.any() else len(q_lens)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends in at most three launches for each kind of rows."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        shape = self._shape
        window = shape.window(layer)
        sinks = shape.sinks[layer] if shape.sinks else None
        if self._short is not None:
            short = self._short.of(window)
            decode(
                q[: self._num_short],
                kv,
                short,
                self._schedule(short, window, layer),
                page_size=shape.page_size,
                scale=shape.scale,
                out=out[: self._num_short],
                sinks=sinks,
                tree_mask=self._tree_mask,
            )
        if (others := self._others) is not None:
            rows = others.rows.of(window)
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
                scale=shape.scale,
                out=out,
                window=window,
                sinks=sinks,
                hides_first=shape.hides_first,
                tree_mask=self._tree_mask if others.has_nodes else None,
                has_fresh=others.has_fresh,
                has_prefixed=others.has_prefixed,
                num_parts=others.num_parts if window is None else 1,
            )
        return out

    def _schedule(self, rows: ScheduledRows, window: int | None, layer: int) -> Schedule:
        if layer in self._splits_at:
            hides_first = self._shape.hides_first
            heads = (self._shape.num_heads, self._shape.num_kv_heads)
            made = schedule(rows, heads, self._num_extra, self._tile, window=window, hides_first=hides_first)
            self._schedules[window] = made
        return self._schedules[window]


def _cut(inputs: ForwardInputs, first: int, end: int) -> _Rows:
    rows = ScheduledRows(
        qo_indptr=inputs.qo_indptr[first : end + 1],
        kv_lens=inputs.kv_lens[first:end],
        page_table=inputs.page_table[first:end],
        max_q_len=int(inputs.q_lens[first:end].max()),
        max_kv_len=inputs.max_kv_len,
        num_nodes_before=inputs.num_nodes_before,
    )
    table = inputs.window_table
    return _Rows(rows, rows if table is None else rows._replace(page_table=table[first:end]))
