"""What an attention backend must know of a model."""

from __future__ import annotations

from dataclasses import replace

import torch

from hiserve.attention.base import AttentionShape
from hiserve.models.draft_config import DraftConfig
from hiserve.models.model_config import ModelConfig


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


def draft_attention_shape(draft: DraftConfig, *, dtype: torch.dtype, page_size: int) -> AttentionShape:
    """As ``attention_shape``, of what drafts. A head has nothing to say of the first token: nobody shows it what was before."""
    return replace(attention_shape(draft.model, dtype=dtype, page_size=page_size), hides_first=draft.head is not None)
