"""Reads weights from Hugging Face safetensors into the decoder's parameters, by a table of names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.models.config import ModelConfig

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DUMMY_SEED = 0
_DUMMY_STD = 0.02
_MAX_NAMES = 5


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor and its place in a parameter.

    Attributes:
        source: Name in the checkpoint.
        shape: Its shape.
        start: First row of the parameter that it fills.
    """

    source: str
    shape: tuple[int, ...]
    start: int = 0


def parameter_table(config: ModelConfig) -> dict[str, tuple[Piece, ...]]:
    """Returns every parameter of the decoder and the checkpoint tensors stacked in it."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table = {
        "embedding": _stack("model.embed_tokens", ("", (config.vocab_size, hidden))),
        "norm": _stack("model.norm", ("", (hidden,))),
    }
    if not config.tie_embeddings:
        table["head"] = _stack("lm_head", ("", (config.vocab_size, hidden)))
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        table |= {
            ours + "input_norm": _stack(theirs, ("input_layernorm", (hidden,))),
            ours + "qkv": _stack(
                theirs + "self_attn.",
                ("q_proj", (queries, hidden)),
                ("k_proj", (keys, hidden)),
                ("v_proj", (keys, hidden)),
            ),
            ours + "out": _stack(theirs + "self_attn.", ("o_proj", (hidden, queries))),
            ours + "mlp_norm": _stack(theirs, ("post_attention_layernorm", (hidden,))),
            ours + "gate_up": _stack(theirs + "mlp.", ("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden))),
            ours + "down": _stack(theirs + "mlp.", ("down_proj", (hidden, inner))),
        }
        if config.has_qk_norm:
            table[ours + "q_norm"] = _stack(theirs + "self_attn.", ("q_norm", (config.head_dim,)))
            table[ours + "k_norm"] = _stack(theirs + "self_attn.", ("k_norm", (config.head_dim,)))
    return table


def _stack(prefix: str, *parts: tuple[str, tuple[int, ...]]) -> tuple[Piece, ...]:
    pieces, start = [], 0
    for name, shape in parts:
        pieces.append(Piece(f"{prefix}{name}.weight", shape, start))
        start += shape[0]
    return tuple(pieces)


def load_parameters(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, load_format: str
) -> dict[str, Tensor]:
    """Allocates every parameter on the device and fills it.

    Args:
        folder: Checkpoint folder; not read when ``load_format`` is ``dummy``.
        config: The model's shape.
        dtype: What the parameters are stored as.
        device: Where.
        load_format: ``auto`` reads safetensors; ``dummy`` draws weights from a fixed seed.

    Raises:
        ModelError: A file is missing or damaged; a tensor is missing, unexpected or of the wrong shape or type.
    """
    table = parameter_table(config)
    parameters = {
        name: torch.empty((sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]), dtype=dtype, device=device)
        for name, pieces in table.items()
    }
    if load_format == "dummy":
        _draw(parameters, device)
    else:
        _read(folder, config, table, parameters)
    return parameters


def _draw(parameters: dict[str, Tensor], device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for parameter in parameters.values():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, _DUMMY_STD, generator=generator)


def _read(
    folder: Path, config: ModelConfig, table: dict[str, tuple[Piece, ...]], parameters: dict[str, Tensor]
) -> None:
    places = {piece.source: (name, piece) for name, pieces in table.items() for piece in pieces}
    missing, unexpected = set(places), []
    for source, tensor in _tensors(folder):
        if source in places:
            name, piece = places[source]
            _check(source, tensor, piece)
            parameters[name][piece.start : piece.start + piece.shape[0]].copy_(tensor)
            missing.discard(source)
        elif not _is_ignored(source, config):
            unexpected.append(source)
    if missing:
        raise ModelError(f"{str(folder)!r} lacks {_named(missing)}. Is the download complete?", param="model")
    if unexpected:
        raise ModelError(
            f"{str(folder)!r} has {_named(unexpected)}, which {config.architecture} as described by config.json "
            "has no place for.",
            param="model",
        )


def _is_ignored(source: str, config: ModelConfig) -> bool:
    """Copies of what is already there: a tied head, and rotary frequencies."""
    return source.endswith("rotary_emb.inv_freq") or (source == "lm_head.weight" and config.tie_embeddings)


def _check(source: str, tensor: Tensor, piece: Piece) -> None:
    if tuple(tensor.shape) != piece.shape:
        raise ModelError(
            f"tensor {source} has shape {list(tensor.shape)}; config.json asks for {list(piece.shape)}.", param="model"
        )
    if not tensor.is_floating_point():
        raise ModelError(
            f"tensor {source} holds {tensor.dtype}; quantized checkpoints are not supported.", param="model"
        )


def _named(names: set[str] | list[str]) -> str:
    shown = sorted(names)[:_MAX_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(shown)}{more}"


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of the checkpoint, in CPU memory.

    Raises:
        ModelError: A file is missing or damaged.
    """
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for source in file.keys():  # noqa: SIM118 - not a mapping
                    yield source, file.get_tensor(source)
        except FileNotFoundError:
            raise ModelError(f"{path.name} is missing from {str(folder)!r}.", param="model") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path.name} in {str(folder)!r} is damaged: {error}. Fetch it again.", param="model"
            ) from None


def _files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        raise ModelError(
            f"{str(folder)!r} has neither {_SINGLE} nor {_INDEX}; only safetensors are read.", param="model"
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{_INDEX} in {str(folder)!r} is damaged: it has no weight_map.", param="model") from None
