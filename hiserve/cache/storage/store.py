"""The protocol of page stores, the keys and headers of their pages, and the secret that separates servers' keys."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hiserve.cache.storage.checksums import page_checksum
from hiserve.errors import ConfigError
from hiserve.ipc.cache_stats import StoreStats

KEY_BYTES = 32
SECRET_BYTES = 32
HEADER_BYTES = 64

_MAGIC = b"hiserve\1"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQ32s")  # magic, version, bytes of the page, checksum, key
assert _HEADER.size == HEADER_BYTES


class PageStore(Protocol):
    """Pages of history and tails by key, on a slow medium that may fail. Here a page is either.

    A store is a cache: it may lose any page at any time, and a failure is a miss. Methods raise only for
    mistakes of the caller. Methods may block without limit, so they are called from dedicated
    threads; several threads may call at once. After ``close`` every lookup misses.

    Keys have ``KEY_BYTES`` bytes and are collision-free even if an attacker chooses prompts (see ``store_key``).
    A page's bytes never change, so a present key need not be written again. Pages are passed in the order of their prefix,
    behind some that come before them in it (``before``), which count as used too: of history the last one at least, of a tail
    all. Where a store must choose, the end of a prefix is removed before its start, in whatever calls they were written.

    Every page has a header in the store (``seal``), and ``get`` checks it (``is_intact``): the medium is not trusted.
    """

    def exists(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys that are present. A hint: ``get`` may find fewer."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        """Reads pages up to the first that is missing or damaged. Pages ``before`` them count as used.

        ``buffers`` are writable, each of exactly its page's size. Returns how many leading buffers hold their pages,
        verified; the others are undefined.
        """

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        """Writes pages that are missing, up to the first failure; returns how many leading pages are present.

        Pages ``before`` them count as used; they need not be present.
        """

    def clear(self) -> int:
        """Removes every page, of all servers; returns how many."""

    def stats(self) -> StoreStats:
        """Returns the counts; they may be of different moments. Does not block: it is called in every step."""

    def close(self) -> None:
        """Closes the store; its pages stay. Calls that hang in it may continue to hang, or return 0."""


def store_key(digest: bytes, draft_revision: int = 0) -> bytes:
    """Returns the key of a page in a store.

    A store finds a page by its key alone, where the radix tree compares tokens. So the digest must be of
    ``core.digest.strong_chain``, which covers everything before the page; and since the chain starts from a namespace
    that contains the secret, a key reveals nothing without it.

    Args:
        digest: 16 bytes. The page's.
        draft_revision: Of the draft head that wrote the draft part, 0 to 2**64 - 1; 0 where it is not valid.
    """
    return hashlib.sha256(b"hiserve page\0" + draft_revision.to_bytes(8, "little") + digest).digest()


def tail_key(digest: bytes) -> bytes:
    """Returns the key of a tail in a store: all frames of its image behind each other, so that it is there whole or not at all.

    Args:
        digest: 16 bytes. Of the page before its boundary; see ``store_key``.
    """
    return hashlib.sha256(b"hiserve tail\0" + digest).digest()


def seal(key: bytes, page: memoryview) -> bytes:
    """Returns the header of a page in a store, ``HEADER_BYTES`` bytes."""
    assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
    return _HEADER.pack(_MAGIC, _VERSION, page.nbytes, page_checksum(page, key), key)


def is_intact(key: bytes, header: bytes | bytearray, page: memoryview) -> bool:
    """Whether this header and page are those stored under the key. Reads the whole page."""
    return bytes(header) == seal(key, page)


def read_secret(path: Path) -> bytes:
    """Returns the secret in a private file, which is created if it is missing.

    Servers that start at the same time get the same secret. ``path`` is beside the store or the named segment whose
    keys it protects.

    Raises:
        ConfigError: The file is not private to this user, has not the right length, or cannot be created.
    """
    try:
        if not path.exists():
            _make_secret(path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the cache secret {path} cannot be used: {error.strerror}.") from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"the cache secret {path} must be a file that this user alone can open: chmod 600 {path}")
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"the cache secret {path} must hold {SECRET_BYTES} bytes. Delete it, and the cache with it.")
    return secret


def _make_secret(path: Path) -> None:
    """Writes a new secret to a temporary file and links it to its path; the first process to link wins."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(os.urandom(SECRET_BYTES))
            os.fsync(fd)
        try:
            os.link(draft, path)
        except FileExistsError:
            return  # another server was faster
    finally:
        draft.unlink()
