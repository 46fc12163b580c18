"""Tiny random models with recurrent states, and a draft head in their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from tests.helpers.models import save_family

_LAYERS = {
    "qwen3_5_text": Qwen3_5DecoderLayer,
    "qwen3_5_moe_text": Qwen3_5MoeDecoderLayer,
    "qwen3_next": Qwen3NextDecoderLayer,
}
FILE = "model.safetensors"


def head_layer(family: str, folder: Path) -> Any:
    """Returns transformers' layer with attention, with random weights."""
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    return _LAYERS[family](config, config.layer_types.index("full_attention"))


def save_with_head(family: str, folder: Path, **overrides: Any) -> Path:
    """Saves a random model with a draft head, in the names of released files."""
    save_family(family, folder, **overrides)
    torch.manual_seed(5)
    layer = head_layer(family, folder)
    hidden = layer.input_layernorm.weight.shape[0]
    tensors = {f"mtp.layers.0.{name}": torch.empty_like(value) for name, value in layer.state_dict().items()}
    tensors |= {
        f"mtp.{name}.weight": torch.empty(hidden) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    tensors["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.uniform_(-0.5, 0.5)
        else:
            tensor.normal_(0.0, 0.2)
    save_file(load_file(folder / FILE) | tensors, folder / FILE)
    if family == "qwen3_next":
        return folder  # config.json of released files says nothing of the head
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"mtp_num_hidden_layers": 1}))
    return folder
