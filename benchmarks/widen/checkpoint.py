"""The wide model and its draft heads: config.json, tensors by their published names, and folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.widen.filler import Filler, Places
from hiserve.models.checkpoint import INDEX, SINGLE
from hiserve.models.generation_config import read_generation
from hiserve.models.model_config import ModelConfig, parse_config, read_model_config
from hiserve.models.names import TensorSource, parameter_table

# What a wide model takes from its shape; the rest is the narrow model's.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SHARD_BYTES = 4 << 30
_LAYERS = "model.layers."
MAX_DRAFT_VOCAB = 32_000  # of an EAGLE-3 head, as the published ones for large vocabularies have it
KINDS = ("eagle3", "mtp")
_MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class Widened:
    """A narrow model of a wide shape."""

    folder: Path
    raw: dict[str, Any]
    places: Places  # of the narrow model in the wide one
    filler: Filler  # fills the wide model's tensors

    @property
    def config(self) -> ModelConfig:
        return self.places.wide


def widen(folder: Path, shape: dict[str, Any], seed: int) -> Widened:
    """Puts a Llama checkpoint into the sizes of ``shape``, a ``config.json``; nothing is allocated. Raises ValueError."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw |= wide_sizes(raw, shape)
    wide = parse_config(raw, folder / "config.json", read_generation(folder))
    places = Places(read_model_config(folder), wide)
    return Widened(folder, raw, places, Filler(places, seed))


def wide_sizes(narrow: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of ``config.json`` that differ, and the eps of norms over zeros besides."""
    eps = narrow["rms_norm_eps"] * narrow["hidden_size"] / shape["hidden_size"]
    return {name: shape[name] for name in SIZES} | {"rms_norm_eps": eps}


def parameters(widened: Widened, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Returns what ``Decoder`` takes, each parameter allocated where it stays and filled there."""
    source = _source(widened)
    filled = {}
    for name, pieces in parameter_table(widened.config).items():
        num_rows, first = sum(piece.num_rows for piece in pieces), pieces[0].shape
        filled[name] = torch.empty((num_rows, *first[1:]), dtype=dtype, device=device)
        for piece in pieces:
            part = filled[name][piece.start : piece.start + piece.num_rows]
            widened.filler.fill(piece.source, part, source(piece.source))
    return filled


def write(widened: Widened, dtype: torch.dtype, device: torch.device, out: Path) -> None:
    """Writes a checkpoint folder with the narrow model's tokenizer; tensors are made on the device one by one."""
    source = _source(widened)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for piece in pieces_of(widened.config):
            made = torch.empty(piece.shape, dtype=dtype, device=device)
            widened.filler.fill(piece.source, made, source(piece.source))
            yield piece.source, made.cpu()

    out.mkdir(parents=True, exist_ok=True)
    for name in TEXT_FILES:
        shutil.copy(widened.folder / name, out)
    write_json(out / "config.json", widened.raw | {"dtype": str(dtype).removeprefix("torch.")})
    write_shards(tensors(), out)


def pieces_of(config: ModelConfig) -> Iterator[TensorSource]:
    return (piece for pieces in parameter_table(config).values() for piece in pieces)


def write_shards(tensors: Iterable[tuple[str, Tensor]], out: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes tensors of the CPU as they come, in files of about ``shard_bytes``, and their index."""
    shard: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    num_bytes = 0

    def close() -> None:
        file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > shard_bytes:
            close()
            num_bytes = 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    close()
    write_json(out / INDEX, {"metadata": {}, "weight_map": places})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _source(widened: Widened) -> Callable[[str], Tensor | None]:
    """Returns what finds the narrow tensor of a wide name; None is one of an extra layer."""
    tensors = load_file(widened.folder / SINGLE)
    narrow_layer = {str(wide): layer for layer, wide in enumerate(widened.places.layers)}

    def find(name: str) -> Tensor | None:
        if name == "lm_head.weight" and name not in tensors:
            name = "model.embed_tokens.weight"
        if not name.startswith(_LAYERS):
            return tensors[name]
        layer, _, rest = name.removeprefix(_LAYERS).partition(".")
        return tensors[f"{_LAYERS}{narrow_layer[layer]}.{rest}"] if layer in narrow_layer else None

    return find


@dataclass(frozen=True)
class WideHead:
    """A draft head before its tensors are made."""

    raw: dict[str, Any]
    sources: dict[str, Tensor]  # the narrow head's tensors by their names in the wide one, vocabulary maps left out
    shapes: dict[str, tuple[int, ...]]  # the wide ones

    def tensors(self, widened: Widened, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
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
    """Reads a head of the narrow model: EAGLE-3, or MTP in DeepSeek's naming. Raises ValueError.

    The ids of a wide EAGLE-3 head are the target's, up to ``draft_vocab_size`` (by default up to 32,000).
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
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", head.raw | {"torch_dtype": str(dtype).removeprefix("torch.")})
    made = {name: tensor.cpu() for name, tensor in head.tensors(widened, dtype, device).items()}
    save_file(made, out / SINGLE, metadata={"format": "pt"})


def _refuse(drafted: int, tensors: dict[str, Tensor], vocab_size: int, size: int, wide_size: int) -> None:
    if drafted != vocab_size or bool(tensors["d2t"].any()):
        raise ValueError("the head's vocabulary is not that of its target")
    if not vocab_size <= size <= wide_size:
        raise ValueError(f"draft_vocab_size is {size}, and must be from {vocab_size} to {wide_size}")
