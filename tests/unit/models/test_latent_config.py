"""Configurations of latent attention and of experts in groups: what is read, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hiserve.errors import ModelError
from hiserve.models.latent_config import LatentConfig
from hiserve.models.model_config import read_model_config
from tests.helpers.latent_models import SHAPE, YARN

DEEPSEEK = SHAPE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_scaling": YARN,
    "torch_dtype": "bfloat16",
}


def config(folder: Path, /, **changes: Any) -> Path:
    """Writes config.json; a change to ``...`` leaves the field out."""
    fields = {name: value for name, value in (DEEPSEEK | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_every_field_is_read(tmp_path: Path) -> None:
    found = read_model_config(config(tmp_path))
    scale = (16 + 8) ** -0.5 * (0.1 * 0.8 * math.log(8) + 1) ** 2
    assert found.latent == LatentConfig(
        rank=32, rope_dim=8, nope_dim=16, value_dim=12, query_rank=24, scale=scale, is_interleaved=True
    )
    assert (found.num_heads, found.num_kv_heads, found.head_dim, found.rotary_dim) == (4, 1, 40, 8)
    assert found.slot_elements == 3 * 40
    experts = found.experts
    assert experts is not None and experts.routing is not None
    assert (experts.num_experts, experts.num_per_token, experts.intermediate_size) == (8, 3, 40)
    assert (experts.dense_layers, experts.shared_size, experts.is_normalized) == ({0}, 40, True)
    assert (experts.routing.num_groups, experts.routing.num_chosen, experts.routing.scale) == (4, 2, 1.7)
    assert found.rope.attention_factor == pytest.approx((0.1 * math.log(8) + 1) / (0.1 * 0.8 * math.log(8) + 1))


@pytest.mark.parametrize(
    ("rope", "mscale"),
    [
        (YARN | {"mscale_all_dim": 0.0}, 1.0),
        ({"rope_type": "default", "rope_theta": 1e4, "mscale_all_dim": 1.0, "factor": 8.0}, 1.0),
        (YARN | {"factor": 1.0}, 1.0),
        (YARN | {"mscale_all_dim": 1.0}, 0.1 * math.log(8) + 1),
    ],
)
def test_scores_take_the_square_of_yarns_factor(tmp_path: Path, rope: dict[str, Any], mscale: float) -> None:
    latent = read_model_config(config(tmp_path, rope_scaling=rope)).latent
    assert latent is not None
    assert latent.scale == pytest.approx(24**-0.5 * mscale**2)


def test_queries_may_have_no_latent_and_heads_need_not_divide_the_width(tmp_path: Path) -> None:
    found = read_model_config(config(tmp_path, q_lora_rank=None, num_attention_heads=5, num_key_value_heads=5))
    assert found.latent is not None and found.latent.query_rank is None
    assert read_model_config(config(tmp_path, q_lora_rank=...)).latent != found.latent  # 1536, as in transformers


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"kv_lora_rank": ...}, "lacks kv_lora_rank"),
        ({"qk_nope_head_dim": ..., "v_head_dim": None}, "lacks qk_nope_head_dim, v_head_dim"),
        ({"attention_bias": True}, "attention_bias is not supported yet; without biases it is"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"kv_lora_rank": 31}, "kv_lora_rank 31 is odd"),
        ({"scoring_func": "softmax"}, "scoring_func softmax"),
        ({"topk_method": "greedy"}, "topk_method greedy"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"n_group": 3}, "8 experts do not divide into 3 groups of two or more"),
        ({"n_group": 8}, "8 experts do not divide into 8 groups of two or more"),
        ({"topk_group": 5}, "topk_group 5 is more than n_group 4"),
        ({"topk_group": 1}, "3 experts per token are more than 1 of 4 groups have"),
        ({"n_routed_experts": 8, "num_experts": 4}, "n_routed_experts and num_experts differ"),
        ({"routed_scaling_factor": 1e30}, "routed_scaling_factor"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
        ({"rope_scaling": YARN | {"mscale_all_dim": float("inf")}}, "rope_parameters.mscale_all_dim"),
        ({"kv_lora_rank": 2**20}, "kv_lora_rank is 1048576, and the most is 65536"),
        ({"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["dense"]}, "names 1 layers"),
        (
            {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["hash", "dense", "sparse"]},
            "names hash; only sparse and dense are supported",
        ),
    ],
)
def test_a_model_that_we_would_compute_wrongly_is_refused(tmp_path: Path, changes: dict[str, Any], fact: str) -> None:
    with pytest.raises(ModelError) as refused:
        read_model_config(config(tmp_path, **changes))
    assert fact in refused.value.message
    assert refused.value.param == "model"
