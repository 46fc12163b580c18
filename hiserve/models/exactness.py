"""What a model may have whose sums depend on the batch, without torch."""

from __future__ import annotations

from hiserve.models.model_config import ModelConfig

ROW_ELEMENTS = 8  # of which rows of projections are a multiple: the copy engine loads 16 bytes


def inexact_part(model: ModelConfig) -> str | None:
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
