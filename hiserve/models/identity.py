"""Which model's cache it is: the digest of everything that keeps caches apart but the tenant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hiserve.core.digest import namespace_digest

LAYOUT_VERSION = "1"  # of a page's bytes; caches of different layouts must not meet


def cache_namespace(
    folder: Path,
    *,
    load_format: str,
    shape: str | None,
    dtype: str,
    page_size: int,
    debug_groups: Sequence[str] = (),
    draft: tuple[str, Path] | None = None,
    secret: bytes = b"",
) -> bytes:
    """Returns the 16-byte digest of weights, element type, layout, page size, shard and server.

    Weights are told apart by the names, sizes and times of their files; nobody reads them for this.

    Args:
        folder: Of the checkpoint.
        load_format: Drawn weights are not those of the files.
        shape: Built-in shape in place of the checkpoint's.
        dtype: Element type name of the KV cache.
        page_size: Tokens per page.
        debug_groups: Names of the groups of a page that are there for debugging.
        draft: Kind and folder of what drafts and has groups of its own in a page; None without.
        secret: The server's, where a cache outlives it: who does not know it cannot tell what a digest stands for.
    """
    shard, layout = "1/1", "+".join((LAYOUT_VERSION, *debug_groups))
    weights = (str(folder.resolve()), load_format, shape or "", *_stamps(folder))
    if draft is not None:
        kind, place = draft
        weights = (*weights, kind, str(place.resolve()), *_stamps(place))
    return namespace_digest(secret, *weights, dtype, layout, str(page_size), shard)


def _stamps(folder: Path) -> list[str]:
    files = sorted(folder.glob("*.safetensors"))
    return [f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files]
