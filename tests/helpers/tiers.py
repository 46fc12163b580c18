"""Short words for tests of the two-tier index."""

from __future__ import annotations

import numpy as np

from hiserve.cache.index.locks import path
from hiserve.cache.index.prefix_cache import HostAdmission, PrefixCache, PrefixLock, TailSizes, TierListener
from hiserve.cache.index.tail_pool import NO_TAILS
from hiserve.core.digest import chain, namespace_digest, pack_tokens
from hiserve.core.plan import Int32Array
from hiserve.core.transfers import PageCopy, PageRun

PAGE_SIZE = 2
TENANT = b"tenant"
NAMESPACE = b"model"


def key(*pages: int) -> bytes:
    """Packs one page per number."""
    return pack_tokens(np.array([[page, page] for page in pages], dtype=np.int32))


def prompt(*pages: int) -> bytes:
    """Packs whole pages and the one token that is never cached."""
    return key(*pages) + bytes(4)


def new_cache(
    num_pages: int = 32,
    num_host_pages: int = 32,
    *,
    admission: HostAdmission = HostAdmission.WRITE_THROUGH,
    max_upload_pages: int = 0,
    listener: TierListener | None = None,
    tails: TailSizes = NO_TAILS,
) -> PrefixCache:
    return PrefixCache(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        namespace=NAMESPACE,
        num_host_pages=num_host_pages,
        host_admission=admission,
        max_upload_pages=max_upload_pages,
        listener=listener,
        tails=tails,
    )


def take(cache: PrefixCache, count: int) -> Int32Array:
    pages = cache.allocate(np.zeros(count, dtype=np.int32))
    assert pages is not None
    return pages


def serve(cache: PrefixCache, *pages: int, tenant: bytes = TENANT, step: int = 0) -> PrefixLock:
    """Locks what the device has of a prompt, publishes the rest, and hands the lock over."""
    receipt = cache.lock(cache.match(tenant, prompt(*pages)))
    new = pages[receipt.pages.size :]
    cache.insert(receipt, key(*new), take(cache, len(new)), step)
    return receipt


def store(cache: PrefixCache, max_pages: int = 1000) -> list[PageCopy]:
    """Stores what waits for it, children after their parents, until nothing does."""
    done: list[PageCopy] = []
    while copies := cache.begin_offloads(max_pages):
        for copy in copies:
            assert cache.complete(copy.op, ok=True) == []
        done += copies
    return done


def backed(cache: PrefixCache, *pages: int, tenant: bytes = TENANT) -> None:
    """Puts a prefix on both tiers, held by nobody."""
    cache.release(serve(cache, *pages, tenant=tenant))
    store(cache)


def demoted(cache: PrefixCache, *pages: int, tenant: bytes = TENANT) -> None:
    """Puts a prefix on the host alone."""
    backed(cache, *pages, tenant=tenant)
    squeeze(cache)


def squeeze(cache: PrefixCache) -> None:
    """Evicts everything from the device that may go."""
    cache.free(take(cache, cache.device.pages.num_free + cache.device.num_evictable))


def squeeze_host(cache: PrefixCache) -> None:
    """Evicts everything from the host that may go."""
    cache.tiers.free_host(cache.tiers.allocate_host(cache.host.num_available))


def cached(cache: PrefixCache, *pages: int, tenant: bytes = TENANT) -> tuple[int, int]:
    """Returns how many pages of a prompt the device has, and the host after them."""
    match = cache.match(tenant, prompt(*pages))
    return match.num_tokens // PAGE_SIZE, match.num_host_tokens // PAGE_SIZE


def lock(cache: PrefixCache, *pages: int, tenant: bytes = TENANT) -> PrefixLock:
    """Locks everything that is cached of a prompt, on either tier."""
    match = cache.match(tenant, prompt(*pages))
    return cache.lock(match, match.num_host_tokens)


def load(cache: PrefixCache, *pages: int) -> tuple[PrefixLock, PageCopy]:
    """Locks a prompt and begins to load what the host has of it."""
    receipt = lock(cache, *pages)
    return receipt, cache.begin_load(receipt, take(cache, receipt.host_pages.size))


def states(cache: PrefixCache) -> str:
    """Returns the state of every node, in the order of their paths."""
    found = sorted(("".join(part.key.hex() for part in reversed(list(path(n)))), n.state) for n in cache.tree.nodes())
    return " ".join(state.name for _, state in found)


def digests(*pages: int, tenant: bytes = TENANT) -> list[bytes]:
    """Returns the chain digests of a prefix."""
    return chain(namespace_digest(NAMESPACE, tenant), key(*pages), PAGE_SIZE)


def run_of(pages: Int32Array, *content: int, after: tuple[int, ...] = (), tenant: bytes = TENANT) -> PageRun:
    """Returns the record of a run: ``content`` after ``after``, at ``pages`` of the host."""
    root = namespace_digest(NAMESPACE, tenant)
    links = [root, *digests(*after, *content, tenant=tenant)]
    return PageRun(
        pages=pages, namespace=root, parent=links[len(after)], digests=links[len(after) + 1 :], key=key(*content)
    )


def is_whole(cache: PrefixCache) -> bool:
    """Whether every page of both tiers is free or can be freed: nothing leaked and nothing is held."""
    squeeze(cache)
    squeeze_host(cache)
    full = (
        cache.device.pages.num_free == cache.device.pages.num_pages - 1,
        cache.host.pages.num_free == cache.host.pages.num_ready - 1,
    )
    return all(full) and not cache.tree.roots and not len(cache.ops)
