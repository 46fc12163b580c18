"""Runs the model op by op."""

from __future__ import annotations

from collections.abc import Sequence

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
