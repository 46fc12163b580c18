"""Tiers of the cache that cannot help as they are configured: said at the start and by ``hiserve doctor``."""

from __future__ import annotations

from hiserve.config import known
from hiserve.core.resolve import GIB, Resolved

LEAST_SHARE = 0.05  # of the device's pages; a host cache below that adds next to nothing
_POOLS = ("KV pool", "KV pool of drafts")


def tier_remarks(resolved: Resolved) -> list[str]:
    """Returns one line for each tier that cannot help: the fact, the limit and the remedy."""
    cache = resolved.config.cache
    device_pages = known(cache.kv_pages)
    page_bytes = sum(resolved.memory.get(item, 0) for item in _POOLS) // device_pages
    host_pages = max(0, int(known(cache.host_cache_gib) * GIB) // page_bytes - 1)
    store_pages = 0 if cache.store is None else int(cache.store_gib * GIB) // page_bytes
    remarks = []
    if 0 < host_pages < LEAST_SHARE * device_pages:
        remarks.append(
            f"the host cache can hardly help: it holds {host_pages} pages beside the device's {device_pages}. "
            f"Raise --host-cache-gib to {device_pages * page_bytes / GIB:.3g} for as many."
        )
    if cache.store is None:
        return remarks
    if not store_pages:
        remarks.append(
            f"the store cannot help: a page takes {page_bytes / GIB:.3g} GiB and --store-gib is {cache.store_gib:g}. "
            "Raise --store-gib."
        )
    elif store_pages <= device_pages + host_pages:
        remarks.append(
            f"the store helps only after a restart: it holds {store_pages} pages, device and host hold "
            f"{device_pages + host_pages}. Raise --store-gib above {(device_pages + host_pages) * page_bytes / GIB:.3g}."
        )
    if cache.store_prefetch == "timeout" and not cache.store_prefetch_timeout_s:
        remarks.append(
            "the store can hardly help: with --store-prefetch-timeout-s 0 no request waits for it. "
            "Raise it, or say --store-prefetch best_effort."
        )
    return remarks
