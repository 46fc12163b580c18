"""The proposer that a configuration asks for."""

from __future__ import annotations

import torch

from hiserve.attention.backends import open_draft_attention
from hiserve.attention.base import Attention
from hiserve.cache.storage.device import DevicePool
from hiserve.config.settings import Settings
from hiserve.core.drafts import Proposer
from hiserve.kernels.draft_ops import draft_ops_for
from hiserve.models.draft_config import DraftConfig
from hiserve.models.draft_heads import DraftHead, draft_attention_shape
from hiserve.runners.device_rows import DeviceRows
from hiserve.spec.head import DraftPool, HeadProposer
from hiserve.spec.ngram import NgramProposer


def open_proposer(
    config: Settings, draft: DraftConfig | None, head: DraftHead | None, pool: DevicePool, rows: DeviceRows
) -> Proposer | None:
    """Returns what drafts, or None for plain decoding.

    Args:
        config: Resolved.
        draft: The checkpoint that drafts, if one does.
        head: Loaded from it.
        pool: With its groups.
        rows: The permanent rows.
    """
    ops = draft_ops_for(rows.device)
    if draft is None or head is None:
        return NgramProposer(rows.state, ops) if config.spec.spec == "ngram" else None
    (of_pages,) = pool.layers("boundary")
    boundary, marks = (each.view(rows.num_pages, -1) for each in (of_pages.k, of_pages.v))
    rows.is_drafted = marks[:, 0]
    return HeadProposer(
        head,
        DraftPool(
            layers=pool.layers("draft"),
            page_hidden=boundary[:, : head.feature_size],
            is_drafted=rows.is_drafted,
            taken_len=rows.taken_len,
            page_size=config.cache.page_size,
        ),
        _attention(config, draft, rows),
        rows.state,
        rows.sampling,
        rows.ops,
        ops,
    )


def _attention(config: Settings, draft: DraftConfig, rows: DeviceRows) -> Attention:
    dtype = getattr(torch, config.model.dtype)
    shape = draft_attention_shape(draft, dtype=dtype, page_size=config.cache.page_size)
    return open_draft_attention(config.runner.attention_backend, shape, rows.device)
