"""The facts in which all ranks of a group must agree before they serve."""

from __future__ import annotations

import sys

import torch

from hiserve.config.settings import Settings
from hiserve.engine.executing_half import LoadedHalf


def facts_of(settings: Settings, half: LoadedHalf) -> dict[str, str]:
    """Returns them, each by its name for messages."""
    cuda = settings.model.device == "cuda"
    return {
        "model and draft": settings.cache_identity.shape.hex(),
        "bytes of a page": str(half.pool.num_bytes // settings.cache.kv_pages),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        "Python": sys.version.split()[0],
    }
