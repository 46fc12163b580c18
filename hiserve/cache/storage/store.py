"""What a page store promises, and the envelope that keeps a store from lying."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from hiserve.cache.storage.records import page_checksum
from hiserve.cache.storage.store_keys import KEY_BYTES
from hiserve.ipc.cache_stats import StoreStats

HEADER_BYTES = 64

_MAGIC = b"hiserve\1"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQ32s")  # magic, version, bytes of the page, checksum, key
assert _HEADER.size == HEADER_BYTES


class PageStore(Protocol):
    """Pages by key, on something slow that may fail.

    A store is a cache: it may forget any page at any time, and a failure is a miss. No method raises for
    anything but the caller's own mistakes. Methods block, up to for ever, so they are called from threads that
    may; several threads may call at once. After ``close`` everything misses.

    Keys have ``KEY_BYTES`` bytes and are collision-free even against whoever chooses prompts (see ``store_key``).
    A page's bytes never change, so a key that is there need not be written again. Pages are handed over in
    the order of their prefix; where a store must choose, the end of a prefix goes before its start.

    Every page lies in the store with a header (``seal``), and ``get`` checks it (``is_intact``): the medium is not trusted.
    """

    def exists(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading keys are there, the first missing one excluded. A guess: ``get`` may find less."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """Reads pages until the first that is missing or damaged.

        Args:
            keys: Which pages.
            buffers: Where each goes; writable bytes of exactly the page's size.

        Returns:
            How many leading buffers hold their pages, verified. What the others hold is undefined.
        """

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """Writes pages that are not there yet, until the first that cannot be written.

        Returns:
            How many leading pages are there now.
        """

    def clear(self) -> int:
        """Removes every page of everybody; returns how many."""

    def stats(self) -> StoreStats:
        """Returns the counts, each exact, though not all of one moment. Waits for nothing: it is asked at every step."""

    def close(self) -> None:
        """Lets go of the store; its pages stay. Calls that hang in it may go on hanging, or return 0."""


def seal(key: bytes, page: memoryview) -> bytes:
    """Returns the ``HEADER_BYTES`` bytes that stand before a page in a store."""
    assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
    return _HEADER.pack(_MAGIC, _VERSION, page.nbytes, page_checksum(page, key), key)


def is_intact(key: bytes, header: bytes | bytearray, page: memoryview) -> bool:
    """Returns whether this header and page are what was stored under the key. Reads the whole page."""
    return bytes(header) == seal(key, page)
