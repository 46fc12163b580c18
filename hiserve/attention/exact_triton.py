"""Attention by Triton kernels whose sums have one order for each token, whatever the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hiserve.attention.base import AttentionShape
from hiserve.attention.triton import TritonAttention
from hiserve.core.forward import LayerKV
from hiserve.kernels.attention_schedule import KeyTile
from hiserve.kernels.exact_blocks import split_tile, whole_tile
from hiserve.kernels.exact_decode import decode
from hiserve.kernels.exact_extend import extend


class ExactTritonAttention(TritonAttention):
    """Splits rows of few tokens at segments of keys; programs of other rows join all segments as they go."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        assert shape.segment is not None and not shape.packs_rows
        self._segment = shape.segment
        self._tile = KeyTile(shape.segment, num_warps=4, num_stages=1)  # what a schedule splits by

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends in at most two launches for each kind of rows."""
        assert self._tree_mask is None, "nodes of a tree lie in other slots than the tokens that they become"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        shape, window = self._shape, self._shape.window(layer)
        options: dict[str, Any] = {
            "page_size": shape.page_size,
            "scale": shape.scale,
            "sinks": shape.sinks[layer] if shape.sinks else None,
        }
        if self._short is not None:
            rows, num_short = self._short.of(window), self._num_short
            tile = split_tile(rows.max_q_len * shape.num_heads // shape.num_kv_heads, shape.head_dim, shape.dtype)
            made = self._schedule(rows, window, layer)
            decode(q[:num_short], kv, rows, made, tile, out=out[:num_short], **options)
        if (others := self._others) is not None:
            extend(
                q,
                k,
                v,
                kv,
                others.rows.of(window),
                whole_tile(shape.head_dim, shape.dtype),
                segment=self._segment,
                out=out,
                window=window,
                hides_first=shape.hides_first,
                has_fresh=others.has_fresh,
                has_prefixed=others.has_prefixed,
                **options,
            )
        return out
