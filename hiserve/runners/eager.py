"""The parts of a forward that run op by op: all of it, or what follows the last attention of a partial graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.forward import ForwardInputs, ForwardOutputs, LayerKV
from hiserve.models.decoder import Decoder


class EagerRunner:
    """Runs any batch.

    Args:
        model: The decoder.
        layers: The pool's views, one per layer of the model.
        attention: The backend.
    """

    def __init__(self, model: Decoder, layers: Sequence[LayerKV], attention: Attention) -> None:
        self._model = model
        self._layers = layers
        self._attention = attention

    @property
    def needs_host_lengths(self) -> bool:
        """Whether attention plans with lengths that the host must know exactly."""
        return self._attention.needs_host_lengths

    def run(self, inputs: ForwardInputs) -> ForwardOutputs:
        """Plans attention and computes the step."""
        self._attention.plan(inputs)
        return self._model.forward(inputs, self._layers, self._attention)


class LogitsHead:
    """Computes logits of as many tokens as some graph of a whole step does.

    Libraries choose kernels of products by their size, and load each at its first use: on an H200 27 ms for the tail of
    one step. The sizes of graphs are loaded when they are captured.

    Args:
        model: The decoder.
        sizes: Logits of graphs, ascending. Steps with more than the last have as many as they have.
    """

    def __init__(self, model: Decoder, sizes: tuple[int, ...] = ()) -> None:
        self._model = model
        self._sizes = sizes

    def finish(
        self, attn_out: Tensor, residual: Tensor, inputs: ForwardInputs, hidden_states: Tensor | None
    ) -> ForwardOutputs:
        """Computes what follows the last attention of a replay.

        Args:
            attn_out: ``[T, num_heads * head_dim]``, of the step's T tokens.
            residual: The graph's residual stream before the last attention, at least T tokens.
            inputs: Of the step.
            hidden_states: Of the graph, at least T tokens; None where the model has no ``aux_layers``.
        """
        if hidden_states is not None:
            hidden_states = hidden_states[: attn_out.shape[0]] if inputs.wants_hidden_states else None
        return ForwardOutputs(self.logits(attn_out, residual, inputs.logits_rows, hidden_states), hidden_states)

    def logits(self, attn_out: Tensor, residual: Tensor, logits_rows: Tensor, hidden_states: Tensor | None) -> Tensor:
        """As ``Decoder.logits``; the first token is computed again for each that a size has more."""
        count = logits_rows.shape[0]
        index = bisect_left(self._sizes, count)
        more = self._sizes[index] - count if count and index < len(self._sizes) else 0
        if more:
            logits_rows = F.pad(logits_rows, (0, more))
        return self._model.logits(attn_out, residual, logits_rows, hidden_states)[:count]
