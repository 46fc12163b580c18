"""DeepSeek-V4 as it is released: FP8 matrices with scales of blocks, 4-bit experts with scales of groups, all unpacked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.models import packed_rows
from hiserve.models.model_config import read_model_config
from hiserve.models.weights import load_parameters
from tests.helpers.compressed_models import save_compressed

FILE = "model.safetensors"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DENSE = (".wq_a.", ".wq_b.", ".wkv.", ".wo_a.", ".wo_b.", "shared_experts.w1.", "shared_experts.w2.")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its dense matrices outside compressors are FP8, its experts packed; what they stand for lies in ``plain``."""
    save_compressed(tmp_path)
    generator = torch.Generator().manual_seed(6)
    tensors, plain = load_file(tmp_path / FILE), {}
    for name, tensor in load_file(tmp_path / FILE).items():
        plain[name] = tensor
        rows = tensor.shape[0]
        scale = name.removesuffix("weight") + "scale"
        if ".experts." in name:
            codes = torch.randint(0, 256, (rows, tensor.shape[1] // 2), generator=generator, dtype=torch.uint8)
            exponents = torch.randint(118, 126, (rows, tensor.shape[1] // 32), generator=generator, dtype=torch.uint8)
            tensors[name], tensors[scale] = codes.view(torch.int8), exponents.view(torch.float8_e8m0fnu)
            plain[name] = unpacked(codes, exponents)
        elif any(part in name for part in DENSE) and ".compressor." not in name:
            exponents = torch.randint(-9, -4, (-(-rows // 128), -(-tensor.shape[1] // 128)), generator=generator)
            stored = torch.randn(tensor.shape, generator=generator).mul_(20).to(torch.float8_e4m3fn)
            tensors[name], tensors[scale] = stored, (2.0**exponents).to(torch.float8_e8m0fnu)
            blocks = (2.0**exponents).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
            plain[name] = stored.float() * blocks[:, : tensor.shape[1]]
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / FILE)
    path = tmp_path / "config.json"
    (tmp_path / "plain" / "config.json").write_text(path.read_text())
    method = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method, "expert_dtype": "fp4"}))
    return tmp_path


def unpacked(codes: Tensor, exponents: Tensor) -> Tensor:
    """Value by value, the lower half of a byte first."""
    found = torch.empty(codes.shape[0], 2 * codes.shape[1])
    for row in range(found.shape[0]):
        for column in range(found.shape[1]):
            code = int(codes[row, column // 2]) >> 4 * (column % 2) & 15
            value = VALUES[code & 7] * (-1.0 if code & 8 else 1.0)
            found[row, column] = value * 2.0 ** (int(exponents[row, column // 32]) - 127)
    return found


def load(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    return load_parameters(folder, read_model_config(folder), dtype, torch.device("cpu"), "auto")


def test_what_was_packed_is_what_it_stands_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for staged_bytes in (1, 1 << 30):
        monkeypatch.setattr(packed_rows.read_packed, "__defaults__", (staged_bytes,))
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
