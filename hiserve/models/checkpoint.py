"""The files of a checkpoint, without torch: which hold the weights, and what the header of each says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import msgspec

from hiserve.errors import ModelError
from hiserve.models.hub import INDEX, SINGLE

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as the library of the format limits it


def weight_files(folder: Path, *, param: str) -> list[Path]:
    """Returns the safetensors files that a checkpoint consists of, by name. They may be missing.

    Args:
        folder: Of the checkpoint.
        param: The setting that names it.

    Raises:
        ModelError: There is neither a single file nor an index, or the index is damaged.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise ModelError(
            f"{str(folder)!r} has neither {SINGLE} nor {INDEX}; only safetensors are read. Save the model again with "
            "transformers' save_pretrained, or take a copy that has them.",
            param=param,
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{INDEX} in {str(folder)!r} is damaged: it has no weight_map.", param=param) from None


def read_header(file: BinaryIO) -> bytes:
    """Reads the header of a safetensors file, its length included, as far as it is there; the data follow it."""
    length = file.read(_LENGTH_BYTES)
    return length + file.read(min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES))


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint, and where it lies.

    Attributes:
        path: The file.
        dtype: As the format calls it, for example ``BF16``.
        shape: Sizes.
        begin: Bytes of the file before its elements, which are contiguous.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file whose header the library of the format has accepted, by name."""
    with path.open("rb") as file:
        header = read_header(file)
    entries = msgspec.json.decode(header[_LENGTH_BYTES:], type=dict[str, _Entry])
    return {
        name: StoredTensor(path, entry.dtype, entry.shape, len(header) + entry.data_offsets[0])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


class _Entry(msgspec.Struct):
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def tensor_names(folder: Path) -> frozenset[str]:
    """Returns the names of the tensors of a checkpoint; none where it cannot be read, which its loading will report."""
    try:
        if not (folder / SINGLE).is_file():
            return frozenset(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        with (folder / SINGLE).open("rb") as file:
            return frozenset(json.loads(read_header(file)[_LENGTH_BYTES:]))
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()
