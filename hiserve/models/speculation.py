"""Who drafts for a model, what its pages hold for that, and what ``core.resolve`` must know of both."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hiserve.config import Config
from hiserve.core.kv_groups import CacheGroupSpec, debug_groups, page_hidden_group
from hiserve.core.resolve import DraftFacts, ModelFacts
from hiserve.errors import ConfigError
from hiserve.models.draft_config import DraftConfig, DraftKind, find_draft
from hiserve.models.model_config import ModelConfig

_KINDS: dict[str, DraftKind] = {"eagle3": "eagle3", "mtp": "mtp", "draft": "draft_model"}


def read_draft(config: Config, folder: Path, model: ModelConfig) -> DraftConfig | None:
    """Returns the checkpoint that drafts; None where nothing does, or something that needs none.

    Args:
        config: Says whom to read; ``auto`` is what came with the model, if anything did and the model has its weights.
        folder: Of the model.
        model: Its shape.

    Raises:
        ConfigError: There is no such proposer.
        ModelError: The checkpoint cannot be used, or does not fit the model.
    """
    asked = config.spec.spec
    name, _, source = asked.partition(":")
    if asked in ("off", "ngram"):
        return None
    if asked == "auto":
        if config.model.load_format == "dummy":
            return None  # a head knows nothing of drawn weights
        bundled: DraftKind | None = "mtp" if model.num_mtp_layers else None
        if (folder / "eagle3" / "config.json").is_file():
            bundled = "eagle3"
        return None if bundled is None else find_draft(bundled, None, folder, model)
    if name not in _KINDS or (":" in asked and not source) or (name == "draft" and not source):
        raise ConfigError(
            f"--spec is {asked!r}. Use off, auto, ngram, eagle3, mtp, eagle3:PATH, mtp:PATH or draft:PATH.",
            param="spec",
        )
    return find_draft(_KINDS[name], source or None, folder, model)


def page_groups(config: Config, model: ModelConfig, draft: DraftConfig | None) -> tuple[CacheGroupSpec, ...]:
    """Returns the groups of a page: the model's, those of what drafts, and those for debugging.

    Args:
        config: Resolved.
        model: The model's shape.
        draft: As ``read_draft`` returns it.
    """
    dtype, drafts = config.model.dtype, tuple[CacheGroupSpec, ...]()
    if draft is not None:
        drafts = (*draft.kv_groups(dtype), page_hidden_group(draft.feature_size, config.cache.page_size, dtype))
    return (*model.kv_groups(dtype), *drafts, *debug_groups(config))


def model_facts(config: Config, folder: Path, model: ModelConfig) -> ModelFacts:
    """Returns what ``core.resolve`` must know of a model and of what drafts for it.

    Raises:
        ConfigError, ModelError: As ``read_draft``.
    """
    draft = read_draft(config, folder, model)
    if draft is None:
        return model.facts()
    shape = draft.model
    facts = DraftFacts(
        kind=draft.kind,
        num_params=draft.num_params,
        slot_elements=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim,
        step=draft.memory_shape(model.hidden_size),
    )
    return msgspec.structs.replace(model.facts(), draft=facts)
