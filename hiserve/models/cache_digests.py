"""Digests of everything that determines a model's keys and values; equal on all hosts that serve it the same way."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hiserve.config.settings import FileStamp
from hiserve.core.digest import namespace_digest
from hiserve.errors import ModelError
from hiserve.models.checkpoint import read_header, weight_files
from hiserve.models.draft_config import DraftConfig
from hiserve.models.generation_config import SamplingDefaults
from hiserve.models.model_config import ModelConfig

# Version of a page's bytes and of their computation; raised by every change that invalidates old pages.
LAYOUT_VERSION = "2"
NUM_BLOCKS = 64  # of each file
BLOCK_BYTES = 1 << 16
_MAX_THREADS = 16  # that read files at once


def cache_namespace(
    shape: bytes,
    weights: Sequence[bytes],
    *,
    dtype: str,
    page_size: int,
    extra_groups: Sequence[str] = (),
    secret: bytes = b"",
) -> bytes:
    """Returns the 16-byte digest that separates caches, but for tenants.

    It depends on no path and no time: copies of a checkpoint share a cache, on one host or on several.

    Args:
        shape: From ``shape_digest``.
        weights: From ``weight_digests``, or a substitute for dummy weights.
        dtype: Element type name of the KV cache.
        page_size: Tokens per page.
        extra_groups: Names of the groups that exist for debugging, have pages of their own, or hold packed rows.
        secret: The server's, for a cache that outlives it: without it a digest does not reveal what it stands for.
    """
    shard, layout = "1/1", "+".join((LAYOUT_VERSION, *extra_groups))
    return namespace_digest(secret, shape, str(len(weights)), *weights, dtype, layout, str(page_size), shard)


def shape_digest(model: ModelConfig, draft: DraftConfig | None, max_len: int) -> bytes:
    """Returns the 16-byte digest of the parsed configurations of a model and of its draft head or model.

    End tokens and sampling defaults are left out: no key or value depends on them. ``max_len`` is the tokens of the
    longest request, on which longrope's frequencies depend.
    """
    drafts = None if draft is None else (draft.kind, _shape(draft.model, max_len), draft.aux_layers, draft.head)
    return namespace_digest(msgspec.json.encode((_shape(model, max_len), drafts), order="deterministic"))


def stamps(folders: Mapping[Path, str]) -> tuple[FileStamp, ...]:
    """Returns the current weight files of checkpoint folders, each with the setting that names it.

    Raises:
        ModelError: A checkpoint is damaged or a file of it is missing.
    """
    found = []
    for folder, param in folders.items():
        for path in weight_files(folder, param=param):
            try:
                status = path.stat()
            except FileNotFoundError:
                raise ModelError(f"{path.name} is missing from {str(folder)!r}.", param=param) from None
            found.append(FileStamp(str(path.absolute()), status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def weight_digests(files: Sequence[FileStamp]) -> list[bytes]:
    """Returns the 32-byte digest of each file: of its size, its header and up to 64 blocks of its data.

    The first and the last block are always included; a file of up to 4 MiB of data is read whole. If a larger file is
    edited in place between the blocks, its digest does not change: such weights need another ``--store`` and
    ``--host-cache-name``.

    Raises:
        ModelError: A file cannot be read.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, max(1, len(files)))) as pool:
        return list(pool.map(_digest, files))


def _digest(stamp: FileStamp) -> bytes:
    hasher = hashlib.sha256()
    try:
        with open(stamp.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead for this descriptor
            header = read_header(file)
            hasher.update(stamp.num_bytes.to_bytes(8, "little") + header)
            for start in _blocks(len(header), stamp.num_bytes):
                hasher.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    except OSError as error:
        raise ModelError(f"cannot read {stamp.path!r}: {error.strerror}.", param="model") from None
    return hasher.digest()


def _blocks(begin: int, end: int) -> list[int]:
    """Returns the starts of blocks within [begin, end): adjacent, or evenly spread if they do not cover it."""
    if end - begin <= NUM_BLOCKS * BLOCK_BYTES:
        return list(range(begin, end, BLOCK_BYTES))
    last = end - begin - BLOCK_BYTES
    return [begin + last * block // (NUM_BLOCKS - 1) for block in range(NUM_BLOCKS)]


def _shape(model: ModelConfig, max_len: int) -> ModelConfig:
    """Returns the configuration with the frequencies that are used, and without the fields that only concern text."""
    return msgspec.structs.replace(
        model,
        rope=model.rope.fixed(max_len),
        local_rope=None if model.local_rope is None else model.local_rope.fixed(max_len),
        eos_token_ids=(),
        bos_token_id=None,
        sampling_defaults=SamplingDefaults(),
    )
