"""The identity of a server's cache, computed once, in the process that resolves the options."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hiserve.cache.storage.segment import SHARED_MEMORY, PageLayout, segment_path
from hiserve.cache.storage.store import read_secret
from hiserve.cache.storage.store_address import secret_of
from hiserve.config.settings import CacheIdentity, FileStamp, Settings
from hiserve.core.kv_groups import Space, debug_groups
from hiserve.core.step_memory import segment_for
from hiserve.distributed.shard import Shard
from hiserve.errors import ConfigError
from hiserve.models.cache_digests import cache_namespace, shape_digest, stamps, weight_digests
from hiserve.models.draft_config import DraftConfig, page_groups, read_draft
from hiserve.models.model_config import ModelConfig
from hiserve.models.shards import local_config


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
