"""The sizes of a worker's memory with their reasons, and remarks on tiers that cannot help."""

from __future__ import annotations

import msgspec

from hiserve.config.settings import CacheSettings, SchedulerSettings, SpecSettings
from hiserve.core.machine import GIB

LEAST_HOST_SHARE = 0.05  # of the device's pages; a host cache below that adds next to nothing


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one worker. On cpu its host cache is one of ``parts``."""

    kv_pages: int  # pages of the device pool, the padding page included
    window_pages: int  # pages of layers with a window, the padding page included; 0 where all layers share pages
    snapshot_slots: int  # of recurrent states, the padding slot included; 0 of a model without
    tail_share: float  # of window pages and snapshots in the memory of all pools; 0 without them
    tail_every: int  # tokens between two tails of a prompt; 0 for none between
    page_bytes: int  # bytes of a page, drafts and debugging included
    max_model_len: int  # longest request, in tokens
    host_cache_gib: float  # size of the host cache; 0 for none
    scheduler: SchedulerSettings  # with fewer requests at once, if what they carry along took too much memory
    spec: SpecSettings
    free: int  # bytes that a worker may use where the model runs
    parts: dict[str, int]  # bytes by item, where the model runs
    host_parts: dict[str, int]  # bytes by item beside a device; empty on cpu
    reasons: dict[str, str]  # the reason of each value that was ``auto``, by option

    def lines(self) -> tuple[str, ...]:
        """Returns a line for each size, with its reason."""
        sizes = {
            "kv_pages": f"{self.kv_pages:,} KV pages of {self.page_bytes:,} bytes",
            "max_model_len": f"requests of up to {self.max_model_len:,} tokens",
            "host_cache_gib": f"a host cache of {self.host_cache_gib:.3g} GiB",
        }
        return tuple(f"{size}: {self.reasons.get(name, 'as given')}" for name, size in sizes.items())

    def remarks(self, cache: CacheSettings) -> list[str]:
        """Returns one line for each tier that cannot help: the fact, the limit and the remedy.

        Args:
            cache: The settings that follow from this plan.
        """
        host_pages = max(0, int(self.host_cache_gib * GIB) // self.page_bytes - 1)
        found = []
        if 0 < host_pages < LEAST_HOST_SHARE * self.kv_pages:
            found.append(
                f"the host cache can hardly help: it holds {host_pages} pages beside the device's {self.kv_pages}. "
                f"Raise --host-cache-gib to {self.kv_pages * self.page_bytes / GIB:.3g} for as many."
            )
        return found + self._store_remarks(cache, self.kv_pages + host_pages)

    def _store_remarks(self, cache: CacheSettings, nearer_pages: int) -> list[str]:
        """Returns the remarks on the store; ``nearer_pages`` are those of device and host together."""
        if cache.store is None:
            return []
        store_pages = int(cache.store_gib * GIB) // self.page_bytes
        found = []
        if not store_pages:
            found.append(
                f"the store cannot help: a page takes {self.page_bytes / GIB:.3g} GiB and --store-gib is "
                f"{cache.store_gib:g}. Raise --store-gib."
            )
        elif store_pages <= nearer_pages:
            found.append(
                f"the store helps only after a restart: it holds {store_pages} pages, device and host hold "
                f"{nearer_pages}. Raise --store-gib above {nearer_pages * self.page_bytes / GIB:.3g}."
            )
        if cache.store_prefetch == "timeout" and not cache.store_prefetch_timeout_s:
            found.append(
                "the store can hardly help: with --store-prefetch-timeout-s 0 no request waits for it. "
                "Raise it, or say --store-prefetch best_effort."
            )
        return found
