"""Settings of given values, on a machine that is always the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hiserve.cache.storage.cache_identity import identify
from hiserve.cache.storage.segment import SHARED_MEMORY
from hiserve.config.options import Options, flags, flat, make_options
from hiserve.config.settings import CacheIdentity, Settings
from hiserve.core.machine import GIB, Machine
from hiserve.core.resolve import resolve
from hiserve.core.step_memory import ModelFacts
from hiserve.models.builtin_shapes import read_model
from hiserve.models.draft_config import model_facts
from tests.helpers.model_facts import NANO

LAPTOP = Machine(cores=4, memory_bytes=16 * GIB, cuda_memory_bytes=(), shm_bytes=16 * GIB)
WITH_CUDA = replace(LAPTOP, cuda_memory_bytes=(80 * GIB,) * 8)
NO_HOST = CacheIdentity(namespace=bytes(16), page_bytes=2**50, shape=bytes(16), files=())


def settings_of(**values: Any) -> Settings:
    """Returns settings for fake workers: the values as they are, whether they fit each other or not, and no host segment."""
    settings = resolve(make_options(), NANO, LAPTOP).settings
    for name, value in flat(make_options(**values)).items():
        if value != "auto":
            section = flags()[name].section
            settings = replace(settings, **{section: replace(getattr(settings, section), **{name: value})})
    return replace(settings, identity=NO_HOST)


def identified(options: Options, directory: Path = SHARED_MEMORY) -> Settings:
    """Returns the settings of options, or those that are given, with the identity of their cache."""
    folder, model = read_model(options.model)
    if not isinstance(options, Settings):
        options = _resolved(options, model_facts(options, folder, model))
    return identify(options, folder, model, directory)


def namespace_of(options: Options, directory: Path = SHARED_MEMORY) -> bytes:
    """Returns the namespace of a server's cache."""
    return identified(options, directory).cache_identity.namespace


def _resolved(options: Options, model: ModelFacts) -> Settings:
    return resolve(options, model, WITH_CUDA if options.model.device == "cuda" else LAPTOP).settings
