"""A prefix index without a tree: every cached page by its whole prefix. Slow, plain, the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import xxhash

from hiserve.cache.index.eviction import MAX_IDLE_TURNOVERS
from hiserve.core.digest import namespace_digest

Prefix = tuple[bytes, ...]  # the packed tokens of each page, first to last
Place = tuple[bytes, Prefix]  # tenant and prefix: what a page holds, in context


def page_tokens(symbol: int, page_size: int) -> bytes:
    """Packs one page; pages of different symbols differ in their first or only in their last token."""
    tokens = np.zeros(page_size, dtype="<i4")
    tokens[-1 if symbol == 1 else 0] = symbol
    return tokens.tobytes()


def prefixes(prefix: Prefix) -> list[Prefix]:
    """Returns every non-empty leading part, shortest first."""
    return [prefix[: i + 1] for i in range(len(prefix))]


def retain_some(times: dict[Place, int], wanted: list[Place], room: int, until: int) -> int:
    """Retains places longer, and as many others, from the first on, as there is room; returns how many are left out."""
    for i, place in enumerate(wanted):
        if place not in times and room <= 0:
            return len(wanted) - i
        room -= place not in times
        times[place] = max(times.get(place, 0), until)
    return 0


class IndexModel:
    """What the index must answer, recomputed from plain dictionaries.

    Attributes:
        cached: The page that holds each place.
        used: Logical time at which each cached place was last in use.
        free: Pages nobody has.
        private: Pages taken and not published.
        held: Places that each open lock ends at, by a number of our own.
        given: Pages evicted so far.
        seen: How many were when a tenant last locked something.
        until: Places that go after all others until a time.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.cached: dict[Place, int] = {}
        self.used: dict[Place, int] = {}
        self.free = set(range(1, num_pages))
        self.private: list[int] = []
        self.held: dict[int, Place] = {}
        self.given = 0
        self.seen: dict[bytes, int] = {}
        self.until: dict[Place, int] = {}
        self._clock = 0

    def match(self, tenant: bytes, prompt: bytes, page_bytes: int) -> Prefix:
        """Returns the longest cached prefix that leaves the prompt's last token out."""
        pages = [prompt[i : i + page_bytes] for i in range(0, len(prompt), page_bytes)]
        best: Prefix = ()
        for prefix in prefixes(tuple(pages[: (len(prompt) // 4 - 1) // (page_bytes // 4)] if prompt else [])):
            if (tenant, prefix) not in self.cached:
                break
            best = prefix
        return best

    def pages_of(self, tenant: bytes, prefix: Prefix) -> list[int]:
        """Returns where a cached prefix lies."""
        return [self.cached[tenant, part] for part in prefixes(prefix)]

    def hold(self, number: int, tenant: bytes, prefix: Prefix) -> None:
        """A lock begins, or moves on to a longer prefix."""
        self.held[number] = (tenant, prefix)
        self.seen[tenant] = self.given
        self._use(tenant, prefix)

    def release(self, number: int) -> None:
        """A lock ends."""
        self._use(*self.held.pop(number))

    def locked(self) -> set[Place]:
        """Returns the places that may not be evicted."""
        return {(tenant, part) for tenant, prefix in self.held.values() for part in prefixes(prefix)}

    def evictable(self) -> set[Place]:
        """Returns the places that may be evicted, in time."""
        return set(self.cached) - self.locked()

    def evict(self, count: int) -> list[int]:
        """Evicts page by page: the least recently used of those that are due with nothing cached or locked below."""
        lost: list[int] = []
        floors = self.floors()
        floor = next(floors)
        while len(lost) < count:
            parents = {(tenant, prefix[:-1]) for tenant, prefix in self.cached}
            pages = Counter(tenant for tenant, _ in self.cached)
            leaves = {leaf for leaf in self.evictable() - parents if pages[leaf[0]] > floor.get(leaf[0], 0)}
            if not leaves:
                floor = next(floors)
                continue
            victim = min(leaves, key=lambda place: (self.until.get(place, 0), self.used[place]))
            del self.used[victim]
            self.until.pop(victim, None)
            lost.append(self.cached.pop(victim))
            self.given += 1
        self.free |= set(lost)
        return lost

    def retain(self, number: int, num_pages: int, until: int) -> int:
        """Retains the first pages that lock ``number`` holds, up to a quarter for each tenant; returns how many are beyond that."""
        tenant, prefix = self.held[number]
        wanted = [(tenant, part) for part in prefixes(prefix)[:num_pages]]
        return retain_some(
            self.until, wanted, (self.num_pages - 1) // 4 - sum(t == tenant for t, _ in self.until), until
        )

    def floors(self) -> Iterator[dict[bytes, int]]:
        """Tells down to what tenants give pages: to their shares; if that is not enough, to the mean; to nothing."""
        pages = Counter(tenant for tenant, _ in self.cached)
        if len(pages) > 1:
            capacity = self.num_pages - 1
            active = [tenant for tenant in pages if self.seen[tenant] >= self.given - MAX_IDLE_TURNOVERS * capacity]
            yield dict.fromkeys(active, capacity // max(1, len(active)))
            pages = Counter(tenant for tenant, _ in self.cached)
            yield dict.fromkeys(pages, len(self.cached) // max(1, len(pages)))
        yield {}

    def publish(self, number: int, new: Prefix, pages: list[int]) -> list[int]:
        """Caches the pages after lock ``number``; returns those to use, and frees the copies."""
        tenant, prefix = self.held[number]
        canonical = []
        for content, page in zip(new, pages, strict=True):
            prefix = (*prefix, content)
            self.private.remove(page)
            known = self.cached.setdefault((tenant, prefix), page)
            canonical.append(known)
            if known != page:
                self.free.add(page)
        self.held[number] = (tenant, prefix)
        self._use(tenant, prefix)
        return canonical

    def continuation(self, number: int) -> Prefix:
        """Returns pages that others have cached after lock ``number``: one way down to a leaf."""
        tenant, held = self.held[number]
        prefix = held
        while below := [p for t, p in self.cached if t == tenant and p[:-1] == prefix]:
            prefix = max(below)
        return prefix[len(held) :]

    def digests(self, namespace: bytes) -> set[bytes]:
        """Returns the chain digests of everything cached, each computed from its root."""
        found = set()
        for tenant, prefix in self.cached:
            digest = self.root_digest(namespace, tenant)
            for page in prefix:
                digest = xxhash.xxh3_128(digest + page).digest()
            found.add(digest)
        return found

    @staticmethod
    def root_digest(namespace: bytes, tenant: bytes) -> bytes:
        """Returns the digest that a tenant's chain starts with."""
        return namespace_digest(namespace, tenant)

    def _use(self, tenant: bytes, prefix: Prefix) -> None:
        self._clock += 1
        for part in prefixes(prefix):
            self.used[tenant, part] = self._clock
