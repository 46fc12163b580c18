"""Draft heads of the narrow model, widened as it is, under their published names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.widen.target import Widened, wide_sizes, write_json
from hiserve.models.checkpoint import SINGLE

MAX_DRAFT_VOCAB = 32_000  # of an EAGLE-3 head, as the published ones for large vocabularies have it
KINDS = ("eagle3", "mtp")
_MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class WideHead:
    """A draft head before its tensors are made.

    Attributes:
        sources: The narrow head's tensors by their names in the wide one, vocabulary maps left out.
        shapes: The wide ones.
    """

    raw: dict[str, Any]
    sources: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]

    def tensors(self, widened: Widened, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Returns all tensors of its checkpoint, made on the device."""
        made = {}
        for name, source in self.sources.items():
            made[name] = torch.empty(self.shapes[name], dtype=dtype, device=device)
            widened.filler.fill(name, made[name], source)
        if "eagle_config" in self.raw:
            known = torch.arange(widened.config.vocab_size, device=device) < self.raw["draft_vocab_size"]
            made["d2t"] = torch.zeros(self.raw["draft_vocab_size"], dtype=torch.int64, device=device)
            made["t2d"] = known
        return made


def bundled_heads(folder: Path) -> dict[str, Path]:
    """Returns the folders of the heads that come with a model, by kind."""
    return {kind: folder / kind for kind in KINDS if (folder / kind / "config.json").is_file()}


def widen_head(widened: Widened, folder: Path, draft_vocab_size: int | None = None) -> WideHead:
    """Reads a head of the narrow model: EAGLE-3, or MTP in DeepSeek's naming.

    Args:
        widened: Its target.
        folder: Of the head.
        draft_vocab_size: Of the wide EAGLE-3 head, whose ids are the target's; None is the target's, up to 32,000.

    Raises:
        ValueError: Its vocabulary is not the narrow model's, or the wide one's is smaller or too large.
    """
    narrow, wide = widened.places.narrow, widened.config
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / SINGLE)
    prefix, wide_prefix = (f"model.layers.{model.num_layers}." for model in (narrow, wide))
    sources = {name.replace(prefix, wide_prefix): tensor for name, tensor in tensors.items() if name not in _MAPS}
    shapes = {name: widened.filler.shape(name, tensor) for name, tensor in sources.items()}
    sizes = wide_sizes(raw, widened.raw)
    if "eagle_config" in raw:
        size = draft_vocab_size or min(MAX_DRAFT_VOCAB, wide.vocab_size)
        _refuse(raw["draft_vocab_size"], tensors, narrow.vocab_size, size, wide.vocab_size)
        shapes["lm_head.weight"] = (size, wide.hidden_size)
        layers = [widened.places.layers[layer] for layer in raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        sizes |= {
            "num_hidden_layers": 1,
            "draft_vocab_size": size,
            "target_hidden_size": wide.hidden_size,
            "tie_word_embeddings": False,
            "eagle_config": raw["eagle_config"] | {"eagle_aux_hidden_state_layer_ids": layers},
        }
    return WideHead(raw | sizes, sources, shapes)


def write_head(widened: Widened, head: WideHead, dtype: torch.dtype, device: torch.device, out: Path) -> None:
    """Writes a head's folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", head.raw | {"torch_dtype": str(dtype).removeprefix("torch.")})
    made = {name: tensor.cpu() for name, tensor in head.tensors(widened, dtype, device).items()}
    save_file(made, out / SINGLE, metadata={"format": "pt"})


def _refuse(drafted: int, tensors: dict[str, Tensor], vocab_size: int, size: int, wide_size: int) -> None:
    if drafted != vocab_size or bool(tensors["d2t"].any()):
        raise ValueError("the head's vocabulary is not that of its target")
    if not vocab_size <= size <= wide_size:
        raise ValueError(f"draft_vocab_size is {size}, and must be from {vocab_size} to {wide_size}")
