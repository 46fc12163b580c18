"""Pages for page stores: bytes follow from the key."""

from __future__ import annotations

import random
from pathlib import Path

from tests.helpers.host import make_keys

PAGE_BYTES = 1000


def page(key: bytes, num_bytes: int = PAGE_BYTES) -> memoryview:
    """The bytes that belong to a key; writable, as pages of the host pool are."""
    return memoryview(bytearray(random.Random(key).randbytes(num_bytes)))


def pages(keys: list[bytes]) -> list[memoryview]:
    return [page(key) for key in keys]


def blanks(count: int, num_bytes: int = PAGE_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(num_bytes)) for _ in range(count)]


KEYS = make_keys("x", 20)
PLENTY = 10**9


def path_of(directory: Path, key: bytes) -> Path:
    return directory / key.hex()[:2] / key.hex()


def flip(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
