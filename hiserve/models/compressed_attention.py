"""A decoder layer's attention over a window and compressed rows (DeepSeek-V4), made of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.attention.union import UnionAttention
from hiserve.core.forward import ForwardInputs, GroupedKV, LayerKV
from hiserve.kernels.compress_reference import CarriedInputs, Compression, StepTokens
from hiserve.kernels.compressed_ops import CompressedOps, compressed_ops_for
from hiserve.kernels.ops import Ops
from hiserve.kernels.union_rows import ChosenRows, RangeRows
from hiserve.layers import Linear, RMSNorm
from hiserve.models.compressed_cache import HEAVY, INDEX, SPARSE, inputs_of
from hiserve.models.compressed_config import CompressedConfig, LayerKind
from hiserve.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Cosines and sines of one step, float32 or float64.

    Attributes:
        cos: ``[T, rope_dim / 2]``, of the tokens' positions.
        sin: Likewise.
        row_cos: ``[T, rope_dim / 2]``, of the first token that a compressed row stands for, if it ends with this one.
        row_sin: Likewise.
    """

    cos: Tensor
    sin: Tensor
    row_cos: Tensor
    row_sin: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Compressor:
    """Makes rows that each stand for several tokens.

    Attributes:
        group: Of the rows that it makes; that of its inputs is named after it.
        how: Biases and norm.
        ops: Of its device.
    """

    group: str
    how: Compression
    ops: CompressedOps

    def __call__(
        self, values: Tensor, scores: Tensor, inputs: ForwardInputs, kv: GroupedKV, rows: RangeRows, turns: Turns
    ) -> None:
        """Writes the rows that end with a token of the step; ``values`` and ``scores`` are ``[T, num_series * n]``."""
        assert inputs.state is not None, "compressed rows need the inputs that requests carry along"
        name = inputs_of(self.group)
        self.ops.compress(
            values,
            scores,
            self.how,
            CarriedInputs(kv.beside[name], kv.snapshots[name]),
            StepTokens(inputs.qo_indptr, inputs.state),
            rows,
            (turns.row_cos, turns.row_sin),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Indexer:
    """Chooses the compressed rows that a token sees, by keys of their own.

    Attributes:
        compressor: Of the keys.
        num_heads: Of the queries.
        most: Rows that it chooses.
    """

    compressor: Compressor
    num_heads: int
    most: int

    def __call__(self, q: Tensor, weights: Tensor, keys: RangeRows, turns: Turns) -> Tensor:
        """Returns the slots of the chosen rows, int64 ``[T, most]``; -1 is none.

        Args:
            q: ``[T, num_heads * n]``.
            weights: ``[T, num_heads]``, of the heads' scores.
            keys: Of ``n`` elements, this step's included.
            turns: Of the step.
        """
        ops = self.compressor.ops
        heads = ops.rotate_pairs(q.view(q.shape[0], self.num_heads, -1), turns.cos, turns.sin)
        scale = (self.num_heads * heads.shape[2]) ** -0.5
        return ops.choose_rows(heads, weights.to(turns.cos.dtype), keys, self.most, scale)


@dataclass(frozen=True, slots=True, eq=False)
class CompressedSelfAttention:
    """Self-attention whose heads share one row, over a window and compressed rows.

    Attributes:
        into: From the layer's input: the queries' latent, the row, and the inputs of compressor and indexer.
        sizes: Rows of each of these in ``into``.
        query_norm: Of the queries' latent.
        query_up: From that latent to queries, then to the indexer's.
        row_norm: ``[width]``, weights of the norm of rows.
        sinks: ``[num_heads]``, float32 or float64.
        out_groups: ``[num_groups, out_rank, num_heads * width / num_groups]``.
        out: From these projections, one after the other.
        compressor: None for layers with a window alone.
        indexer: None where all compressed rows are seen.
        config: Its shape.
        eps: Of norms.
        ops: Of its device.
    """

    into: Linear
    sizes: tuple[int, ...]
    query_norm: RMSNorm
    query_up: Linear
    row_norm: Tensor
    sinks: Tensor
    out_groups: Tensor
    out: Linear
    compressor: Compressor | None
    indexer: Indexer | None
    config: CompressedConfig
    eps: float
    ops: CompressedOps

    def row(self, x: Tensor) -> Tensor:
        """Returns the rows of ``x``, ``[T, width]``, before their norm."""
        return self.into(x).split_with_sizes(self.sizes, 1)[1]

    def store(
        self,
        heads: Tensor,
        row: Tensor,
        inputs: ForwardInputs,
        turns: Turns,
        kv: LayerKV,
        attention: UnionAttention,
    ) -> Tensor:
        """Norms, rotates and stores the step's rows ``[T, width]`` of the window; returns normed and rotated heads of queries.

        ``heads`` are ``[T, n, width]``; there may be none.
        """
        slots = inputs.slots if inputs.window_slots is None else inputs.window_slots
        cos, sin = turns.cos, turns.sin
        packed = attention.packed(kv.k, self.config.packed_row)
        return self.ops.store_rows(heads, row, self.row_norm, self.eps, cos, sin, kv.k[:, 0], slots, packed)

    def __call__(
        self, x: Tensor, inputs: ForwardInputs, turns: Turns, kv: LayerKV, attention: UnionAttention
    ) -> Tensor:
        """Stores the step's rows and attends. ``x`` is ``[T, hidden_size]``, as is the result."""
        width, num_heads, ops = self.config.width, self.sinks.shape[0], self.ops
        latent, row, *others = self.into(x).split_with_sizes(self.sizes, 1)
        ups = self.query_up(self.query_norm(latent))
        heads = ups[:, : num_heads * width].reshape(-1, num_heads, width)
        q = self.store(heads, row, inputs, turns, kv, attention)
        sources = [attention.window_rows(inputs, kv, self.config.window, self.config.packed_row)]
        if self.compressor is not None:
            assert isinstance(kv, GroupedKV), type(kv)
            group, ratio = self.compressor.group, self.compressor.how.ratio
            seen = attention.history_rows(inputs, kv, group, ratio, self.config.packed_row)
            self.compressor(others[0], others[1], inputs, kv, seen, turns)
            sources.append(seen)
            if self.indexer is not None:
                keys = attention.history_rows(inputs, kv, INDEX, ratio, self.config.packed_key)
                self.indexer.compressor(others[2], others[3], inputs, kv, keys, turns)
                slots = self.indexer(ups[:, num_heads * width :], others[4], keys, turns)
                sources[-1] = ChosenRows(seen.pool, slots, seen.packed)
        found, _ = ops.attend(q, sources, self.sinks, width**-0.5, (turns.cos, turns.sin))
        return self.project(found)

    def project(self, found: Tensor) -> Tensor:
        """Projects the heads' outputs ``[T, num_heads, width]``, group by group, then all to ``[T, hidden_size]``."""
        num_tokens, (num_groups, rank, _) = found.shape[0], self.out_groups.shape
        made = found.new_empty((num_tokens, num_groups, rank))
        groups = found.view(num_tokens, num_groups, -1).transpose(0, 1)
        torch.bmm(groups, self.out_groups.mT, out=made.transpose(0, 1))
        return self.out(made.flatten(1))


def make_compressed_attention(
    config: ModelConfig, parameters: dict[str, Tensor], layer: int, norms: Ops
) -> CompressedSelfAttention:
    """Removes the parameters of the attention of one layer, counted from 0, from a decoder's, and makes it."""
    compressed, ours, eps = config.compressed, f"layers.{layer}.", config.norm_eps
    assert compressed is not None, config.architecture
    into, kind = parameters.pop(ours + "into"), compressed.kinds[layer]
    ops = compressed_ops_for(into.device)

    def make_compressor(group: str, prefix: str, num_series: int) -> Compressor:
        bias, norm = (parameters.pop(ours + prefix + name) for name in ("position_bias", "compressed_norm"))
        return Compressor(group, Compression(bias, norm, eps, num_series), ops)

    sizes = [compressed.query_rank, compressed.width]
    compressor = indexer = None
    if kind is LayerKind.HEAVY:
        compressor = make_compressor(HEAVY, "", 1)
        sizes += [compressed.width] * 2
    if kind is LayerKind.SPARSE:
        compressor = make_compressor(SPARSE, "", 2)
        indexer = Indexer(make_compressor(INDEX, "index_", 2), compressed.index_heads, compressed.index_topk)
        sizes += [2 * compressed.width] * 2 + [2 * compressed.index_width] * 2 + [compressed.index_heads]
    out_groups = parameters.pop(ours + "out_groups")
    return CompressedSelfAttention(
        into=Linear(into, norms),
        sizes=tuple(sizes),
        query_norm=RMSNorm(parameters.pop(ours + "query_latent_norm"), eps, norms),
        query_up=Linear(parameters.pop(ours + "query_up"), norms),
        row_norm=parameters.pop(ours + "row_norm"),
        sinks=parameters.pop(ours + "sinks"),
        out_groups=out_groups.view(compressed.num_groups, -1, out_groups.shape[1]),
        out=Linear(parameters.pop(ours + "out"), norms, is_after_attention=True),
        compressor=compressor,
        indexer=indexer,
        config=compressed,
        eps=eps,
        ops=ops,
    )
