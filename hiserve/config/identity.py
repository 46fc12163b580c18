"""The identity of a server's cache, computed once before its processes start, and sent to them with the settings."""

from __future__ import annotations

import msgspec


class FileStamp(msgspec.Struct, frozen=True, array_like=True):
    """A file when the identity was computed; valid for one run of the server, and no part of the namespace."""

    path: str
    inode: int  # number of the file within its file system
    num_bytes: int
    mtime_ns: int


class CacheIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Content and layout of a server's cache.

    Attributes:
        namespace: 16 bytes. Digest of everything that determines keys and values, and of the server's secret; tenants'
            namespaces are derived from it.
        page_bytes: Bytes of a host page, all groups together.
        shape: 16 bytes. Digest of the parsed configurations; a worker compares it with those that it has read.
        files: Of the weights; a worker compares them after it has read them.
    """

    namespace: bytes
    page_bytes: int
    shape: bytes
    files: tuple[FileStamp, ...]
