"""The ``quantization_config`` of a checkpoint as it is read."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.core.quantization import Quantization, QuantSpec
from hiserve.models.config_fields import ConfigFields
from hiserve.models.quantize import read_quantization

BLOCKS = QuantSpec(bits=8, kind="e4m3", group=(128, 128), activations="token")
FP4 = QuantSpec(bits=4, kind="e2m1", group=(1, 32))
FP8_FIELDS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("given", "architecture", "expert_dtype", "found"),
    [
        (None, "LlamaForCausalLM", None, None),
        ({}, "LlamaForCausalLM", None, None),
        (FP8_FIELDS, "DeepseekV3ForCausalLM", None, Quantization("fp8", BLOCKS, BLOCKS)),
        (FP8_FIELDS, "DeepseekV4ForCausalLM", "fp4", Quantization("fp8", BLOCKS, FP4)),
        ({"quant_method": "mxfp4"}, "GptOssForCausalLM", None, Quantization("mxfp4", None, FP4)),
    ],
)
def test_a_quantization_is_read(
    given: Any, architecture: str, expert_dtype: str | None, found: Quantization | None
) -> None:
    assert read_quantization(config(given, expert_dtype), architecture) == found


def config(given: Any, expert_dtype: str | None = None) -> ConfigFields:
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), 1)
    others = {"intermediate_size": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 1}
    return ConfigFields(**sizes, **others, quantization_config=given, expert_dtype=expert_dtype)
