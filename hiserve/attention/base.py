"""The protocol of an attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs, LayerKV


@dataclass(frozen=True, slots=True, eq=False)
class AttentionShape:
    """The attention of a model, as a backend needs it. Scores are scaled by ``head_dim ** -0.5``.

    Attributes:
        num_layers: Layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Elements per head.
        page_size: Tokens per page.
        dtype: Of queries, keys and values.
        windows: Of each layer: a token at position p attends to positions above p - window. Empty is none anywhere.
        sinks: Of each layer: float32 ``[num_heads]``, a score that takes part in the softmax and gives nothing. Empty is
            none anywhere.
        hides_first: No token attends to position 0, whose slot may never have been written.
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

    @property
    def distinct_windows(self) -> tuple[int | None, ...]:
        """The different windows of the layers."""
        return tuple(dict.fromkeys(self.windows)) or (None,)

    def window(self, layer: int) -> int | None:
        """Returns the window of a layer."""
        return self.windows[layer] if self.windows else None


def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of the generation that FlashInfer's fa3 is made for."""
    return torch.cuda.get_device_capability(device)[0] == 9


class Attention(Protocol):
    """Causal attention of a ragged batch over paged keys and values; or by a tree's mask over the new ones.

    Attributes:
        needs_host_lengths: It plans with ``q_lens`` and ``kv_bounds``, all of which must then be exact.
    """

    needs_host_lengths: bool

    def plan(self, inputs: ForwardInputs) -> None:
        """Prepares one step. Host work is allowed here, and only here."""

    def captured(self, num_rows: int, width: int) -> Attention | None:
        """Returns a backend for a graph of batches with so many rows of ``width`` tokens each; it may be itself.

        None if its plans allocate tensors, which a graph would read after they are freed: such steps run without a graph.
        The backend is planned once before the capture. One that needs host lengths is planned before each replay too,
        with inputs of the same tensors and other lengths.
        """

    def ragged(self) -> Attention | None:
        """Returns a backend for graphs of batches whose rows have any number of tokens; it may be itself.

        It is planned once before each capture, with bounds of all lengths, where one row at least has many tokens, and
        reads ``qo_indptr``, ``kv_lens`` and ``page_table`` in each replay. Rows may have no tokens then, but
        the length 1 and a first page. None if it has no such backend.
        """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, layer: int, out: Tensor | None = None) -> Tensor:
        """Attends: token t of a row attends to the row's positions up to its own. A graph can hold it.

        Args:
            q: ``[T, num_heads, head_dim]``. Head h reads KV head ``h // (num_heads / num_kv_heads)``.
            k: ``[T, num_kv_heads, head_dim]``. This step's keys, which already stand in their slots.
            v: Like ``k``.
            kv: The layer's pool.
            layer: Index of the layer.
            out: Contiguous, of the result's shape; written and returned if given.

        Returns:
            ``[T, num_heads, head_dim]``. Nothing in it depends on a slot outside the row; zeros where a token attends to none.
        """
