"""Layers with recurrent states, as config.json describes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.errors import ConfigError, ModelError
from hiserve.models.builtin_shapes import read_model
from hiserve.models.decoder import attention_shape
from hiserve.models.delta_config import INPUTS, STATE
from hiserve.models.gated_attention import paired_halves
from hiserve.models.model_config import ModelConfig, read_model_config
from tests.helpers.settings import make_options

FIELDS: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


def read(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))
    return read_model_config(folder)


def test_every_fourth_layer_has_attention_by_default(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.delta is not None
    assert config.delta.layers == {0, 1, 2, 4, 5, 6}
    assert config.num_attention_layers == 2
    assert (config.rotary_dim, config.delta.conv_width) == (4, 4)
    assert attention_shape(config, dtype=torch.float32, page_size=4).first_layer == 3
    kinds = ["linear_attention", "full_attention"] * 4
    assert read(tmp_path, layer_types=kinds) == read(tmp_path, full_attention_interval=2)


def test_layers_lie_in_the_groups_of_their_kind(tmp_path: Path) -> None:
    plan = read(tmp_path).cache_plan("bfloat16", frees_windows=True, max_draft=5)
    assert plan.layers[2:5] == ((STATE, 2), ("kv", 0), (STATE, 3))
    assert plan.beside[2:5] == (((INPUTS, 2),), (), ((INPUTS, 3),))
    kv, state, inputs = plan.groups
    assert (kv.num_layers, state.num_layers, inputs.num_layers) == (2, 6, 6)
    assert state.row_bytes == state.snapshot_bytes == 6 * 6 * 8 * 12 * 4
    width = 2 * 2 * 8 + 6 * 12 + 2 * 6
    assert (inputs.head_dim, inputs.ring, inputs.dtype) == (width, 3 + 5, "bfloat16")
    assert inputs.snapshot_bytes == 6 * 3 * width * 2


@pytest.mark.parametrize(
    ("dtype", "given", "kept"),
    [
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float64", "float64"),
        ("float64", "bfloat16", "float64"),
    ],
)
def test_states_have_the_type_of_the_settings_and_inputs_that_of_the_model(
    dtype: str, given: str, kept: str, tmp_path: Path
) -> None:
    read(tmp_path)
    _, config = read_model(make_options(model=str(tmp_path), state_dtype=given).model)
    _, state, inputs = config.cache_plan(dtype, frees_windows=True).groups
    assert (state.dtype, inputs.dtype) == (kept, dtype)
    carried = config.facts().carried
    assert carried is not None
    assert carried.row[dtype] == state.row_bytes + inputs.row_bytes
    assert carried.snapshot[dtype] == state.snapshot_bytes + inputs.snapshot_bytes


def test_a_type_of_states_is_refused_where_there_are_none() -> None:
    with pytest.raises(
        ConfigError, match=r"--state-dtype is bfloat16, but 'hiserve-nano' has no recurrent states. Leave it out"
    ) as refused:
        read_model(make_options(state_dtype="bfloat16").model)
    assert refused.value.param == "state_dtype"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layer_types": ["linear_attention"] * 8}, "no layer of full_attention"),
        ({"layer_types": ["full_attention"] * 8}, "no layer of linear_attention"),
        ({"layer_types": ["linear_attention", "mamba"] * 4}, "layer_types of config.json has mamba"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "names 2 layers, and num_hidden_layers is 8"),
        ({"attention_bias": True}, "attention_bias"),
        ({"linear_num_value_heads": 5}, "5 value heads are not a multiple of 2 key heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 is below 2"),
        ({"linear_key_head_dim": None}, "lack linear_key_head_dim"),
        ({"linear_value_head_dim": 2**20}, "linear_value_head_dim is 1048576"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2, and pairs of a head's 16 elements"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0, and"),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor is nan, and"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read(tmp_path, **fields)


def test_other_families_do_not_read_these_fields(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["LlamaForCausalLM"], max_position_embeddings=64, rms_norm_eps=1e-6)
    assert config.delta is None and not config.has_attention_gates
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        read(
            tmp_path,
            architectures=["LlamaForCausalLM"],
            max_position_embeddings=64,
            rms_norm_eps=1e-6,
            partial_rotary_factor=0.5,
        )


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 2), (8, 4), (8, 8), (12, 8)])
def test_elements_that_are_rotated_together_are_half_a_head_apart(head_dim: int, rotary_dim: int) -> None:
    order = paired_halves(head_dim, rotary_dim).tolist()
    assert sorted(order) == list(range(head_dim))
    half, turned = head_dim // 2, rotary_dim // 2
    for pair in range(half):
        both = order[pair], order[pair + half]
        assert both == (pair, pair + turned) if pair < turned else min(both) >= rotary_dim
