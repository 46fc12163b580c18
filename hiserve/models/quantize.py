"""Reads ``quantization_config`` of a checkpoint, without torch."""

from __future__ import annotations

from hiserve.core.quantization import Quantization, QuantSpec
from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields
from hiserve.models.family import FAMILIES

BLOCK = 128  # rows and columns of a matrix that share a scale
_FP8 = "fp8"  # of any family
_FP8_FIELDS = {"weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
_MXFP4 = QuantSpec(bits=4, kind="e2m1", group=(1, 32))


def read_quantization(config: ConfigFields, architecture: str) -> Quantization | None:
    """Returns how a checkpoint quantizes its model; None if it does not. ``architecture`` is of a supported family.

    Raises:
        ModelError: Weights are stored in a way that is not supported.
    """
    given = config.quantization_config
    if not given:
        return None
    fields = given if isinstance(given, dict) else {}
    method = fields.get("quant_method") if isinstance(given, dict) else given
    if isinstance(method, str) and method in FAMILIES[architecture].quantizations:
        return Quantization(method, None, _MXFP4)
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
    spec = QuantSpec(bits=8, kind="e4m3", group=(BLOCK, BLOCK), activations="token")
    return Quantization(method, spec, _MXFP4 if config.expert_dtype == "fp4" else spec)
