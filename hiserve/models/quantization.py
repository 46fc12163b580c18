"""Quantized checkpoints, without torch: which are read. Their weights are of the model's type afterwards."""

from __future__ import annotations

from typing import Any

from hiserve.errors import ModelError
from hiserve.models.family import FAMILIES

BLOCK = 128  # rows and columns of a matrix that share a scale
_FP8 = "fp8"  # of any family
_FP8_FIELDS = {"weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}


def refuse_quantization(given: Any, architecture: str) -> None:
    """Checks the ``quantization_config`` of a checkpoint, if it has one.

    Raises:
        ModelError: Weights in it are stored in a way that is not supported.
    """
    fields = given if isinstance(given, dict) else {}
    method = fields.get("quant_method") if isinstance(given, dict) else given
    if not given or (isinstance(method, str) and method in FAMILIES[architecture].quantizations):
        return
    if method != _FP8:
        known = [f"{each} ({name})" for name, family in FAMILIES.items() for each in sorted(family.quantizations)]
        raise ModelError(
            f"{architecture} with quantization_config of the quant_method {method} is not supported yet. Supported: "
            f"{', '.join(known)}, {_FP8}, and weights that are not quantized.",
            param="model",
        )
    for name, value in _FP8_FIELDS.items():
        found = fields.get(name, "e4m3" if name == "fmt" else None)
        if found != value:
            raise ModelError(
                f"{architecture} with quantization_config of {name} {found} is not supported yet; {value} is.",
                param="model",
            )
