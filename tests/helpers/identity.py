"""Configurations with the identity of their model, as processes get them."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from hiserve.cache.storage.cache_identity import identify
from hiserve.cache.storage.segment import SHARED_MEMORY
from hiserve.config import Config
from hiserve.models.builtin_shapes import read_model


def identified(config: Config, directory: Path = SHARED_MEMORY) -> Config:
    """Identifies the model of a configuration; where the longest request is ``auto``, it is the model's context."""
    folder, model = read_model(config.model)
    if config.model.max_model_len == "auto":
        config = replace(config, model=replace(config.model, max_model_len=model.context_length))
    return identify(config, folder, model, directory)


def namespace_of(config: Config, directory: Path = SHARED_MEMORY) -> bytes:
    """Returns the namespace of a configuration's cache."""
    identity = identified(config, directory).identity
    assert identity is not None
    return identity.namespace
