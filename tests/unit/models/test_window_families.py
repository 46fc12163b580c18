"""Gemma-3: config.json and weights; the forward is compared with transformers in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hiserve.core.activation import GELU_TANH
from hiserve.errors import ModelError
from hiserve.models.model_config import read_model_config
from hiserve.models.weights import load_parameters
from tests.helpers.checkpoint_folder import folder
from tests.helpers.models import load_transformers, save_family

GEMMA: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": None}


def refusal(place: Path) -> str:
    with pytest.raises(ModelError) as refused:
        read_model_config(place)
    return refused.value.message


def test_what_a_gemma3_file_leaves_out_is_what_transformers_fills_in(tmp_path: Path) -> None:
    """Released multimodal files name few fields of the text model."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "gemma3_text"}}
    (tmp_path / "config.json").write_text(json.dumps(nested | {"torch_dtype": "bfloat16"}))
    found = read_model_config(tmp_path)
    assert (found.vocab_size, found.hidden_size, found.num_layers) == (262_208, 2304, 26)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (8, 4, 256)
    assert (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim) == (8, 4, 256)
    assert (found.context_length, found.norm_eps, found.dtype) == (131_072, theirs.rms_norm_eps, "bfloat16")
    assert found.windows == tuple(4096 if each == "sliding_attention" else None for each in theirs.layer_types)
    assert found.local_layers == {layer for layer in range(26) if found.windows[layer]}
    assert found.local_rope is not None
    assert (found.rope.theta, found.local_rope.theta) == (1e6, 1e4)
    assert (found.tie_embeddings, found.score_scalar, found.activation) == (True, 256, GELU_TANH)
    assert (found.embedding_scale, found.logit_cap, found.norm_offset) == (2304**0.5, None, 1.0)
    assert (found.eos_token_ids, found.bos_token_id) == ((1,), 2)


def test_layers_keep_their_rotation_where_no_request_outgrows_the_window(tmp_path: Path) -> None:
    found = read_model_config(folder(tmp_path, **GEMMA, sliding_window=512, sliding_window_pattern=3))
    assert found.windows == () and found.local_layers == {0, 1}


def test_one_rotation_for_all_layers_is_no_local_one(tmp_path: Path) -> None:
    found = read_model_config(folder(tmp_path, **GEMMA, rope_theta=1e4, sliding_window=16))
    assert (found.local_rope, found.local_layers) == (None, frozenset())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation gelu"),
        ({"text_config": [1]}, "text_config"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types of config.json has chunked_attention"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "odd"}}}, "'odd' is not supported yet. Supported:"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_local_base_freq": 1e30}, "rope_local_base_freq"),
        ({"query_pre_attn_scalar": float("inf")}, "query_pre_attn_scalar"),
        ({"final_logit_softcapping": 1e30}, "final_logit_softcapping"),
        ({"rms_norm_eps": 1e-320}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e30}, "rms_norm_eps"),
    ],
)
def test_a_field_that_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(folder(tmp_path, **GEMMA | changes))


@pytest.mark.parametrize("name", ["swiglu_alpha", "swiglu_limit"])
@pytest.mark.parametrize("value", [None, 0, -7.0, 1e30, float("inf"), float("nan"), "7"])
def test_a_constant_that_experts_of_gpt_oss_need_is_a_number(tmp_path: Path, name: str, value: Any) -> None:
    assert name in refusal(folder(tmp_path, architectures=["GptOssForCausalLM"], **{name: value}))


@pytest.mark.parametrize(
    ("field", "value", "supported"),
    [
        ("dspark_block_size", 5, "heads that draft one token after another are supported"),
        ("compress_ratios", [0, 4, 128], "a row for each token are supported"),
        ("index_topk", 2048, "attention to all tokens is supported"),
    ],
)
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Gemma3ForCausalLM"])
def test_a_part_that_would_be_left_out_is_named_with_what_is_supported(
    tmp_path: Path, family: str, field: str, value: Any, supported: str
) -> None:
    message = refusal(folder(tmp_path, architectures=[family], **{field: value}))
    assert f"{family} with {field} is not supported yet" in message and supported in message
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {field: value}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert field in refusal(tmp_path)


def test_fields_of_gemma_mean_nothing_elsewhere(tmp_path: Path) -> None:
    plain = read_model_config(folder(tmp_path))
    fields = {"hidden_activation": "gelu", "query_pre_attn_scalar": 7, "final_logit_softcapping": 3.0}
    assert read_model_config(folder(tmp_path, **fields, rope_local_base_freq=5.0, sliding_window_pattern=2)) == plain


def test_parameters_are_counted_as_transformers_counts_them(tmp_path: Path) -> None:
    place = save_family("gemma3_text", tmp_path)
    oracle = load_transformers(place, torch.float32)
    assert read_model_config(place).num_params == sum(parameter.numel() for parameter in oracle.parameters())


def test_norms_of_a_16_bit_model_are_one_more_than_stored_and_not_rounded(tmp_path: Path) -> None:
    place = save_family("gemma3_text", tmp_path)
    config = read_model_config(place)
    tensors = load_file(place / "model.safetensors")
    stored = {name: tensor.bfloat16() * 0.013 for name, tensor in tensors.items()}
    save_file(stored, place / "model.safetensors")
    parameters = load_parameters(place, config, torch.bfloat16, torch.device("cpu"), "auto")
    weight = stored["model.layers.1.pre_feedforward_layernorm.weight"]
    found = parameters["layers.1.mlp_norm"]
    assert found.dtype == torch.float32 and torch.equal(found, 1 + weight.float())
    assert not torch.equal(found, found.bfloat16().float()), "the test would pass with rounded norms"
    assert parameters["layers.1.down"].dtype == torch.bfloat16
    dummies = load_parameters(place, config, torch.bfloat16, torch.device("cpu"), "dummy")
    assert torch.equal(dummies["layers.1.mlp_norm"], torch.ones(64)), "a norm of dummy weights is 1"


def test_a_tensor_of_images_is_no_error_and_an_unknown_one_is(tmp_path: Path) -> None:
    place = save_family("gemma3_text", tmp_path)
    config, device = read_model_config(place), torch.device("cpu")
    tensors = load_file(place / "model.safetensors") | {"vision_tower.post_layernorm.weight": torch.ones(2)}
    save_file(tensors, place / "model.safetensors")
    load_parameters(place, config, torch.float32, device, "auto")
    save_file(tensors | {"audio_tower.conv.weight": torch.ones(2)}, place / "model.safetensors")
    with pytest.raises(ModelError, match=r"has tensor audio_tower\.conv\.weight, which Gemma3ForCausalLM"):
        load_parameters(place, config, torch.float32, device, "auto")
