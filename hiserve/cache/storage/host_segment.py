"""Which segment a configuration wants: its layout, its name, and what a former server left of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hiserve.cache.storage.cache_identity import identity_of
from hiserve.cache.storage.segment import SHARED_MEMORY, Segment, SegmentLayout, segment_path, stored_layout
from hiserve.config import Config, known
from hiserve.core.resolve import GIB, Machine


def probe_segments(config: Config, machine: Machine, directory: Path = SHARED_MEMORY) -> Machine:
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


def layout_of(config: Config) -> SegmentLayout | None:
    """Returns what the segment of each replica must be; None without a host cache.

    Args:
        config: Resolved, with its identity.
    """
    host_bytes = int(known(config.cache.host_cache_gib) * GIB)
    if not host_bytes:
        return None
    identity = identity_of(config)
    num_pages = host_bytes // identity.page_bytes
    if num_pages < 2:
        return None
    return SegmentLayout(identity.namespace, config.cache.page_size, identity.page_bytes, num_pages)


def open_segment(config: Config, replica: int, directory: Path = SHARED_MEMORY) -> Segment | None:
    """Makes the segment of a replica, or takes over the one of its name; None without a host cache.

    Args:
        config: Resolved, with its identity.
        replica: Index from 0.
        directory: Where named segments lie.

    Raises:
        ConfigError: As ``Segment.named``.
        ResourceError: There is no room, or another server uses the segment.
    """
    layout = layout_of(config)
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
