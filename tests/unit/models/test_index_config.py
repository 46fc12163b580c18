"""Configurations of an index beside latents: what is read, what the families fill in, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from hiserve.errors import ModelError
from hiserve.models.index_config import IndexConfig
from hiserve.models.model_config import ModelConfig, read_model_config
from tests.helpers.latent_models import SHAPE, YARN

COMMON: dict[str, Any] = SHAPE | {"rms_norm_eps": 1e-6, "n_group": 4, "topk_group": 2, "torch_dtype": "bfloat16"}
DEEPSEEK: dict[str, Any] = COMMON | {"architectures": ["DeepseekV32ForCausalLM"], "rope_scaling": YARN}
GLM: dict[str, Any] = COMMON | {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 6}


def read(folder: Path, /, fields: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return read_model_config(folder)


def refusal(folder: Path, /, fields: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ModelError) as refused:
        read(folder, fields, **changes)
    assert refused.value.param == "model"
    return refused.value.message


def test_what_files_leave_out_is_what_transformers_fills_in(tmp_path: Path) -> None:
    left_out = {
        "n_group",
        "topk_group",
        "q_lora_rank",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    }
    for family, fields, is_interleaved in (("deepseek_v32", DEEPSEEK, False), ("glm_moe_dsa", GLM, True)):
        found = read(tmp_path, {n: value for n, value in fields.items() if n not in left_out}, num_hidden_layers=6)
        theirs: Any = AutoConfig.for_model(family, num_hidden_layers=found.num_layers)
        index = found.index
        assert index == IndexConfig(
            query_rank=theirs.q_lora_rank,
            num_heads=theirs.index_n_heads,
            width=theirs.index_head_dim,
            most=theirs.index_topk,
            is_interleaved=is_interleaved,
            layers=tuple(range(found.num_layers)),
        )
        experts, routing = found.experts, found.experts and found.experts.routing
        assert experts is not None and routing is not None and found.latent is not None
        assert (experts.num_experts, experts.num_per_token) == (theirs.n_routed_experts, theirs.num_experts_per_tok)
        assert experts.intermediate_size == theirs.moe_intermediate_size
        assert (routing.num_groups, routing.num_chosen) == (theirs.n_group, theirs.topk_group)
        assert experts.dense_layers == {layer for layer, kind in enumerate(theirs.mlp_layer_types) if kind == "dense"}
        assert found.latent.is_interleaved


@pytest.mark.parametrize(
    "fields",
    [
        {"indexer_types": ["full", "shared", "shared", "full", "shared", "full"]},
        {"index_topk_pattern": "FSSFSF"},
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 4},
        {"index_topk_freq": 0},
    ],
)
def test_layers_that_choose_are_those_of_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    theirs: Any = AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=6, **fields)
    index = read(tmp_path, GLM, **fields).index
    assert index is not None
    assert index.layers == tuple(layer for layer, kind in enumerate(theirs.indexer_types) if kind == "full")
    deepseek = read(tmp_path, DEEPSEEK, **fields).index  # whose layers all choose
    assert deepseek is not None and deepseek.layers == (0, 1, 2)


def test_a_token_stores_a_latent_of_each_layer_and_a_key_of_those_that_choose(tmp_path: Path) -> None:
    found = read(tmp_path, GLM, indexer_types=["full", "shared", "shared", "full", "shared", "full"], index_head_dim=16)
    rows, keys = found.kv_groups("bfloat16")
    assert (rows.slot_bytes, keys.slot_bytes) == (6 * 40 * 2, 3 * 16 * 2)
    assert rows.slot_bytes + keys.slot_bytes == found.facts().slot_elements * 2
    plan = found.cache_plan("bfloat16", frees_windows=True)
    assert plan.beside == ((("index", 0),), (), (), (("index", 1),), (), (("index", 2),))
    assert found.facts().step.index_ratio == 1


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 8"),
        ({"index_n_heads": 5000}, "index_n_heads is 5000, and the most is 4096"),
        ({"index_topk": 0}, "index_topk"),
        ({"q_lora_rank": None}, "q_lora_rank is null"),
        ({"indexer_types": ["shared"] + ["full"] * 5}, "the first layer takes the choice of a layer before it"),
        ({"indexer_types": ["full"] * 5}, "5 layers have an indexer's type, and num_hidden_layers is 6"),
        ({"index_topk_pattern": "FSSFSX"}, "indexers of the types X, full, shared; full and shared are supported"),
        ({"index_topk_freq": -1}, "index_topk_freq"),
        ({"compress_ratios": [4]}, "compress_ratios is not supported yet"),
    ],
)
def test_an_index_that_makes_no_sense_is_named(tmp_path: Path, changes: dict[str, Any], fact: str) -> None:
    assert fact in refusal(tmp_path, GLM, **changes)
