"""Weights that are read through pinned buffers are those that the CPU reads, converted or not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hiserve.models import weights
from hiserve.models.model_config import NANO, find_model, read_model_config
from hiserve.models.reading import plan_chunks
from hiserve.models.weights import load_parameters

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("piece_bytes", [1 << 12, 16 << 20])
def test_parameters_on_the_device_are_those_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece_bytes: int
) -> None:
    """Pieces of 4 KiB use each buffer hundreds of times: one that is read into before it was copied shows."""
    monkeypatch.setattr(weights, "plan_chunks", lambda wanted: plan_chunks(wanted, piece_bytes))
    folder = Path(shutil.copytree(find_model(NANO), tmp_path / "model"))
    config = read_model_config(folder)
    wanted = load_parameters(folder, config, dtype, torch.device("cpu"), "auto")
    for _ in range(5):
        found = load_parameters(folder, config, dtype, torch.device("cuda"), "auto")
        assert found.keys() == wanted.keys()
        for name, parameter in found.items():
            assert torch.equal(parameter.cpu(), wanted[name]), name
