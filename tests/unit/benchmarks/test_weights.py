"""The benchmark of reading weights, at a size for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import weights
from hiserve.models.builtin_shapes import SHAPES
from hiserve.models.model_config import ModelConfig
from hiserve.models.weights import load_parameters

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setitem(SHAPES, "llama-8b", SHAPES["llama-8b"] | TINY)
    monkeypatch.setattr(weights, "SHARD_BYTES", 1 << 19)
    return weights.make_checkpoint(tmp_path, 0.002)


def test_a_machine_without_triton_runs_it() -> None:
    program = "import sys; sys.modules['triton'] = None; import benchmarks.weights"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])


def test_the_checkpoint_is_one_that_is_served(tmp_path: Path, checkpoint: ModelConfig) -> None:
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(tmp_path.glob("*.safetensors"))) > 2
    parameters = load_parameters(tmp_path, checkpoint, torch.bfloat16, torch.device("cpu"), "auto")
    assert sum(parameter.numel() for parameter in parameters.values()) == checkpoint.num_params


def test_every_way_is_measured_cold_and_cached(tmp_path: Path, checkpoint: ModelConfig) -> None:
    found = weights.measure(tmp_path, checkpoint, torch.device("cpu"), 2)
    for state in ("cold", "cached"):
        assert {way: len(samples) for way, samples in found[state].items()} == dict.fromkeys(
            ("dd", "fresh", "hiserve"), 2
        )
    assert found["files"] > 2
