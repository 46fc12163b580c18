"""Digests of prefixes: one of the namespace, then a chain with one per page."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:  # a command line is refused sooner without it
    import numpy as np

DIGEST_BYTES = 16

Chain = Callable[[bytes, bytes, int], list[bytes]]


def namespace_digest(*parts: str | bytes) -> bytes:
    """Returns the 16-byte digest of the fields that separate two caches.

    Each part is length-prefixed, so that ``("ab", "c")`` and ``("a", "bc")`` differ. Some parts are secrets, others come from
    callers: the digest resists collisions and reveals no part.
    """
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.digest()[:DIGEST_BYTES]


def chain(parent: bytes, key: bytes, page_size: int) -> list[bytes]:
    """Returns one digest per full page of ``key``, each covering everything before it.

    Args:
        parent: Digest of the page before ``key`` (the namespace digest at the start).
        key: Packed int32 token ids; a trailing partial page is ignored.
        page_size: Tokens per page.
    """
    return _links(xxhash.xxh3_128_digest, parent, key, page_size)


def strong_chain(parent: bytes, key: bytes, page_size: int) -> list[bytes]:
    """As ``chain``, but collision resistant; takes about 1 us per page."""
    return _links(_sha256, parent, key, page_size)


def chain_of(is_strong: bool) -> Chain:
    """Returns the chain that all parts of a server use.

    Args:
        is_strong: Pages are found by digest alone, as in a store; the radix tree also compares tokens.
    """
    return strong_chain if is_strong else chain


def pack_tokens(tokens: np.ndarray) -> bytes:
    """Returns token ids as little-endian int32 bytes, the form of keys."""
    return tokens.astype("<i4", copy=False).tobytes()


def _links(link: Callable[[bytes], bytes], parent: bytes, key: bytes, page_size: int) -> list[bytes]:
    stride = 4 * page_size
    digests = []
    for start in range(0, len(key) - stride + 1, stride):
        parent = link(parent + key[start : start + stride])
        digests.append(parent)
    return digests


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def split_digests(joined: bytes) -> list[bytes]:
    """Splits joined digests."""
    return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]
