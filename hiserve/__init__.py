"""hiserve: an LLM serving engine whose cache, graphs and speculation compose."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hiserve.config.settings import Settings
    from hiserve.core.request import SamplingParams, SpecParams
    from hiserve.errors import HiserveError

__version__ = "0.1.0"
__all__ = ["LLM", "HiserveError", "SamplingParams", "Settings", "SpecParams", "__version__"]
_HOMES = {
    "LLM": "hiserve.llm",
    "HiserveError": "hiserve.errors",
    "SamplingParams": "hiserve.core.request",
    "Settings": "hiserve.config.settings",
    "SpecParams": "hiserve.core.request",
}


def __getattr__(name: str) -> Any:
    """Loads a public name (and torch for ``LLM``) when it is first used: the package itself is imported at once."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hiserve' has no attribute {name!r}")
