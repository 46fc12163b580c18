"""Checkpoints in FP8 with a scale for each block of 128 by 128."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
QUANTIZED = ("_proj.weight", "_proj_with_mqa.weight", "indexer.wq_b.weight", "indexer.wk.weight")


def quantize(folder: Path, scale_type: torch.dtype) -> None:
    """Stores the matrices of all layers as FP8, with uneven scales."""
    torch.manual_seed(7)
    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if name.endswith(QUANTIZED)]:
        rows, columns = tensors[name].shape
        blocks = (-(-rows // 128), -(-columns // 128))
        scales = torch.rand(blocks) * 0.02 + 1e-4
        if scale_type == torch.float8_e8m0fnu:
            scales = 2.0 ** torch.randint(-12, -5, blocks)
        tensors[name] = torch.randn(rows, columns).mul_(60).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scales.to(scale_type)
    save_file(tensors, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
