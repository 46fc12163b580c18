"""Absorbed queries of latent attention by our own Triton kernel: rows that decode, and the rows after them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, LatentKV, LayerKV
from hiserve.core.step_memory import MAX_PROGRAMS, PROGRAM_QUERIES
from hiserve.kernels.latent_decode import LatentRows, choose_num_parts, decode
from hiserve.kernels.launch import num_processors


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of one launch."""

    rows: LatentRows
    max_q_len: int
    num_parts: int


class TritonLatentAttention:
    """Reads lengths on the device; those of the host only choose the size of launches.

    Args:
        shape: Of absorbed queries: one KV head of ``head_dim`` elements.
        has_padding: Batches may have tokens that belong to no row; their outputs are zeros.
    """

    needs_host_lengths = False

    def __init__(self, shape: AttentionShape, *, has_padding: bool = False) -> None:
        assert shape.num_kv_heads == 1, shape
        self._shape = shape
        self._has_padding = has_padding
        self._parts: list[_Part] = []

    def captured(self, num_rows: int, width: int) -> Attention:
        """Returns itself: launches depend only on bounds."""
        return self

    def ragged(self) -> Attention:
        """Returns one for batches with padding."""
        return TritonLatentAttention(self._shape, has_padding=True)

    def plan(self, inputs: ForwardInputs) -> None:
        """Splits keys of rows that decode, and of the others, so that each launch fills the device."""
        assert inputs.tree_mask is None, "latent attention has no tree masks"
        num_rows, num_decode = len(inputs.q_lens), inputs.num_decode
        edges = sorted({0, num_decode, num_rows})
        self._parts = [self._part(inputs, *edge) for edge in pairwise(edges)]

    def _part(self, inputs: ForwardInputs, first: int, end: int) -> _Part:
        device, max_q_len = inputs.kv_lens.device, max(1, int(inputs.q_lens[first:end].max()))
        num_parts = choose_num_parts(
            end - first,
            max_q_len * self._shape.num_heads,
            inputs.max_kv_len,
            self._shape.dtype,
            num_sms=num_processors(device),
            room=MAX_PROGRAMS * PROGRAM_QUERIES,
        )
        rows = LatentRows(inputs.qo_indptr[first : end + 1], inputs.kv_lens[first:end], inputs.page_table[first:end])
        return _Part(rows, max_q_len, num_parts)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends in at most two launches for each kind of rows."""
        assert isinstance(kv, LatentKV), type(kv)
        rank = v.shape[2]
        if out is None:
            out = (q.new_zeros if self._has_padding else q.new_empty)((*q.shape[:2], rank))
        for part in self._parts:
            decode(
                q,
                kv.k,
                rank,
                part.rows,
                max_q_len=part.max_q_len,
                num_parts=part.num_parts,
                page_size=self._shape.page_size,
                scale=self._shape.scale,
                hides_first=self._shape.hides_first,
                out=out,
                packed=kv.packed,
            )
        return out
