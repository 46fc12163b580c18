"""Which segment a configuration wants: its layout, its name, and what a former server left of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hiserve.cache.pools.keys import read_secret
from hiserve.cache.pools.page_layout import PageLayout
from hiserve.cache.pools.segment import SHARED_MEMORY, Segment, SegmentLayout, segment_path, stored_layout
from hiserve.cache.pools.stores import secret_of
from hiserve.config import Config, known
from hiserve.core.groups import debug_groups
from hiserve.core.resolve import GIB, Machine
from hiserve.models.draft_config import DraftConfig
from hiserve.models.identity import cache_namespace
from hiserve.models.shapes import read_model
from hiserve.models.speculation import page_groups, read_draft


def survey(config: Config, machine: Machine, directory: Path = SHARED_MEMORY) -> Machine:
    """Returns what ``resolve`` must know of a machine, the segments that a former server left included.

    Args:
        config: As given.
        machine: As probed.
        directory: Where named segments lie.

    Raises:
        ConfigError: ``--host-cache-name`` is malformed, or names something that is no segment of this version.
    """
    kept, taken = 0, 0
    for name in _names(config):
        layout = stored_layout(name, directory)
        if layout is not None:
            kept = kept or layout.num_pages * layout.page_bytes
            taken += segment_path(name, directory).stat().st_blocks * 512
    return msgspec.structs.replace(
        machine,
        memory_bytes=machine.memory_bytes + taken,
        shm_bytes=machine.shm_bytes + taken,
        kept_bytes=kept,
    )


def server_secret(config: Config, directory: Path = SHARED_MEMORY) -> bytes:
    """Returns the secret that goes into every digest: kept with what outlives the server, empty if nothing does.

    A store may outlive a named segment, which goes when the machine starts again: where there are both, it is the store's.

    Raises:
        ConfigError: The file that holds it cannot be used.
    """
    if config.cache.store is not None:
        return secret_of(config.cache)
    name = config.cache.host_cache_name
    if name is None:
        return b""
    path = segment_path(name, directory)
    return read_secret(path.with_name(f".{path.name}.secret"))


def namespace_of(
    config: Config, folder: Path, draft: DraftConfig | None = None, directory: Path = SHARED_MEMORY
) -> bytes:
    """Returns the digest of everything that keeps this configuration's cache apart from others but the tenant.

    Args:
        config: Resolved.
        folder: Of the model.
        draft: What drafts for it.
        directory: Where named segments lie.

    Raises:
        ConfigError: As ``server_secret``.
    """
    return cache_namespace(
        folder,
        load_format=config.model.load_format,
        shape=config.model.shape,
        dtype=config.model.dtype,
        page_size=config.cache.page_size,
        debug_groups=[group.name for group in debug_groups(config)],
        draft=None if draft is None else (draft.kind, draft.folder),
        secret=server_secret(config, directory),
    )


def layout_of(config: Config, directory: Path = SHARED_MEMORY) -> SegmentLayout | None:
    """Returns what the segment of each replica must be; None without a host cache.

    Args:
        config: Resolved.
        directory: Where named segments lie.

    Raises:
        ModelError: The model cannot be read.
        ConfigError: As ``server_secret``.
    """
    host_bytes = int(known(config.cache.host_cache_gib) * GIB)
    if not host_bytes:
        return None
    folder, model_config = read_model(config.model)
    page_size = config.cache.page_size
    draft = read_draft(config, folder, model_config)
    groups = page_groups(config, model_config, draft)
    page_bytes = PageLayout(groups, page_size).page_bytes
    num_pages = host_bytes // page_bytes
    if num_pages < 2:
        return None
    return SegmentLayout(namespace_of(config, folder, draft, directory), page_size, page_bytes, num_pages)


def open_segment(config: Config, replica: int, directory: Path = SHARED_MEMORY) -> Segment | None:
    """Makes the segment of a replica, or takes over the one of its name; None without a host cache.

    Args:
        config: Resolved.
        replica: Index from 0.
        directory: Where named segments lie.

    Raises:
        ModelError, ConfigError: As ``layout_of`` and ``Segment.named``.
        ResourceError: There is no room, or another server uses the segment.
    """
    layout = layout_of(config, directory)
    if layout is None:
        return None
    names = _names(config)
    return Segment.named(names[replica], layout, directory) if names else Segment.anonymous(layout)


def _names(config: Config) -> list[str]:
    """Returns the name of each replica's segment; nothing where they have none."""
    name, count = config.cache.host_cache_name, config.parallel.replicas
    if name is None:
        return []
    return [name] if count == 1 else [f"{name}-{replica}" for replica in range(count)]
