"""Digests that name a prefix: one namespace, then a chain with one link per page."""

from __future__ import annotations

import numpy as np
import xxhash

DIGEST_BYTES = 16


def namespace_digest(*parts: str | bytes) -> bytes:
    """Returns the 16-byte digest of the fields that keep two caches apart.

    Each part is length-prefixed, so that ``("ab", "c")`` and ``("a", "bc")`` differ.
    """
    hasher = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.digest()


def chain(parent: bytes, key: bytes, page_size: int) -> list[bytes]:
    """Returns one digest per full page of ``key``, each covering everything before it.

    Args:
        parent: Digest of the page before ``key`` (the namespace digest at the start).
        key: Packed int32 token ids; a trailing partial page is ignored.
        page_size: Tokens per page.
    """
    stride = 4 * page_size
    digests = []
    for start in range(0, len(key) - stride + 1, stride):
        parent = xxhash.xxh3_128_digest(parent + key[start : start + stride])
        digests.append(parent)
    return digests


def pack_tokens(tokens: np.ndarray) -> bytes:
    """Packs token ids into the little-endian int32 bytes that keys are made of."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()
