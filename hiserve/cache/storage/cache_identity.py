"""The identity of a server's cache, computed once, in the process that resolves the options."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hiserve.cache.storage.segment import SHARED_MEMORY, PageLayout, segment_path
from hiserve.cache.storage.store import read_secret
from hiserve.cache.storage.store_address import secret_of
from hiserve.config.settings import CacheIdentity, FileStamp, Settings
from hiserve.core.digest import namespace_digest
from hiserve.core.kv_groups import Space, debug_groups
from hiserve.core.step_memory import segment_for
from hiserve.distributed.shard import Shard
from hiserve.errors import ConfigError, ModelError
from hiserve.models.checkpoint import read_header, weight_files
from hiserve.models.draft_config import DraftConfig, page_groups, read_draft
from hiserve.models.generation_config import SamplingDefaults
from hiserve.models.model_config import ModelConfig
from hiserve.models.shards import local_config

# Version of a page's bytes and of their computation; raised by every change that invalidates old pages.
LAYOUT_VERSION = "2"
NUM_BLOCKS = 64  # of each file
BLOCK_BYTES = 1 << 16
_MAX_THREADS = 16  # that read files at once


def identify(settings: Settings, folder: Path, model: ModelConfig, directory: Path = SHARED_MEMORY) -> Settings:
    """Returns the settings with their ``identity``.

    The weights' files are stamped before they are read, so that ``check_unchanged`` sees every later change.

    Args:
        settings: Without identity.
        folder: Of the model.
        model: Its shape.
        directory: Of named segments.

    Raises:
        ModelError: The weights, or those of the draft head or model, cannot be read.
        ConfigError: As ``server_secret``.
    """
    draft = read_draft(settings, folder, model)
    files = _files(settings, folder, draft)
    shape = shape_digest(model, draft, settings.model.max_model_len)
    share = Shard(0, settings.parallel.tp)  # all ranks have pages of as many bytes
    local = local_config(model, share), None if draft is None else draft.local(share)
    groups = page_groups(settings, *local, frees_windows=settings.cache.frees_windows)
    history = [group for group in groups if group.space is Space.HISTORY]
    page_bytes = PageLayout(history, settings.cache.page_size).page_bytes
    identity = CacheIdentity(
        namespace=cache_namespace(
            shape,
            weight_digests(files) if files else [b"drawn on " + settings.model.device.encode()],
            dtype=settings.model.dtype,
            page_size=settings.cache.page_size,
            extra_groups=[
                *(group.name for group in debug_groups(settings.cache)),
                *(_order_of_sums(settings) if settings.runner.exact else ()),
                *(group.name for group in groups if group.space is Space.WINDOW),
                *(f"{group.name} {group.dtype}" for group in groups if group.space is Space.ROW),
                *(f"{group.name} {group.codec}" for group in groups if group.codec in ("packed", "heads")),
            ],
            secret=server_secret(settings, directory),
        ),
        page_bytes=page_bytes,
        shape=shape,
        files=files,
    )
    return msgspec.structs.replace(settings, identity=identity)


def _order_of_sums(settings: Settings) -> list[str]:
    """Returns what the bits of pages depend on under ``--exact``; a CPU's products are also shared among its threads."""
    segment = f"exact {segment_for(settings.model.max_model_len)}"
    return [segment, f"{settings.runner.cpu_threads} threads"] if settings.model.device == "cpu" else [segment]


def check_unchanged(settings: Settings, folder: Path, model: ModelConfig, draft: DraftConfig | None) -> None:
    """Compares the files that a worker has read with those that the identity was computed from.

    Args:
        settings: With the identity.
        folder: Of the model.
        model: As the worker has read it.
        draft: As the worker has read it.

    Raises:
        ConfigError: A configuration or a file of weights has changed since.
        ModelError: A file is missing.
    """
    identity = settings.cache_identity
    shape = shape_digest(model, draft, settings.model.max_model_len)
    if identity.shape != shape or identity.files != _files(settings, folder, draft):
        raise ConfigError(
            f"the files of {settings.model.model!r} have changed since the server started. Start it again.",
            param="model",
        )


def server_secret(settings: Settings, directory: Path = SHARED_MEMORY) -> bytes:
    """Returns the secret of every digest: kept with the storage that outlives the server, empty without such storage.

    A store may outlive a named segment, which a reboot removes: the store's secret is used if there are both.

    Raises:
        ConfigError: The file that holds it cannot be used.
    """
    if settings.cache.store is not None:
        return secret_of(settings.cache)
    name = settings.cache.host_cache_name
    if name is None:
        return b""
    path = segment_path(name, directory)
    return read_secret(path.with_name(f".{path.name}.secret"))


def _files(settings: Settings, folder: Path, draft: DraftConfig | None) -> tuple[FileStamp, ...]:
    """Returns the files that the weights are read from; none for dummy weights."""
    if settings.model.load_format == "dummy":
        return ()
    folders = {folder: "model"}
    if draft is not None:
        folders.setdefault(draft.folder, "spec")
    return stamps(folders)


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
