"""Which cache a server may use: computed once, before its processes start, and shipped to them in the configuration."""

from __future__ import annotations

import msgspec


class FileStamp(msgspec.Struct, frozen=True, array_like=True):
    """A file as it was when the identity was computed. It serves one server's life and is no part of the namespace."""

    path: str
    inode: int  # number of the file within its file system
    num_bytes: int
    mtime_ns: int


class CacheIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's cache is of.

    Attributes:
        namespace: 16 bytes. Digest of everything that shapes keys and values, and of the server's secret; a tenant's own
            namespace is derived from it.
        page_bytes: Bytes of a page off the device, all groups together.
        shape: 16 bytes. Digest of the parsed configurations alone; a worker compares it with what it has read itself.
        files: The weights' files; a worker compares them after it has read them.
    """

    namespace: bytes
    page_bytes: int
    shape: bytes
    files: tuple[FileStamp, ...]
