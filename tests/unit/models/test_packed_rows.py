"""DeepSeek-V4 as it is released: FP8 matrices with scales of blocks, 4-bit experts with scales of groups, all unpacked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.models import staging
from hiserve.models.model_config import read_model_config
from hiserve.models.weights import load_parameters
from tests.helpers.packed_models import save_released
from tests.helpers.quantized import values_of

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_released(tmp_path_factory.mktemp("released"))


@pytest.fixture
def folder(released: Path, tmp_path: Path) -> Path:
    """The tests' own, to break."""
    return shutil.copytree(released, tmp_path, dirs_exist_ok=True)


def load(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    found = load_parameters(folder, read_model_config(folder), dtype, torch.device("cpu"), "auto")
    return {name: values_of(each, dtype) for name, each in found.items()}


def test_what_was_packed_is_what_it_stands_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for staged_bytes in (1, 1 << 30):
        monkeypatch.setattr(staging, "MAX_STAGED_BYTES", staged_bytes)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            ours, theirs = load(folder, dtype), load(folder / "plain", dtype)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), (staged_bytes, dtype)


EXPERT = "model.layers.2.ffn.experts.3.w2."


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda tensors: tensors.pop(EXPERT + "scale"), r"experts.3.down_proj.weight .* lacks them"),
        (
            lambda tensors: tensors.update({EXPERT + "scale": tensors[EXPERT + "scale"].float()}),
            r"experts.3.down_proj.weight .* has F32 \[64, 1\]",
        ),
        (
            lambda tensors: tensors.update({EXPERT + "weight": tensors[EXPERT + "weight"][:, :8].clone()}),
            r"experts.3.down_proj.weight has shape \[64, 8\]; config.json asks for \[64, 16\]",
        ),
        (
            lambda tensors: tensors.pop("model.layers.2.attn.wq_a.scale"),
            r"self_attn.q_a_proj.weight holds F8_E4M3, and .* lacks its scales",
        ),
    ],
)
def test_what_is_missing_is_named(folder: Path, change: Callable[[dict[str, Tensor]], object], fact: str) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)
    with pytest.raises(ModelError, match=fact):
        load(folder, torch.float32)
