"""Digests that name a prefix: one namespace, then a chain with one link per page."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import xxhash

DIGEST_BYTES = 16

Chain = Callable[[bytes, bytes, int], list[bytes]]


def namespace_digest(*parts: str | bytes) -> bytes:
    """Returns the 16-byte digest of the fields that keep two caches apart.

    Each part is length-prefixed, so that ``("ab", "c")`` and ``("a", "bc")`` differ. Some parts are secrets, others
    are chosen by callers: nobody can make two namespaces meet, or tell the parts from the digest.
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
    """Returns what ``chain`` does, at some 1 us a page, by a hash for which nobody can choose prompts that collide."""
    return _links(_sha256, parent, key, page_size)


def chain_of(is_strong: bool) -> Chain:
    """Returns the chain that all parts of a server use.

    Args:
        is_strong: Pages are found by their digest alone, as in a store. The radix tree compares tokens as well.
    """
    return strong_chain if is_strong else chain


def pack_tokens(tokens: np.ndarray) -> bytes:
    """Packs token ids into the little-endian int32 bytes that keys are made of."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


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
    """Returns the single digests of several joined ones."""
    return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]
