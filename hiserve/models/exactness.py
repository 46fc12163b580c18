"""What a model may have whose sums depend on the batch, without torch."""

from __future__ import annotations

from typing import Protocol

ROW_ELEMENTS = 8  # of which rows of projections are a multiple: the copy engine loads 16 bytes


class _Model(Protocol):
    """What is read of a model's configuration."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def latent(self) -> object | None: ...
    @property
    def compressed(self) -> object | None: ...
    @property
    def delta(self) -> object | None: ...
    @property
    def quantization(self) -> object | None: ...


def inexact_part(model: _Model) -> str | None:
    """Returns what a model has that has no sums in one order (``--exact``), in words; None without."""
    sizes = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    parts = {
        "latent attention": model.latent is not None,
        "compressed rows": model.compressed is not None,
        "recurrent states": model.delta is not None,
        "weights in few bits": model.quantization is not None,
        f"inputs of other than a multiple of {ROW_ELEMENTS} elements": any(size % ROW_ELEMENTS for size in sizes),
    }
    return next((name for name, is_there in parts.items() if is_there), None)
