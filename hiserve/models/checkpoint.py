"""Files of a checkpoint, without torch: download from the Hugging Face Hub, weight files, safetensors headers."""

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

# Signature of the hub's ``snapshot_download``; tests replace it.
Download = Callable[..., Any]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODELOPT = "hf_quant_config.json"  # of the quantization, where ``config.json`` may say nothing of it
# No pickled weights. Some repositories have a second copy of the weights under another name, or in a
# folder: only files that start with ``model`` are fetched.
PATTERNS = (
    "config.json",
    "generation_config.json",
    MODELOPT,
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
    """Returns the folder of a model of the Hub. A complete copy in the local cache needs no network.

    The library shows a progress bar on a terminal. It is imported here because the import takes 0.15 s and 24 MB, which
    only this function needs.

    Args:
        name: ``owner/name``.
        revision: Branch, tag or commit; None is the main branch.
        download: Replaces ``huggingface_hub.snapshot_download``.

    Raises:
        ModelError: There is no such model or revision, its terms were not accepted, the Hub cannot be
            reached, or the model has no safetensors.
    """
    errors = importlib.import_module("huggingface_hub.errors")
    download = download or importlib.import_module("huggingface_hub").snapshot_download
    try:
        folder = Path(download(name, revision=revision, allow_patterns=list(PATTERNS), local_files_only=True))
        if _is_whole(folder):
            return folder
    except (OSError, ValueError):
        pass  # not in the cache; try the network
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
    """Whether configuration and all weights are present; another program may have cached only some files."""
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
    """Returns the cause and a remedy. GatedRepoError is tested first, because it is a RepositoryNotFoundError."""
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
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


def weight_files(folder: Path, *, param: str) -> list[Path]:
    """Returns the paths of a checkpoint's safetensors files, by name; the files may be missing.

    ``param`` is the setting that names the checkpoint.

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
    """Reads the header of a safetensors file, its length field included; shorter if the file is truncated."""
    length = file.read(_LENGTH_BYTES)
    return length + file.read(min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES))


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint and its location."""

    path: Path
    dtype: str  # in the format's spelling, for example ``BF16``
    shape: tuple[int, ...]
    begin: int  # offset of its elements in the file, in bytes; they are contiguous


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name. The safetensors library must have accepted the header before."""
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
    """Returns the names of a checkpoint's tensors; empty if it cannot be read, which the loader reports later."""
    try:
        if not (folder / SINGLE).is_file():
            return frozenset(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        with (folder / SINGLE).open("rb") as file:
            return frozenset(json.loads(read_header(file)[_LENGTH_BYTES:]))
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()
