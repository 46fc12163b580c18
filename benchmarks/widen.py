"""A small trained model and its draft heads inside larger shapes: they say the same, and cost as much as the large shape.

The residual stream of the wide model is that of the narrow one, then zeros. A mean square over H in place of h elements
is h / H times as large, so each norm's weight is multiplied by sqrt(h / H), and its eps (of config.json) by h / H.
A matrix that reads the stream is random wherever it reads zeros, or its outputs are not read: it costs as much as that of a
real model. A matrix that writes the stream is zero but for the narrow model's part.

Padded tokens must never be drawn, and Llama has no bias. Element h of the stream, the *mark*, is ``MARK`` from the
embedding on, and no other matrix writes it; rows of the output head that belong to padded tokens multiply it by ``-LOUD``,
all others by zero. Squared, it is below the last bit of any mean square, float64 included; so no norm feels it.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiserve.models.checkpoint import INDEX, SINGLE
from hiserve.models.generation_config import read_generation
from hiserve.models.model_config import ModelConfig, parse_config, read_model_config
from hiserve.models.names import parameter_table

STD = 0.02
MARK = 2.0**-30
LOUD = 2.0**50  # a padded token's logit is -2**20 over the root mean square of the narrow stream
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # float16 has room for neither
# The axes of a matrix, by the last part of its name.
_MAPS = {
    "embed_tokens": ("vocab", "hidden"),
    "lm_head": ("vocab", "hidden"),
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "gate_proj": ("inner", "hidden"),
    "up_proj": ("inner", "hidden"),
    "down_proj": ("hidden", "inner"),
    "fc": ("hidden", "hidden"),
    "eh_proj": ("hidden", "hidden"),
}
# Fields that a wide model takes from its shape; the rest is the narrow model's.
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
VOCABULARY_MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class Axis:
    """One dimension of a matrix."""

    size: int  # in the wide model
    places: Tensor  # int64 ``[narrow size]``. Where each coordinate of the narrow model lies
    taken: Tensor  # int64. Those, and what else of the wide model must be zero for their sake: the rest of their heads

    def repeated(self, count: int) -> Axis:
        """Returns this axis several times over, one after the other."""
        begins = self.size * torch.arange(count)[:, None]
        return Axis(self.size * count, (begins + self.places).flatten(), (begins + self.taken).flatten())


class Places:
    """Layers, heads and pairs of a narrow model in a wide one.

    Layers are spread evenly. Query heads stay with their key and value head. With the same ``rope_theta``, heads that
    are r times as wide have every frequency of the narrow ones, to the last bit, in each r-th pair.

    Raises ValueError.

    Attributes:
        layers: The wide layer that each narrow one lies in; others are extra.
        axes: By name.
    """

    def __init__(self, narrow: ModelConfig, wide: ModelConfig) -> None:
        _refuse(narrow, wide)
        self.narrow, self.wide = narrow, wide
        self.layers = tuple(layer * wide.num_layers // narrow.num_layers for layer in range(narrow.num_layers))
        group, wide_group = narrow.num_heads // narrow.num_kv_heads, wide.num_heads // wide.num_kv_heads
        queries = [head // group * wide_group + head % group for head in range(narrow.num_heads)]
        self.axes = {
            "hidden": _first(narrow.hidden_size, wide.hidden_size),
            "inner": _first(narrow.intermediate_size, wide.intermediate_size),
            "vocab": _first(narrow.vocab_size, wide.vocab_size),
            "queries": self._heads(queries, wide.num_heads),
            "keys": self._heads(list(range(narrow.num_kv_heads)), wide.num_kv_heads),
        }

    def _heads(self, heads: list[int], count: int) -> Axis:
        """Returns the axis of heads; a pair is an element of a head's first half and the same one of its second."""
        dim, wide_dim = self.narrow.head_dim, self.wide.head_dim
        pairs = torch.arange(dim // 2) * (wide_dim // dim)
        begins = wide_dim * torch.tensor(heads)[:, None]
        places = begins + torch.cat((pairs, pairs + wide_dim // 2))
        return Axis(count * wide_dim, places.flatten(), (begins + torch.arange(wide_dim)).flatten())


def _first(size: int, wide_size: int) -> Axis:
    places = torch.arange(size)
    return Axis(wide_size, places, places)


def _refuse(narrow: ModelConfig, wide: ModelConfig) -> None:
    pairs = {
        "vocab_size": (narrow.vocab_size, wide.vocab_size),
        "hidden_size": (narrow.hidden_size + 1, wide.hidden_size),  # one more carries what padded tokens are known by
        "intermediate_size": (narrow.intermediate_size, wide.intermediate_size),
        "num_layers": (narrow.num_layers, wide.num_layers),
        "num_kv_heads": (narrow.num_kv_heads, wide.num_kv_heads),
        "query heads of a key head": (
            narrow.num_heads // narrow.num_kv_heads,
            wide.num_heads // wide.num_kv_heads,
        ),
        "head_dim": (narrow.head_dim, wide.head_dim),
    }
    for name, (least, held) in pairs.items():
        if held < least:
            raise ValueError(f"{name} of the wide model is {held}, and must be {least} or more")
    if wide.head_dim % narrow.head_dim:
        raise ValueError(f"head_dim {wide.head_dim} is no multiple of {narrow.head_dim}")
    if narrow.rope.kind != "default" or narrow.rope != wide.rope:
        raise ValueError(f"frequencies differ: {narrow.rope} and {wide.rope}")
    for model in (narrow, wide):
        if model.has_qk_norm or model.has_qkv_bias or model.has_out_bias or model.has_mlp_bias or model.experts:
            raise ValueError(f"{model.architecture} has more than the matrices and norms of a plain Llama")


def last_part(name: str) -> str:
    """Returns what a tensor is: ``q_proj``, ``input_layernorm`` …"""
    return name.removesuffix(".weight").rpartition(".")[2]


class Filler:
    """Fills tensors of one wide model; what is random in a tensor depends on the seed and the tensor's name alone."""

    def __init__(self, places: Places, seed: int) -> None:
        self._places, self._seed = places, seed
        narrow, wide = places.narrow, places.wide
        self._mark = narrow.hidden_size
        self._norm_scale = math.sqrt(narrow.hidden_size / wide.hidden_size)
        self._query_scale = math.sqrt(wide.head_dim / narrow.head_dim)  # attention divides by the roots of these
        self._is_tied = wide.tie_embeddings

    def fill(self, name: str, out: Tensor, source: Tensor | None) -> None:
        """Fills ``[rows, columns]`` or ``[hidden_size]`` of the wide checkpoint; ``source`` None is an extra layer's."""
        if out.dtype not in _DTYPES:
            raise ValueError(f"a widened model cannot be {out.dtype}: {LOUD:g} and {MARK:g} are out of its range")
        if out.ndim == 1:
            out.fill_(self._norm_scale)
            if source is not None:
                out[: len(source)] = (source.double() * self._norm_scale).to(out)
            return
        kind = last_part(name)
        rows, columns = self._axes(kind, out.shape[1])
        if _MAPS[kind][0] == "hidden":
            out.zero_()
        else:
            seed = zlib.crc32(name.encode(), self._seed)
            out.normal_(0.0, STD, generator=torch.Generator(out.device).manual_seed(seed))
            if source is not None:
                out.index_fill_(0, rows.taken.to(out.device), 0.0)
        if source is not None:
            scale = self._query_scale if kind == "q_proj" else 1.0
            block = (source.double() * scale).to(out)
            out[rows.places.to(out.device)[:, None], columns.places.to(out.device)] = block
            self._pass_mark(kind, out, len(rows.places))

    def _axes(self, kind: str, num_columns: int) -> tuple[Axis, Axis]:
        """Rows and columns of a matrix; heads read up to three streams side by side."""
        rows, columns = (self._places.axes[axis] for axis in _MAPS[kind])
        return rows, columns.repeated(num_columns // columns.size)

    def _pass_mark(self, kind: str, out: Tensor, num_tokens: int) -> None:
        """Sets what makes, passes on and reads the mark; ``out`` has ``num_tokens`` rows of the narrow vocabulary."""
        if kind == "embed_tokens":
            out[:, self._mark] = MARK
        if kind == "lm_head" or (kind == "embed_tokens" and self._is_tied):
            out[num_tokens:, self._mark] = -LOUD
        if kind in ("fc", "eh_proj"):  # of the first stream: the lowest layer's, or the embedding
            out[self._mark, self._mark] = 1.0

    def shape(self, name: str, source: Tensor) -> tuple[int, ...]:
        if source.ndim == 1:
            return (self._places.wide.hidden_size,)
        rows, columns = (self._places.axes[axis] for axis in _MAPS[last_part(name)])
        return (rows.size, columns.size * (source.shape[1] // len(columns.places)))


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


def write(widened: Widened, dtype: torch.dtype, device: torch.device, out: Path) -> None:
    """Writes a checkpoint folder with the narrow model's tokenizer; tensors are made on the device one by one."""
    source = _source(widened)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for piece in chain.from_iterable(parameter_table(widened.config).values()):
            made = torch.empty(piece.shape, dtype=dtype, device=device)
            widened.filler.fill(piece.source, made, source(piece.source))
            yield piece.source, made.cpu()

    out.mkdir(parents=True, exist_ok=True)
    for name in TEXT_FILES:
        shutil.copy(widened.folder / name, out)
    write_json(out / "config.json", widened.raw | {"dtype": str(dtype).removeprefix("torch.")})
    write_shards(tensors(), out)


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
    sources = {
        name.replace(prefix, wide_prefix): tensor for name, tensor in tensors.items() if name not in VOCABULARY_MAPS
    }
    shapes = {name: widened.filler.shape(name, tensor) for name, tensor in sources.items()}
    sizes = wide_sizes(raw, widened.raw)
    if "eagle_config" in raw:
        size = draft_vocab_size or min(MAX_DRAFT_VOCAB, wide.vocab_size)
        _refuse_vocabulary(raw["draft_vocab_size"], tensors, narrow.vocab_size, size, wide.vocab_size)
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


def _refuse_vocabulary(drafted: int, tensors: dict[str, Tensor], vocab_size: int, size: int, wide_size: int) -> None:
    if drafted != vocab_size or bool(tensors["d2t"].any()):
        raise ValueError("the head's vocabulary is not that of its target")
    if not vocab_size <= size <= wide_size:
        raise ValueError(f"draft_vocab_size is {size}, and must be from {vocab_size} to {wide_size}")
