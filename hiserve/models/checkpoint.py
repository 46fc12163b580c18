"""The files of a checkpoint, without torch: fetched from the Hugging Face Hub, which hold weights, the header of each."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hiserve.errors import ModelError

# Calls the hub's ``snapshot_download``; a test brings its own.
Download = Callable[..., Any]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Never pickled weights. Some repositories hold a second copy of the weights under another name, or in a
# folder: only files that start with ``model`` are ours.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "model*.safetensors",
    INDEX,
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*", re.ASCII)
_MAX_NAME = 96

logger = logging.getLogger(__name__)


def is_hub_name(name: str) -> bool:
    """Whether a name could be a model of the Hub, ``owner/name``."""
    return len(name) <= _MAX_NAME and _NAME.fullmatch(name) is not None


def fetch(name: str, revision: str | None, download: Download | None = None) -> Path:
    """Returns the folder of a model of the Hub. Its local cache goes first: a whole copy there needs no network.

    The library shows a progress bar where standard error is a terminal. It is imported here, by
    name, because it takes 0.15 s and 24 MB that only this function needs.

    Args:
        name: ``owner/name``.
        revision: Branch, tag or commit; None is the main branch.
        download: ``huggingface_hub.snapshot_download``, or what stands in for it.

    Raises:
        ModelError: There is no such model or revision, its terms were not accepted, it cannot be
            reached, or it has no safetensors.
    """
    errors = importlib.import_module("huggingface_hub.errors")
    download = download or importlib.import_module("huggingface_hub").snapshot_download
    try:
        folder = Path(download(name, revision=revision, allow_patterns=list(PATTERNS), local_files_only=True))
        if _is_whole(folder):
            return folder
    except (OSError, ValueError):
        pass  # not in the cache; the network may have it
    logger.info("fetching %s from the Hugging Face Hub", name)
    try:
        folder = Path(download(name, revision=revision, allow_patterns=list(PATTERNS)))
    except (OSError, ValueError, errors.HTTPError) as error:
        raise ModelError(_advice(errors, error, name, revision), param="model") from None
    if not _is_whole(folder):
        raise ModelError(
            f"{name!r} on the Hugging Face Hub has no config.json with {SINGLE} or {INDEX}; only safetensors are read. "
            "Choose a model or a revision that has them.",
            param="model",
        )
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether configuration and all weights are there; a cache may hold what another program needed of a model."""
    if not (folder / "config.json").is_file():
        return False
    if (folder / SINGLE).is_file():
        return True
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / name).is_file() for name in names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _advice(errors: Any, error: Exception, name: str, revision: str | None) -> str:
    """Says what failed and what to do; gated models are reported as a kind of those not found."""
    if isinstance(error, errors.GatedRepoError):
        return f"{name!r} is gated: accept its terms at https://huggingface.co/{name} and log in with 'hf auth login'."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {name!r}, and no model of that name on the Hugging Face Hub. "
            "Check the name; for a private model log in with 'hf auth login'."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name!r} on the Hugging Face Hub has no revision {revision!r}. Name a branch, a tag or a commit."
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"there is no folder {name!r}, it is not in the local cache of the Hugging Face Hub, and the Hub cannot be "
            "reached. Connect to the network, or give a folder."
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"cannot fetch {name!r} from the Hugging Face Hub: {reason}. Try again, or give a folder."


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
