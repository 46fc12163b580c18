"""The ``quantization_config`` of a checkpoint as it is read."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.core.quantization import Quantization, QuantSpec
from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields
from hiserve.models.quantize import read_quantization

BLOCKS = QuantSpec(bits=8, kind="e4m3", group=(128, 128), activations="token")
FP4 = QuantSpec(bits=4, kind="e2m1", group=(1, 32))
FP8_FIELDS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

SCHEME: dict[str, Any] = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}


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


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        (FP8_FIELDS | {"ignore": 5}, "ignore 5 .* a list of names is"),
        (FP8_FIELDS | {"ignore": "lm_head"}, "ignore lm_head .* a list of names is"),
        (FP8_FIELDS | {"ignore": ["re:("]}, r"re:\(.* a regular expression is"),
        (
            COMPRESSED | {"config_groups": {"0": SCHEME | {"weights": [1]}}},
            r"config_groups.weights \[1\] .* an object is",
        ),
        (
            COMPRESSED | {"config_groups": {"0": SCHEME | {"input_activations": "x"}}},
            "input_activations x .* an object",
        ),
    ],
)
def test_a_field_of_another_type_is_named(given: Any, fact: str) -> None:
    with pytest.raises(ModelError, match=fact) as refused:
        read_quantization(config(given), "LlamaForCausalLM")
    assert refused.value.param == "model"


def config(given: Any, expert_dtype: str | None = None) -> ConfigFields:
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), 1)
    others = {"intermediate_size": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 1}
    return ConfigFields(**sizes, **others, quantization_config=given, expert_dtype=expert_dtype)
