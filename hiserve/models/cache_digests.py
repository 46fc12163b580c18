"""What shapes a model's keys and values, as digests: equal on every host that serves the same model the same way."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hiserve.config.identity import FileStamp
from hiserve.core.digest import namespace_digest
from hiserve.errors import ModelError
from hiserve.models.checkpoint import read_header, weight_files
from hiserve.models.draft_config import DraftConfig
from hiserve.models.generation_config import SamplingDefaults
from hiserve.models.model_config import ModelConfig

# Of a page's bytes and of how they are computed: it grows with every change after which old pages are wrong.
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
    debug_groups: Sequence[str] = (),
    secret: bytes = b"",
) -> bytes:
    """Returns the 16-byte digest of everything that keeps caches apart but the tenant.

    It knows no path and no time: copies of a checkpoint share a cache, on one host or on several.

    Args:
        shape: As ``shape_digest`` returns it.
        weights: As ``weight_digests`` returns it, or what stands for weights that were drawn.
        dtype: Element type name of the KV cache.
        page_size: Tokens per page.
        debug_groups: Names of the groups of a page that are there for debugging.
        secret: The server's, where a cache outlives it: who does not know it cannot tell what a digest stands for.
    """
    shard, layout = "1/1", "+".join((LAYOUT_VERSION, *debug_groups))
    return namespace_digest(secret, shape, str(len(weights)), *weights, dtype, layout, str(page_size), shard)


def shape_digest(model: ModelConfig, draft: DraftConfig | None, max_len: int) -> bytes:
    """Returns the 16-byte digest of the parsed configurations of a model and of what drafts for it.

    End tokens and sampling defaults are left out: they shape no key and no value.

    Args:
        model: The model's.
        draft: The draft's; None without.
        max_len: Tokens of the longest request: with longrope the frequencies depend on it.
    """
    drafts = None if draft is None else (draft.kind, _shape(draft.model, max_len), draft.aux_layers, draft.head)
    return namespace_digest(msgspec.json.encode((_shape(model, max_len), drafts), order="deterministic"))


def stamps(folders: Mapping[Path, str]) -> tuple[FileStamp, ...]:
    """Returns the files of the weights as they are now.

    Args:
        folders: Of the checkpoints, each with the setting that names it.

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
    """Returns the 32-byte digest of each file: of its size, its header and up to 64 blocks of its data, first and last included.

    A file of up to 4 MiB of data is read whole. A larger one that was edited in place between the blocks, with the same
    tensors, has the same digest: such weights need another ``--store`` and ``--host-cache-name``.

    Raises:
        ModelError: A file cannot be read.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, max(1, len(files)))) as pool:
        return list(pool.map(_digest, files))


def _digest(stamp: FileStamp) -> bytes:
    hasher = hashlib.sha256()
    try:
        with open(stamp.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # of this descriptor: nothing is read ahead
            header = read_header(file)
            hasher.update(stamp.num_bytes.to_bytes(8, "little") + header)
            for start in _blocks(len(header), stamp.num_bytes):
                hasher.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    except OSError as error:
        raise ModelError(f"cannot read {stamp.path!r}: {error.strerror}.", param="model") from None
    return hasher.digest()


def _blocks(begin: int, end: int) -> list[int]:
    """Returns where blocks start within [begin, end): one behind the other, or evenly spread if they do not cover it."""
    if end - begin <= NUM_BLOCKS * BLOCK_BYTES:
        return list(range(begin, end, BLOCK_BYTES))
    last = end - begin - BLOCK_BYTES
    return [begin + last * block // (NUM_BLOCKS - 1) for block in range(NUM_BLOCKS)]


def _shape(model: ModelConfig, max_len: int) -> ModelConfig:
    """Returns the configuration with the frequencies that are used, and without what only concerns text."""
    return msgspec.structs.replace(
        model,
        rope=model.rope.fixed(max_len),
        eos_token_ids=(),
        bos_token_id=None,
        sampling_defaults=SamplingDefaults(),
    )
