"""Pages whose bytes follow from their digest, so that anybody can tell whether they are true."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from hiserve.cache.storage.checksums import page_checksum
from hiserve.cache.storage.records import Records
from hiserve.cache.storage.segment import SegmentLayout
from hiserve.cache.storage.store import store_key
from hiserve.core.digest import chain, namespace_digest, pack_tokens
from hiserve.core.transfers import PageRun

PAGE_SIZE = 4
PAGE_BYTES = 128
NAMESPACE = namespace_digest("a model")
TENANTS = (namespace_digest(NAMESPACE, "one"), namespace_digest(NAMESPACE, "two"))


def make_layout(num_pages: int = 16, page_bytes: int = PAGE_BYTES, page_size: int = PAGE_SIZE) -> SegmentLayout:
    return SegmentLayout(NAMESPACE, page_size, page_bytes, num_pages)


def make_run(
    pages: Sequence[int],
    tokens: Sequence[int],
    *,
    namespace: bytes = TENANTS[0],
    parent: bytes | None = None,
    page_size: int = PAGE_SIZE,
    draft_revision: int = 0,
) -> PageRun:
    """A run with one token id a page, repeated."""
    key = pack_tokens(np.repeat(np.array(tokens, dtype=np.int32), page_size))
    parent = namespace if parent is None else parent
    digests = chain(parent, key, page_size)
    return PageRun(np.array(pages, dtype=np.int32), namespace, parent, digests, key, draft_revision)


def make_keys(name: str, count: int) -> list[bytes]:
    """Store keys of pages that nobody has anything to do with."""
    return [store_key(namespace_digest(name, str(index))) for index in range(count)]


def content(digest: bytes, num_bytes: int = PAGE_BYTES) -> np.ndarray:
    """The bytes that a page of this digest must hold."""
    return np.frombuffer(hashlib.shake_128(digest).digest(num_bytes), dtype=np.uint8)


def fill(pages: np.ndarray, run: PageRun) -> None:
    """Copies the bytes of a run to where they belong."""
    for page, digest in zip(run.pages, run.digests, strict=True):
        pages[page] = content(digest, pages.shape[1])


def seal(records: Records, pages: np.ndarray, page: int) -> bool:
    """Does for one page what the checksum thread does."""
    ours, lives, digests = records.unsealed(np.array([page], dtype=np.int32))
    return bool(records.seal(ours, lives, [page_checksum(pages[page].data, digest) for digest in digests]).size)


def store(records: Records, pages: np.ndarray, run: PageRun) -> PageRun:
    """Takes a run through its whole life to VALID with a checksum."""
    records.begin(run)
    fill(pages, run)
    records.finish(run.pages)
    assert all(seal(records, pages, int(page)) for page in run.pages)
    return run


def told(runs: Sequence[PageRun]) -> dict[int, tuple[bytes, bytes, bytes, bytes, int]]:
    """Flattens runs to page: (namespace, parent, digest, key, draft_revision)."""
    flat = {}
    for run in runs:
        stride = len(run.key) // len(run.digests)
        parents = [run.parent, *run.digests[:-1]]
        for index, (page, digest) in enumerate(zip(run.pages.tolist(), run.digests, strict=True)):
            key = run.key[index * stride : (index + 1) * stride]
            flat[page] = (run.namespace, parents[index], digest, key, run.draft_revision)
    return flat
