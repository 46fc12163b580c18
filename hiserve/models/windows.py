"""Sliding windows of a model's layers, as its config.json gives them."""

from __future__ import annotations

from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields

_SLIDING = "sliding_attention"
_LAYER_TYPES = {"full_attention", "attention", _SLIDING}


def read_windows(fields: ConfigFields, context_length: int) -> tuple[int | None, ...]:
    """Returns the window of each layer: a token at position p sees positions above p - window. Empty is none anywhere.

    A window that no request outgrows changes nothing, and is none.

    Args:
        fields: With ``layer_types``, or ``max_window_layers`` full layers before the others; with neither all layers slide.
        context_length: Longest a request may get, in tokens.

    Raises:
        ModelError: Types of layers that are not supported, or that do not fit the other fields.
    """
    window = None if fields.use_sliding_window is False else fields.sliding_window
    slides = _which_slide(fields, window)
    if window is None or window >= context_length or not any(slides):
        return ()
    return tuple(window if each else None for each in slides)


def _which_slide(fields: ConfigFields, window: int | None) -> list[bool]:
    num_layers, types = fields.num_hidden_layers, fields.layer_types
    if types is None:
        return [layer >= (fields.max_window_layers or 0) for layer in range(num_layers)]
    if unknown := sorted(set(types) - _LAYER_TYPES):
        raise ModelError(f"layers of the type {', '.join(unknown)} are not supported yet.", param="model")
    nonsense = None
    if len(types) != num_layers:
        nonsense = f"layer_types names {len(types)} layers, and num_hidden_layers is {num_layers}"
    elif window is None and _SLIDING in types:
        nonsense = f"layer_types has {_SLIDING}, but there is no sliding_window, or use_sliding_window is false"
    if nonsense is not None:
        raise ModelError(f"config.json makes no sense: {nonsense}.", param="model")
    return [each == _SLIDING for each in types]
