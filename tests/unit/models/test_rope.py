"""RoPE scalings: every kind bit for bit as transformers computes it, and the numbers that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hiserve.errors import ModelError
from hiserve.kernels import reference
from hiserve.layers import Rotary
from hiserve.models.frequencies import rotary_frequencies
from hiserve.models.model_config import read_model_config
from tests.helpers.checkpoint_folder import folder

HEAD_DIM = 24
LISTS = {"short_factor": [1.0 + 0.3 * i for i in range(12)], "long_factor": [2.0 + i for i in range(12)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.7},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama 3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3 of a short context": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 100,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn without an original context": {"rope_type": "yarn", "factor": 4.0},
    "yarn without a factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 100},
    "yarn that shrinks": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 512},
    "yarn with its bounds": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16,
        "beta_slow": 2.5,
        "truncate": False,
    },
    "yarn with an empty ramp": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 4.0,
        "beta_slow": 4.0,
        "truncate": False,
    },
    "yarn with an attention factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 0.8,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
    },
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 512, **LISTS},
    "longrope without a factor": {"rope_type": "longrope", "original_max_position_embeddings": 64, **LISTS},
    "longrope that does not stretch": {"rope_type": "longrope", **LISTS},
    "longrope with an attention factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
        **LISTS,
    },
}


def theirs(scaling: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=512, rope_parameters={"rope_theta": 3e4} | scaling)
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor_are_bitwise_those_of_transformers(tmp_path: Path, name: str) -> None:
    config = read_model_config(
        folder(tmp_path, head_dim=HEAD_DIM, rope_parameters={"rope_theta": 3e4} | SCALINGS[name])
    )
    expected = theirs(SCALINGS[name])
    got = rotary_frequencies(config.rope, HEAD_DIM, max_len=2)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected.inv_freq)
    assert config.rope.attention_factor == expected.attention_scaling
    positions = torch.tensor([0, 1, 17, 63])
    cos, sin = expected(torch.zeros(1, dtype=torch.float64), positions[None])
    rotation = Rotary(got, torch.float64, reference, config.rope.attention_factor)(positions)
    assert torch.equal(rotation.cos[:, 0], cos[0])
    assert torch.equal(rotation.sin[:, 0, HEAD_DIM // 2 :], sin[0, :, HEAD_DIM // 2 :])


@pytest.mark.parametrize("name", SCALINGS)
def test_older_spellings_say_the_same(tmp_path: Path, name: str) -> None:
    new = read_model_config(folder(tmp_path, head_dim=HEAD_DIM, rope_parameters={"rope_theta": 3e4} | SCALINGS[name]))
    for key in ("type", "rope_type"):
        old = dict(SCALINGS[name])
        old[key] = old.pop("rope_type")
        place = folder(tmp_path, ("rope_parameters",), head_dim=HEAD_DIM, rope_theta=3e4, rope_scaling=old)
        assert read_model_config(place) == new


def test_longrope_chooses_its_list_by_the_longest_request(tmp_path: Path) -> None:
    scaling = {"rope_theta": 3e4} | SCALINGS["longrope without a factor"]
    rope = read_model_config(folder(tmp_path, head_dim=HEAD_DIM, rope_parameters=scaling)).rope
    expected = theirs(scaling)
    for max_len, position in ((2, 1), (64, 63), (65, 64), (512, 511)):
        expected(torch.zeros(1), torch.tensor([[position]]))
        assert torch.equal(rotary_frequencies(rope, HEAD_DIM, max_len), expected.inv_freq)
    assert not torch.equal(rotary_frequencies(rope, HEAD_DIM, 64), rotary_frequencies(rope, HEAD_DIM, 65))


def test_dynamic_scaling_changes_nothing_within_the_context_that_is_served(tmp_path: Path) -> None:
    config = read_model_config(folder(tmp_path, rope_parameters={"rope_theta": 3e4} | SCALINGS["dynamic"]))
    assert config.rope.kind == "default"
    assert config.context_length == 512
    dynamic = theirs(SCALINGS["dynamic"])
    before = dynamic.inv_freq.clone()
    dynamic(torch.zeros(1), torch.tensor([[511]]))
    assert torch.equal(dynamic.inv_freq, before)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 1e6, "original_max_position_embeddings": 10**6}, 2**31 - 1),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, **LISTS}, 512),
    ],
)
def test_yarn_stretches_the_context_of_files_that_name_the_original_one(
    tmp_path: Path, scaling: dict[str, Any], context: int
) -> None:
    assert read_model_config(folder(tmp_path, head_dim=24, rope_parameters=scaling)).context_length == context


def test_an_original_context_outside_the_scaling_goes_first(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 99}
    found = read_model_config(folder(tmp_path, rope_parameters=scaling, original_max_position_embeddings=256))
    assert found.rope.original_context == 256


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "linear"}, "linear lacks factor"),
        ({"rope_type": "dynamic", "factor": None}, "dynamic lacks factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "lacks long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}, "must have 8 entries"),
        (
            {
                "rope_type": "longrope",
                "original_max_position_embeddings": 1,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8,
            },
            "2 or more",
        ),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "not below"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "more than 1"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_type": "linear", "factor": 1e30}, "rope_parameters.factor"),
        ({"rope_type": "linear", "factor": 1e-30}, "rope_parameters.factor"),
        ({"rope_type": "dynamic", "factor": float("inf")}, "rope_parameters.factor"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 1e30}, "rope_parameters.mscale"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": float("nan")}, "rope_parameters.beta_fast"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e30}, "rope_parameters.attention_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1e30}, "high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1e30] * 8, "long_factor": [1.0] * 8}, "short_factor"),
        ({"rope_theta": 1e30}, "rope_parameters.rope_theta"),
        ({"rope_theta": 1e-3}, "rope_parameters.rope_theta"),
        ({"rope_type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}, "short_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "original_max_position"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.0}, "attention_factor"),
        ({"rope_type": "nothing known"}, "'nothing known' is not supported yet. Supported: default, linear"),
    ],
)
def test_numbers_that_make_no_sense_are_named(tmp_path: Path, scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as refused:
        read_model_config(folder(tmp_path, rope_parameters=scaling))
    assert named in refused.value.message
    assert "\n" not in refused.value.message


def test_two_spellings_that_differ_are_refused(tmp_path: Path) -> None:
    place = folder(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(ModelError, match="rope_scaling and rope_parameters differ"):
        read_model_config(place)
    raw = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(raw | {"rope_scaling": raw["rope_parameters"]}))
    assert read_model_config(place).rope.kind == "default"
