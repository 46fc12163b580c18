"""hiserve: an LLM serving engine whose cache, graphs and speculation compose."""

from __future__ import annotations

import importlib
from typing import Any

from hiserve.config.settings import Settings
from hiserve.core.request import SamplingParams, SpecParams
from hiserve.errors import HiserveError

__version__ = "0.1.0"
__all__ = ["LLM", "HiserveError", "SamplingParams", "Settings", "SpecParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads ``LLM`` (and torch behind it) when it is first used."""
    if name == "LLM":
        return importlib.import_module("hiserve.llm").LLM
    raise AttributeError(f"module 'hiserve' has no attribute {name!r}")
