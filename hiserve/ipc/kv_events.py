"""KV events as routers outside read them: batches in msgpack, numbered, the last of them kept for replay.

The format is the one that Dynamo, llm-d, AIBrix and the routers of vLLM and SGLang read; see docs/kv-events.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hiserve.core.digest import DIGEST_BYTES

SEQUENCE_BYTES = 8
MAX_KEPT_BATCHES = 10_000
END_OF_REPLAY = ((-1).to_bytes(SEQUENCE_BYTES, "big", signed=True), b"")


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages that a medium has from now on.

    Attributes:
        medium: ``GPU``, ``CPU_PINNED``.
        parent: Digest of the page before; None at the start of a prefix.
        digests: Theirs, joined.
        key: Their packed tokens.
    """

    medium: str
    parent: bytes | None
    digests: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """Pages that a medium has no more; ``digests`` are joined."""

    medium: str
    digests: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """No medium has any page."""


Change = Stored | Removed | Cleared


class _BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: str
    lora_id: None = None
    lora_name: None = None


class _BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str


class _AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


def block_hashes(digests: bytes) -> list[int]:
    """Returns the first 64 bits of each digest, signed, the most significant byte first."""
    return np.frombuffer(digests, dtype=">i8")[:: DIGEST_BYTES // 8].tolist()  # type: ignore[no-any-return]


def encode_batch(now_s: float, changes: Sequence[Change], page_size: int, replica: int) -> bytes:
    """Returns a batch as ``[seconds since 1970, [event ...], data-parallel rank]``."""
    events = [_event(change, page_size) for change in changes]
    return msgspec.msgpack.encode((now_s, events, replica))


def _event(change: Change, page_size: int) -> msgspec.Struct:
    match change:
        case Stored(medium, parent, digests, key):
            return _BlockStored(
                block_hashes=block_hashes(digests),
                parent_block_hash=None if parent is None else block_hashes(parent)[0],
                token_ids=np.frombuffer(key, dtype="<i4").tolist(),
                block_size=page_size,
                medium=medium,
            )
        case Removed(medium, digests):
            return _BlockRemoved(block_hashes(digests), medium)
        case Cleared():
            return _AllBlocksCleared()


class KvEventLog:
    """Numbers batches, and keeps the last of those that say something.

    Args:
        max_batches: How many are kept.
    """

    def __init__(self, max_batches: int = MAX_KEPT_BATCHES) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=max_batches)
        self._next = 0

    def add(self, payload: bytes, *, keep: bool = True) -> bytes:
        """Gives a batch the next number; returns it as it is sent."""
        sequence, self._next = self._next, self._next + 1
        if keep:
            self._kept.append((sequence, payload))
        return sequence.to_bytes(SEQUENCE_BYTES, "big")

    def skip(self, count: int) -> None:
        """Leaves out the numbers of batches that were lost."""
        self._next += count

    def answer(self, request: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields the kept batches from the number that a client asks for, and the end; of nonsense, the end alone."""
        if len(request) == SEQUENCE_BYTES:
            start = int.from_bytes(request, "big")
            for sequence, payload in self._kept:
                if sequence >= start:
                    yield sequence.to_bytes(SEQUENCE_BYTES, "big"), payload
        yield END_OF_REPLAY
