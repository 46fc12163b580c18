"""What an attention backend must know of a model."""

from __future__ import annotations

import torch

from hiserve.attention.base import AttentionShape
from hiserve.models.config import ModelConfig


def attention_shape(config: ModelConfig, *, dtype: torch.dtype, page_size: int) -> AttentionShape:
    """Returns the shape of the attention in every layer.

    Args:
        config: Of the model.
        dtype: Of queries, keys and values.
        page_size: Tokens per page.
    """
    return AttentionShape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        windows=config.windows,
    )
