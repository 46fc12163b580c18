"""Attention over the union of rows of a window and of compressed rows (DeepSeek-V4): where they lie, by step and layer."""

from __future__ import annotations

from torch import Tensor

from hiserve.attention.base import Attention, AttentionShape
from hiserve.core.forward import ForwardInputs, GroupedKV, LayerKV
from hiserve.core.row_shapes import PackedPages, PackedShape
from hiserve.kernels.compressed_ops import compressed_ops_for
from hiserve.kernels.row_codecs import pages_of
from hiserve.kernels.union_rows import ChosenRows, RangeRows, RowSource


class UnionAttention:
    """Names the rows that a layer's tokens see. All else is computed from lengths on the device, so it plans nothing.

    Args:
        shape: With ``is_union``.
    """

    needs_host_lengths = False

    def __init__(self, shape: AttentionShape) -> None:
        assert shape.is_union, shape
        self._page_size = shape.page_size
        self._hides_first = shape.hides_first

    def plan(self, inputs: ForwardInputs) -> None:
        """Does nothing."""

    def captured(self, num_rows: int, width: int) -> Attention | None:
        """Returns itself."""
        del num_rows, width
        return self

    def ragged(self) -> Attention:
        """Returns itself."""
        return self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Is not called: layers differ in the rows that they see."""
        raise AssertionError(f"layer {layer} attends over the union of several groups of rows")

    def packed(self, pool: Tensor, shape: PackedShape | None, ratio: int = 1) -> PackedPages | None:
        """Returns how a pool holds rows, each of ``ratio`` tokens: memory of bytes holds packed ones."""
        return pages_of(pool, shape, self._page_size // ratio)

    def window_rows(self, inputs: ForwardInputs, kv: LayerKV, window: int, shape: PackedShape | None) -> RowSource:
        """Returns the rows of the window of each token; ``shape`` is that of packed ones."""
        table = inputs.page_table if inputs.window_table is None else inputs.window_table
        rows = RangeRows(
            pool=kv.k[:, 0],
            table=table,
            token_rows=inputs.token_rows,
            positions=inputs.positions,
            page_rows=self._page_size,
            most=inputs.max_kv_len,
            window=window,
            packed=self.packed(kv.k, shape),
        )
        return self._without_first(inputs, rows) if self._hides_first else rows

    @staticmethod
    def _without_first(inputs: ForwardInputs, rows: RangeRows) -> ChosenRows:
        """Returns all rows but the first, whose slot may never have been written.

        The pages of a draft begin where its head took part, so positions count from there: ``kv_lens`` say how many they are.
        """
        ops = compressed_ops_for(inputs.kv_lens.device)
        return ChosenRows(rows.pool, ops.slots_behind_first(rows, inputs.kv_lens, inputs.qo_indptr), rows.packed)

    def history_rows(
        self, inputs: ForwardInputs, kv: GroupedKV, group: str, ratio: int, shape: PackedShape | None
    ) -> RangeRows:
        """Returns the compressed rows of a group, each of ``ratio`` tokens; ``shape`` is that of packed ones."""
        pool = kv.beside[group]
        return RangeRows(
            pool=pool,
            table=inputs.page_table,
            token_rows=inputs.token_rows,
            positions=inputs.positions,
            page_rows=self._page_size // ratio,
            most=inputs.max_kv_len // ratio,
            ratio=ratio,
            packed=self.packed(pool, shape, ratio),
        )
