"""The host segment of each rank of each replica: its layout, its name, and the segment of a former server."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hiserve.cache.storage.inventory import parts_of_groups
from hiserve.cache.storage.segment import SHARED_MEMORY, Segment, SegmentLayout, segment_path, stored_layout
from hiserve.config.options import Options
from hiserve.config.settings import Settings
from hiserve.core.machine import GIB, Machine


def probe_segments(options: Options, machine: Machine, directory: Path = SHARED_MEMORY) -> Machine:
    """Returns the machine with the segments of a former server counted as available memory.

    Args:
        options: As given.
        machine: As probed.
        directory: Of named segments.

    Raises:
        ConfigError: ``--host-cache-name`` is malformed, or names something that is no segment of this version.
    """
    kept, taken = 0, 0
    for name in _names(options):
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


def remarks_on_parts(options: Options, directory: Path = SHARED_MEMORY) -> list[str]:
    """Returns a line if groups of other sizes have left parts under ``--host-cache-name`` that no process has open and this version can read.

    They are not removed: the next group of their size may adopt what is in them.
    """
    own = _names(options)
    parts = [each for name in own for each in parts_of_groups(name, directory)]
    left = {each.name: each.num_bytes for each in parts if each.name not in own and not (each.is_used or each.trouble)}
    if not left:
        return []
    sizes = ", ".join(f"{name} ({num_bytes / GIB:.3g} GiB)" for name, num_bytes in left.items())
    return [
        f"{directory} holds host caches of groups of another size (--tp): {sizes}. They are kept for such a group; "
        f"to free their memory: hiserve cache delete {' '.join(left)}"
    ]


def layout_of(settings: Settings) -> SegmentLayout | None:
    """Returns the layout of each segment; None without a host cache of at least two pages."""
    host_bytes = int(settings.cache.host_cache_gib * GIB)
    if not host_bytes:
        return None
    identity = settings.cache_identity
    num_pages = host_bytes // identity.page_bytes
    if num_pages < 2:
        return None
    return SegmentLayout(identity.namespace, settings.cache.page_size, identity.page_bytes, num_pages)


def open_segment(
    settings: Settings, replica: int, directory: Path = SHARED_MEMORY, *, rank: int = 0, patience_s: float = 0.0
) -> Segment | None:
    """Creates the segment of a rank of a replica, or opens the one of its name; None without a host cache.

    Args:
        settings: With the cache's identity.
        replica: Index from 0.
        directory: Of named segments.
        rank: Of a group, likewise.
        patience_s: As for ``Segment.named``.

    Raises:
        ConfigError: As ``Segment.named``.
        ResourceError: There is no room, or another server uses the segment.
    """
    layout = layout_of(settings)
    if layout is None:
        return None
    names = _names(settings)
    if not names:
        return Segment.anonymous(layout)
    return Segment.named(names[replica * settings.parallel.tp + rank], layout, directory, patience_s=patience_s)


def _names(options: Options) -> list[str]:
    """Returns the name of each rank's segment, replica by replica; empty without ``--host-cache-name``."""
    name, count, size = options.cache.host_cache_name, options.parallel.replicas, options.parallel.tp
    if name is None:
        return []
    names = [name] if count == 1 else [f"{name}-{replica}" for replica in range(count)]
    # Of groups of other sizes the pages may be as large, and hold other heads.
    return [f"{each}-{rank}-of-{size}" if rank else each for each in names for rank in range(size)]
