"""Shares of pages in one store (S9)."""

from __future__ import annotations

from pathlib import Path

from hiserve.cache.storage.file_store import FileStore
from hiserve.cache.storage.shard_store import ShardStore
from hiserve.cache.storage.store import store_key

KEYS = [store_key(bytes([number]) * 16) for number in range(3)]


def pages(byte: int, count: int = 3) -> list[memoryview]:
    return [memoryview(bytearray([byte]) * 64) for _ in range(count)]


def test_a_page_is_there_when_every_rank_has_its_share(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1 << 20)
    first, second = (ShardStore(store, rank, 2) for rank in range(2))
    assert first.put(KEYS, pages(1)) == 3
    assert (first.exists(KEYS), second.exists(KEYS)) == (0, 0)
    assert second.put(KEYS[:2], pages(2, 2), KEYS[2:]) == 2
    assert (first.exists(KEYS), second.exists(KEYS)) == (2, 2)
    got = pages(0)
    assert second.get(KEYS, got, KEYS) == 2
    assert [bytes(each[:1]) for each in got[:2]] == [b"\2"] * 2
    others = [store, ShardStore(store, 0, 4), ShardStore(store, 0, 1)]
    assert [each.exists(KEYS) for each in others] == [0, 0, 0]  # groups of another size
    assert first.clear() == 5
    assert second.exists(KEYS) == 0
