"""Checkpoints whose experts are packed, each beside one of what they stand for, in the folder ``plain``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.helpers.compressed_models import save_compressed

FILE = "model.safetensors"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DENSE = (".wq_a.", ".wq_b.", ".wkv.", ".wo_a.", ".wo_b.", "shared_experts.")


def pack_gpt_oss(folder: Path, is_sharded: bool = False) -> None:
    """Replaces the experts of a checkpoint by random packed ones, and writes what they stand for beside it."""
    generator = torch.Generator().manual_seed(4)
    plain, packed = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(plain.items()):
        packed[name] = tensor
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        del packed[name]
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float()
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_text((folder / "config.json").read_text())
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(raw))
    if not is_sharded:
        save_file(packed, folder / "model.safetensors")
        return
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{number % 5}.safetensors" for number, name in enumerate(sorted(packed))}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in packed.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def save_released(folder: Path, **overrides: Any) -> Path:
    """Saves a DeepSeek-V4 as it is released: dense matrices outside compressors are FP8, experts have 4 bits."""
    save_compressed(folder, **overrides)
    generator = torch.Generator().manual_seed(6)
    tensors, plain = load_file(folder / FILE), {}
    for name, tensor in load_file(folder / FILE).items():
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
    save_file(tensors, folder / FILE)
    (folder / "plain").mkdir()
    save_file(plain, folder / "plain" / FILE)
    path = folder / "config.json"
    (folder / "plain" / "config.json").write_text(path.read_text())
    method = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method, "expert_dtype": "fp4"}))
    return folder


def unpacked(codes: Tensor, exponents: Tensor) -> Tensor:
    """The lower half of a byte first."""
    halves = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])[halves]
    return values * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)
