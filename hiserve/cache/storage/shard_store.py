"""A rank's pages in the store of its group: each rank has its share of a page under a key of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hiserve.cache.storage.store import PageStore
from hiserve.ipc.cache_stats import StoreStats


class ShardStore:
    """A ``PageStore`` of one rank. A page is of use only if every rank has its share, which the first rank looks for.

    Args:
        store: Of all ranks, and of other groups; a share has other keys in groups of other sizes.
        rank: From 0.
        size: Ranks of the group.
    """

    def __init__(self, store: PageStore, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def exists(self, keys: Sequence[bytes]) -> int:
        """As the protocol; on the first rank the fewest of all ranks."""
        count = len(keys)
        for rank in range(self._size) if not self._rank else (self._rank,):
            count = self._store.exists(self._keys(keys[:count], rank)) if count else 0
        return count

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        """As the protocol, of this rank's shares."""
        return self._store.get(self._keys(keys, self._rank), buffers, self._keys(before, self._rank))

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview], before: Sequence[bytes] = ()) -> int:
        """As the protocol, of this rank's shares."""
        return self._store.put(self._keys(keys, self._rank), buffers, self._keys(before, self._rank))

    def clear(self) -> int:
        """As the protocol: also pages of other ranks."""
        return self._store.clear()

    def stats(self) -> StoreStats:
        """As the protocol, of the calls of this rank."""
        return self._store.stats()

    def close(self) -> None:
        """As the protocol."""
        self._store.close()

    def _keys(self, keys: Sequence[bytes], rank: int) -> list[bytes]:
        shard = b"hiserve shard\0" + rank.to_bytes(4, "little") + self._size.to_bytes(4, "little")
        return [hashlib.sha256(shard + key).digest() for key in keys]
