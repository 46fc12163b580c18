"""Reads weights from Hugging Face safetensors into the decoder's parameters."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.models.config import ModelConfig
from hiserve.models.hub import INDEX, SINGLE
from hiserve.models.names import Piece, Spelling, parameter_table

_DUMMY_SEED = 0
_DUMMY_STD = 0.02
_MAX_NAMES = 5


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
    if load_format == "dummy":
        parameters = _allocate(parameter_table(config), dtype, device)
        _draw(parameters, device)
        return parameters
    files = _files(folder)
    held = {path: _names(path) for path in files}
    table = parameter_table(config, Spelling.of([source for names in held.values() for source in names]))
    places = {piece.source: (name, piece) for name, pieces in table.items() for piece in pieces}
    _compare(folder, config, set(places), {source for names in held.values() for source in names})
    parameters = _allocate(table, dtype, device)
    for path, names in held.items():
        with _opened(path) as file:
            for source in names & places.keys():
                name, piece = places[source]
                tensor = file.get_tensor(source)
                _check(tensor, piece)
                target = parameters[name][piece.start : piece.start + piece.num_rows]
                target.copy_(tensor.view(target.shape))
    return parameters


def _allocate(table: dict[str, tuple[Piece, ...]], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Returns an empty vector or matrix for every parameter."""
    parameters = {}
    for name, pieces in table.items():
        rows, first = sum(piece.num_rows for piece in pieces), pieces[0].shape
        shape = (rows,) if len(first) == 1 else (rows, first[-1])
        parameters[name] = torch.empty(shape, dtype=dtype, device=device)
    return parameters


def _draw(parameters: dict[str, Tensor], device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for name, parameter in parameters.items():
        if name.endswith("norm"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, _DUMMY_STD, generator=generator)


def _compare(folder: Path, config: ModelConfig, wanted: set[str], held: set[str]) -> None:
    """Names what the checkpoint lacks and what it has too much, before anything is read."""
    missing = wanted - held
    unexpected = {source for source in held - wanted if not _is_ignored(source, config)}
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


def _check(tensor: Tensor, piece: Piece) -> None:
    if tuple(tensor.shape) != piece.shape:
        raise ModelError(
            f"tensor {piece.source} has shape {list(tensor.shape)}; config.json asks for {list(piece.shape)}.",
            param="model",
        )
    if not tensor.is_floating_point():
        raise ModelError(
            f"tensor {piece.source} holds {tensor.dtype}; quantized checkpoints are not supported.", param="model"
        )


def _named(names: Collection[str]) -> str:
    shown = sorted(names)[:_MAX_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(shown)}{more}"


def _names(path: Path) -> set[str]:
    with _opened(path) as file:
        return set(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a file of tensors.

    Raises:
        ModelError: It is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise ModelError(f"{path.name} is missing from {str(path.parent)!r}.", param="model") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path.name} in {str(path.parent)!r} is damaged: {error}. Fetch it again.", param="model"
        ) from None


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise ModelError(
            f"{str(folder)!r} has neither {SINGLE} nor {INDEX}; only safetensors are read. Save the model again with "
            "transformers' save_pretrained, or take a copy that has them.",
            param="model",
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{INDEX} in {str(folder)!r} is damaged: it has no weight_map.", param="model") from None
