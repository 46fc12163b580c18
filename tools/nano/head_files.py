"""Writes and reads draft heads: ``config.json`` and ``model.safetensors`` under the published names."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tools.nano.export import hf_config, load_state
from tools.nano.heads import Eagle3Head, Head, MTPHead
from tools.nano.model import Nano, NanoConfig

# Of EAGLE-3's vocabulary map; the draft's vocabulary is the target's, so they say nothing new.
MAPS = ("d2t", "t2d")
# Parts of the MTP head outside its decoder layer.
OUTSIDE = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")


def mtp_prefix(config: NanoConfig) -> str:
    """Where DeepSeek's naming puts the MTP layer: behind the target's last layer."""
    return f"model.layers.{config.num_layers}."


def head_config(head: Head, config: NanoConfig) -> dict[str, object]:
    """The contents of a head's ``config.json``."""
    shape = {name: value for name, value in hf_config(config).items() if name not in ("rope_parameters", "dtype")}
    shape |= {"rope_theta": config.rope_theta, "torch_dtype": "bfloat16"}
    if isinstance(head, Eagle3Head):
        layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(head.aux_layers)}
        return shape | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": config.vocab_size,
            "target_hidden_size": config.hidden_size,
            "tie_word_embeddings": False,
            "eagle_config": layers,
        }
    return shape | {"architectures": ["LlamaForCausalLMNextN"], "num_nextn_predict_layers": 1}


def published(head: Head, config: NanoConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A head's tensors on the CPU under their published names."""
    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in head.state_dict().items()}
    if isinstance(head, Eagle3Head):
        maps = (torch.zeros(config.vocab_size, dtype=torch.int64), torch.ones(config.vocab_size, dtype=torch.bool))
        return state | dict(zip(MAPS, maps, strict=True))
    return {mtp_prefix(config) + name.removeprefix("layer."): tensor for name, tensor in state.items()}


def restore(head: Head, tensors: Mapping[str, Tensor], config: NanoConfig) -> None:
    """Loads tensors with published names into a head; a missing or unexpected one is an error."""
    state = {name: tensor.float() for name, tensor in tensors.items() if name not in MAPS}
    if not isinstance(head, Eagle3Head):
        inner = {name.removeprefix(mtp_prefix(config)): tensor for name, tensor in state.items()}
        state = {name if name.startswith(OUTSIDE) else f"layer.{name}": tensor for name, tensor in inner.items()}
    head.load_state_dict(state)


def export_head(head: Head, config: NanoConfig, folder: Path) -> None:
    """Writes ``config.json`` and ``model.safetensors`` (bfloat16) into ``folder``, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(head_config(head, config), indent=2) + "\n"
    (folder / "config.json").write_text(content, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(save(published(head, config), metadata={"format": "pt"}))


def load_head(folder: Path, target: Nano) -> Head:
    """Reads an exported head of ``target`` back, in float32 on the target's device."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head: Head
    if "num_nextn_predict_layers" in config:
        head = MTPHead(target)
    else:
        head = Eagle3Head(target, tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]))
    restore(head, load_file(str(folder / "model.safetensors")), target.config)
    return head.to(target.embed_tokens.weight.device).eval()


def load_target(folder: Path, device: torch.device) -> Nano:
    """Reads the exported target, frozen, in float32."""
    target = Nano(NanoConfig())
    target.load_state_dict(load_state(folder))
    return target.to(device).requires_grad_(False).eval()
