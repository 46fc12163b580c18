"""The protocol of an attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs, LayerKV


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Shape of latent attention (``core.forward.LatentKV``); the scores of a head are ``scale`` times query by key."""

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Shape of an index: keys of ``width`` elements, by whose scores a token chooses the ``most`` tokens that it sees."""

    width: int
    most: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionShape:
    """Shape of a model's attention.

    Attributes:
        num_layers: Layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Elements per head.
        page_size: Tokens per page.
        dtype: Of queries, keys and values.
        windows: Of each layer: a token at position p sees positions above p - window. Empty is none anywhere.
        sinks: Of each layer: ``[num_heads]``, float32, or float64 for float64; a score that takes part in the softmax without a value. Empty is
            none anywhere.
        hides_first: No token sees position 0, whose slot may never have been written.
        latent: Of latent attention: its heads share one KV head of ``head_dim`` elements, queries have
            ``nope_dim + rope_dim`` and outputs ``value_dim``. None is grouped-query attention.
        score_scalar: Scores are scaled by its inverse square root; None is ``head_dim``.
        first_layer: The first layer with attention: what all layers share is made there, in each replay of a graph.
        segment: Keys whose sum is made before it is joined with others, in one order whatever the step: the bits of a
            token depend on its row alone. None is any order.
        index: Beside latents, chooses the tokens that a token sees; None where it sees all.
        packs_rows: The pool has keys and values, or latents, in 8 bits (``LayerKV.scales``, ``LatentKV.packed``).
        is_union: Layers attend over rows of several groups, which heads share as keys and values (``attention.union``).
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    windows: tuple[int | None, ...] = ()
    sinks: tuple[Tensor | None, ...] = ()
    hides_first: bool = False
    latent: LatentShape | None = None
    score_scalar: float | None = None
    first_layer: int = 0
    packs_rows: bool = False
    is_union: bool = False
    index: IndexShape | None = None
    segment: int | None = None

    @property
    def computes_padding(self) -> bool:
        """Whether outputs of tokens that belong to no row are written too."""
        return self.is_union or self.index is not None

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float((self.score_scalar or self.head_dim) ** -0.5)

    @property
    def out_dim(self) -> int:
        """Elements of a head's output."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def distinct_windows(self) -> tuple[int | None, ...]:
        """The different windows of the layers."""
        return tuple(dict.fromkeys(self.windows)) or (None,)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of the generation that FlashInfer's fa3 supports."""
    return torch.cuda.get_device_capability(device)[0] == 9


class Attention(Protocol):
    """Attention of a ragged batch over paged keys and values; causal, or by a tree mask over the new ones."""

    needs_host_lengths: bool  # ``plan`` reads ``q_lens`` and ``kv_bounds``, all of which must then be exact

    def plan(self, inputs: ForwardInputs) -> None:
        """Prepares one step. Only this method may compute on the host."""

    def captured(self, num_rows: int, width: int) -> Attention | None:
        """Returns a backend for graphs of batches of ``num_rows`` rows with ``width`` tokens each; it may be itself.

        None if a plan creates tensors that a graph would read after they are freed; such steps run without a graph. The
        result is planned once before the capture. One that needs host lengths is also planned before each replay, with
        inputs of the same tensors and other lengths.
        """

    def ragged(self) -> Attention | None:
        """Returns a backend for graphs of batches whose rows have any number of tokens, or None; it may be itself.

        It is planned once before each capture, with bounds of all lengths, where at least one row has many tokens, and
        reads ``qo_indptr``, ``kv_lens`` and ``page_table`` in each replay. A row without tokens then has length 1 and a
        first page.
        """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends: token t of a row sees the row's positions up to its own. Can be captured in a graph.

        Shapes under latent attention: ``AttentionShape.latent``, ``LatentKV``.

        Args:
            q: ``[T, num_heads, head_dim]``. Head h reads KV head ``h // (num_heads / num_kv_heads)``.
            k: ``[T, num_kv_heads, head_dim]``. This step's keys, which are already in their slots.
            v: Like ``k``.
            kv: The layer's pool.
            layer: Index of the layer.
            out: Contiguous, of the result's shape; written and returned if given.

        Returns:
            ``[T, num_heads, head_dim]``, independent of slots outside the row; zeros where a token sees no key.
        """


class LaterAttention(Attention, Protocol):
    """A backend whose kernels may still be compiling."""

    def is_ready(self) -> bool:
        """Whether it may plan; loads the kernels once they are compiled. Not to be called during a graph capture."""
