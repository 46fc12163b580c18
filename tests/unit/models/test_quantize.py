"""The ``quantization_config`` of a checkpoint as it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hiserve.core.quantization import Quantization, QuantSpec
from hiserve.errors import ModelError
from hiserve.models.config_fields import ConfigFields
from hiserve.models.quantize import read_quantization, with_quantization

BLOCKS = QuantSpec(bits=8, kind="e4m3", group=(128, 128), activations="token")
FP4 = QuantSpec(bits=4, kind="e2m1", group=(1, 32))
TENSOR = QuantSpec(bits=8, kind="e4m3", group=(0, 0), activations="token")
FP8_FIELDS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

SCHEME: dict[str, Any] = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
INT: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ: dict[str, Any] = AWQ | {"quant_method": "gptq"}


def compressed(form: str = "float-quantized", *others: Any, **scheme: Any) -> dict[str, Any]:
    groups = dict(enumerate((SCHEME | scheme, *others)))
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def same(method: str, spec: QuantSpec, *ignored: str) -> Quantization:
    return Quantization(method, spec, spec, ignored)


@pytest.mark.parametrize(
    ("given", "architecture", "expert_dtype", "found"),
    [
        (None, "LlamaForCausalLM", None, None),
        ({}, "LlamaForCausalLM", None, None),
        (FP8_FIELDS, "DeepseekV3ForCausalLM", None, same("fp8", BLOCKS)),
        ({"quant_method": "fp8"}, "LlamaForCausalLM", None, same("fp8", TENSOR)),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["head"], "ignore": ["re:a", "b"]},
            "LlamaForCausalLM",
            None,
            same("modelopt", TENSOR, "re:a", "b", "head"),
        ),
        (compressed(), "LlamaForCausalLM", None, same("compressed-tensors", QuantSpec(8, "e4m3", (1, 0)))),
        (
            compressed(input_activations={"num_bits": 8, "type": "float"}),
            "LlamaForCausalLM",
            None,
            same("compressed-tensors", QuantSpec(8, "e4m3", (1, 0), "token")),
        ),
        (
            compressed("pack-quantized", weights=INT | {"symmetric": False}),
            "LlamaForCausalLM",
            None,
            same("compressed-tensors", QuantSpec(4, "uint", (1, 64))),
        ),
        (
            AWQ | {"checkpoint_format": "gptq_v2"},
            "LlamaForCausalLM",
            None,
            same("awq", QuantSpec(4, "uint", (1, 128))),
        ),
        (GPTQ, "LlamaForCausalLM", None, same("gptq", QuantSpec(4, "int", (1, 128)))),
        (
            GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
            "LlamaForCausalLM",
            None,
            same("gptq_v2", QuantSpec(4, "uint", (1, 128))),
        ),
        (
            GPTQ | {"dynamic": {r"-:.*\.gate$": {}, "-:lm_head": {}}},
            "LlamaForCausalLM",
            None,
            same("gptq", QuantSpec(4, "int", (1, 128)), r"re:.*\.gate$", "re:lm_head"),
        ),
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
        (FP8_FIELDS | {"ignore": ["re:("]}, r"re:\(.*without an end.* a regular expression of"),
        (compressed(weights=[1]), r"config_groups.weights \[1\] .* an object is"),
        (compressed(input_activations="x"), "input_activations x .* an object"),
        (compressed("float-quantized", SCHEME), "config_groups of 2 schemes .* one is"),
        (compressed(targets=["re:.*q_proj"]), "targets: targets "),
        (compressed(input_activations={"num_bits": 4, "type": "float"}), "input_activations.num_bits 4"),
        (compressed(weights={"num_bits": 8, "type": "float", "strategy": "group"}), "strategy group"),
        (
            compressed(weights=SCHEME["weights"] | {"strategy": "block", "block_structure": [64, 64]}),
            "block_structure ",
        ),
        (compressed("pack-quantized", weights=INT | {"num_bits": 8}), "weights.num_bits 8"),
        (compressed("pack-quantized", weights=INT, input_activations={"num_bits": 8}), "beside weights in 4 bits"),
        (AWQ | {"version": "gemv"}, "version gemv"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (AWQ | {"group_size": -1}, "group_size -1"),
        (GPTQ | {"bits": 8}, "bits 8"),
        (GPTQ | {"dynamic": {"-:lm_head": {}, "+:.*down": {"bits": 8}}}, "dynamic .* -: before each pattern is"),
        (GPTQ | {"dynamic": [1]}, "dynamic "),
        (GPTQ | {"dynamic": {"-:(": {}}}, "without an end"),
    ],
)
def test_what_is_not_supported_is_named(given: Any, fact: str) -> None:
    with pytest.raises(ModelError, match=fact) as refused:
        read_quantization(config(given), "LlamaForCausalLM")
    assert refused.value.param == "model"


def test_a_file_of_modelopt_alone_counts_where_config_json_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hf_quant_config.json"
    path.write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}'
    )
    raw = with_quantization({"hidden_size": 64}, tmp_path)
    assert raw["hidden_size"] == 64
    assert read_quantization(config(raw["quantization_config"]), "LlamaForCausalLM") == same(
        "modelopt", TENSOR, "lm_head"
    )
    assert with_quantization({"quantization_config": AWQ}, tmp_path) == {"quantization_config": AWQ}
    path.write_text('{"quantization": 5}')
    with pytest.raises(ModelError, match="quant_algo None"):
        read_quantization(config(with_quantization({}, tmp_path)["quantization_config"]), "LlamaForCausalLM")
    path.unlink()
    assert with_quantization({}, tmp_path) == {}


def test_modules_are_ignored_by_name_by_part_and_by_pattern() -> None:
    module = "model.layers.1.mlp.gate_proj"
    for pattern, found in {
        module: True,
        "mlp": True,
        "layers.1": True,
        "layers": True,
        "gate": False,
        "model.layers.10": False,
        "*.mlp.*": True,
        "model.layers.1*": True,
        "*.mlp": True,
        "*.attn*": False,
        "re:.*gate_proj$": True,
        "re:gate_proj": False,
    }.items():
        assert Quantization("fp8", BLOCKS, BLOCKS, ("x", pattern)).is_ignored(module) == found, pattern


def config(given: Any, expert_dtype: str | None = None) -> ConfigFields:
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), 1)
    others = {"intermediate_size": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 1}
    return ConfigFields(**sizes, **others, quantization_config=given, expert_dtype=expert_dtype)
