"""A model that cannot be captured."""

from __future__ import annotations

from typing import Any, Literal


class Breaking:
    """Asks the device for a number in steps of so many tokens, or raises when one of them is captured.

    Args:
        model: Computes.
        num_tokens: Of the steps that break.
        how: What they do.
    """

    def __init__(self, model: Any, num_tokens: int, how: Literal["syncs", "raises"] = "syncs") -> None:
        self._model = model
        self._num_tokens = num_tokens
        self._how = how
        self._num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: Any, layers: Any, attention: Any) -> Any:
        self._break(inputs)
        return self._model.forward(inputs, layers, attention)

    def trunk(self, inputs: Any, layers: Any, attention: Any, features: Any = None) -> Any:
        self._break(inputs)
        return self._model.trunk(inputs, layers, attention, features)

    def _break(self, inputs: Any) -> None:
        if inputs.input_ids.shape[0] == self._num_tokens:
            self._num_calls += 1
            if self._how == "syncs":
                inputs.positions.max().item()
            elif self._num_calls == 2:  # the first one warms up
                raise RuntimeError("no such kernel")
