"""KV events for external routers: batches in msgpack.

The format is the one that Dynamo, llm-d, AIBrix and the routers of vLLM and SGLang read; see docs/kv-events.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hiserve.core.digest import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages that a medium has gained."""

    medium: str  # ``GPU``, ``CPU_PINNED``
    parent: bytes | None  # digest of the previous page; None at the start of a prefix
    digests: bytes  # of the pages, joined
    key: bytes  # their packed tokens


@dataclass(frozen=True, slots=True)
class Removed:
    """Pages that a medium has lost; ``digests`` are joined."""

    medium: str
    digests: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """All media have lost all pages."""


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
    """Returns the first 64 bits of each digest, signed, big-endian."""
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
