"""A cache of two tiers without a tree: every page by its whole prefix. Slow, plain, the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tests.invariants.index_model import Place, Prefix, prefixes, retain_some


def parts(place: Place) -> list[Place]:
    """Returns a place and those above it, shortest prefix first."""
    return [(place[0], prefix) for prefix in prefixes(place[1])]


def above(place: Place) -> Place:
    """Returns the place before the last page."""
    return place[0], place[1][:-1]


@dataclass
class OpModel:
    """A copy in flight: where it holds, and which pages left the cache while it used them."""

    kind: str
    end: Place
    pages: list[int]
    host_pages: list[int]
    places: list[Place] = field(default_factory=list)
    is_lost: bool = False
    orphans: set[int] = field(default_factory=set)
    host_orphans: set[int] = field(default_factory=set)


class TierModel:
    """What the index must answer, recomputed from plain dictionaries.

    Attributes:
        device: The device page of each place.
        host: The host page of each place.
        loading: The load that fills a place's device page.
        storing: The store that fills a place's host page.
        used: Logical time at which each place was last in use.
        priority: Largest priority of the requests that used each place.
        until: Places that go after all others until a time.
        held: Where each open receipt ends, by a number of our own.
        priorities: Of the requests that hold them.
        ops: Copies in flight.
        private: Device pages taken and not published.
        wanted: Places that were used more than once.
        given_up: Places whose store failed or found no room; nobody promises another.
        awaited: Places that a store beyond the host is to have; nothing is said of them where there is none.
        num_reserved: Host pages left for staged uploads.
        num_awaited_lost: Of those, pages that left before.
    """

    def __init__(self, num_pages: int, num_host_pages: int, num_ready: int, by_priority: bool = False) -> None:
        self.num_pages, self.num_host_pages, self.num_ready = num_pages, num_host_pages, num_ready
        self.device: dict[Place, int] = {}
        self.host: dict[Place, int] = {}
        self.loading: dict[Place, int] = {}
        self.storing: dict[Place, int] = {}
        self.by_priority = by_priority
        self.used: dict[Place, int] = {}
        self.priority: dict[Place, int] = {}
        self.until: dict[Place, int] = {}
        self.free = set(range(1, num_pages))
        self.free_host = set(range(1, num_ready))
        self.private: set[int] = set()
        self.held: dict[int, Place] = {}
        self.priorities: dict[int, int] = {}
        self.ops: dict[int, OpModel] = {}
        self.wanted: set[Place] = set()
        self.given_up: set[Place] = set()
        self.awaited: set[Place] = set()
        self.num_reserved = 0
        self.num_awaited_lost = 0
        self._clock = 0

    # ---- questions

    @property
    def places(self) -> set[Place]:
        return {*self.device, *self.host}

    def match(self, tenant: bytes, pages: Prefix) -> tuple[Prefix, Prefix]:
        """Returns the longest prefix that lies on the device, and the longest that lies anywhere."""
        known = [prefix for prefix in prefixes(pages) if (tenant, prefix) in self.places]
        on_device = [prefix for prefix in known if (tenant, prefix) in self.device]
        return (on_device or [()])[-1], (known or [()])[-1]

    def locked(self) -> set[Place]:
        """Returns the places that may not leave any tier."""
        ends = [*self.held.values(), *(op.end for op in self.ops.values() if op.kind in ("load", "store", "stage"))]
        return {part for end in ends for part in parts(end)}

    def host_locked(self) -> set[Place]:
        """Returns the places whose host copy may not go."""
        ends = [op.end for op in self.ops.values() if op.kind in ("prefetch", "upload")]
        return {part for end in ends for part in parts(end)}

    def evictable(self) -> set[Place]:
        return self.device.keys() - self.locked()

    def host_evictable(self) -> set[Place]:
        return self.host.keys() - self.locked() - self.host_locked()

    def num_host_available(self) -> int:
        return max(0, len(self.free_host) + len(self.host_evictable()) - self.num_reserved)

    def is_host_ready(self, place: Place) -> bool:
        return not place[1] or (place in self.host and place not in self.storing)

    def busy(self, place: Place) -> int | None:
        """Returns the copy that reads or writes a place's pages."""
        return self.loading.get(place) or self.storing.get(place)

    def excused(self, place: Place) -> bool:
        """Whether a page that is on the device alone may stay there after stores were begun."""
        if any(part in self.loading or part in self.storing for part in parts(place)):
            return True
        return any(part in self.given_up for part in parts(place) if part not in self.host)

    # ---- changes

    def use(self, place: Place) -> None:
        self._clock += 1
        self.used.update(dict.fromkeys(parts(place), self._clock))

    def hold(self, number: int, place: Place, priority: int) -> None:
        self.held[number], self.priorities[number] = place, priority
        self.use(place)
        self.rank(place, priority)
        self.wanted |= set(parts(place))

    def release(self, number: int) -> None:
        del self.priorities[number]
        self.use(self.held.pop(number))

    def rank(self, place: Place, priority: int) -> None:
        for part in parts(place):
            self.priority[part] = max(self.priority.get(part, priority), priority)

    def retain(self, number: int, num_pages: int, until: int) -> int:
        """Retains the first pages that a receipt holds, up to a quarter of the host; returns how many are beyond that."""
        wanted = parts(self.held[number])[:num_pages]
        return retain_some(self.until, wanted, (self.num_ready - 1) // 4 - len(self.until), until)

    def order(self, place: Place, turn: int = 0) -> tuple[int, int, int, int]:
        """Returns how soon a place goes."""
        priority = self.priority[place] if self.by_priority else 0
        return self.until.get(place, 0), priority, turn, self.used[place]

    def take(self, pages: Iterable[int]) -> None:
        pages = set(pages)
        assert pages <= self.free, f"{pages - self.free} were not free"
        self.free -= pages
        self.private |= pages

    def take_host(self, pages: Iterable[int]) -> None:
        pages = set(pages)
        assert pages <= self.free_host, f"host pages {pages - self.free_host} were not free"
        self.free_host -= pages

    def evict(self, count: int, turns: dict[Place, int]) -> set[Place]:
        """Evicts page by page: the first in order of those with nothing below them on the device.

        Args:
            count: How many.
            turns: Which places are spare (0), would be lost (2), or neither (1).
        """
        gone = set()
        for _ in range(count):
            parents = {above(place) for place in self.device}
            victim = min(self.evictable() - parents, key=lambda place: self.order(place, turns[place]))
            self.free.add(self.device.pop(victim))
            if victim not in self.host:
                self._forget(victim)
                gone.add(victim)
        return gone

    def lose_host(self, gone: set[Place], spare: set[Place]) -> None:
        """Takes off the host what made room there: first what the device has, too, then the first in order.

        Args:
            gone: What is on the host no more.
            spare: What the device may lose at no loss; of that, copies go last.
        """
        copies, alone = gone & self.device.keys(), gone - self.device.keys()
        assert all(self.is_idle(place) for place in copies), "the host forgot what a copy needs"
        for _ in range(len(alone)):
            only = self.host.keys() - self.device.keys() - self.locked() - self.host_locked()
            victim = min(only - {above(place) for place in self.host}, key=self.order)
            assert victim in alone, "something else was to go first"
            alone.discard(victim)
            self.free_host.add(self.host.pop(victim))
            self._forget(victim)
        if copies & spare:
            assert self.host_evictable() <= self.device.keys(), "what the device counts on goes last"
        for place in copies:
            self.free_host.add(self.host.pop(place))
        self.given_up |= copies
        self.wanted |= copies  # the host had them, and is to have them again before they go

    def is_idle(self, place: Place) -> bool:
        """Whether a place is on both tiers and no copy needs it on the host."""
        is_held = place in self.host_locked() or self.busy(place) is not None
        return place in self.host and place in self.device and not is_held

    def idle_ends(self) -> set[Place]:
        """Returns the idle places with nothing below them on the host: those it may forget next."""
        return {place for place in self.host if self.is_idle(place)} - {above(place) for place in self.host}

    def publish(self, number: int, new: Prefix, pages: list[int], *, is_use: bool) -> list[int]:
        """Caches the pages after a receipt; returns those to use, which may be fewer. Frees the copies.

        Whether this ``is_use`` of the whole path depends on where its nodes end; new pages are as old as those before.
        """
        tenant, prefix = self.held[number]
        used = self.used.get(self.held[number])
        canonical = []
        for content, page in zip(new, pages, strict=True):
            place = (tenant, (*prefix, content))
            if place in self.loading:
                break
            prefix = place[1]
            self.private.remove(page)
            if place in self.device:
                self.wanted.add(place)
            elif place in self.host:
                self.wanted.add(place)
                self.device[place] = page
            known = self.device.setdefault(place, page)
            if known != page:
                self.free.add(page)
            canonical.append(known)
        self.held[number] = (tenant, prefix)
        if is_use:
            self.use(self.held[number])
        else:
            assert used or not canonical, "the first page of a path begins a node"
            self.used.update({place: used for place in parts(self.held[number]) if place not in self.used})
        self.rank(self.held[number], self.priorities[number])
        return canonical

    def begin_load(self, op: int, number: int, pages: list[int]) -> OpModel:
        end = self.held[number]
        places = [part for part in parts(end) if part not in self.device]
        self.private -= set(pages)
        self.device.update(zip(places, pages, strict=True))
        self.loading.update(dict.fromkeys(places, op))
        self.ops[op] = OpModel("load", end, pages, [self.host[place] for place in places], places)
        self.use(end)
        return self.ops[op]

    def begin_store(self, op: int, places: list[Place], pages: list[int], host_pages: list[int]) -> None:
        self.take_host(host_pages)
        for place, page, host_page in zip(places, pages, host_pages, strict=True):
            assert self.device[place] == page and place not in self.host and place not in self.loading
            self.host[place] = host_page
            self.storing[place] = op
        first = above(places[0])
        assert self.is_host_ready(first) and first not in self.loading, "stored below what is not ready"
        self.ops[op] = OpModel("store", places[-1], pages, host_pages, places)

    def end(self, op: int) -> OpModel:
        ended = self.ops.pop(op)
        for page in ended.orphans:
            self._free_device(page)
        for page in ended.host_orphans:
            self._free_host(page, None)
        return ended

    def end_load(self, op: int, ok: bool) -> set[int]:
        """Returns the receipts that lost pages."""
        ended = self.end(op)
        places = [place for place in ended.places if self.loading.get(place) == op]
        for place in places:
            del self.loading[place]
        lost: set[int] = set()
        if places and not ok:
            top = min(places, key=lambda place: len(place[1]))
            lost = {number for number, held in self.held.items() if top in parts(held)}
            self.cut({place for place in self.places if top in parts(place)}, above(top))
        self.use(ended.end if not lost and ok else self.shortened(ended.end))
        return lost

    def end_store(self, op: int, ok: bool) -> list[Place]:
        """Returns the places that are on the host now."""
        ended = self.end(op)
        places = [place for place in ended.places if self.storing.get(place) == op]
        for place in places:
            del self.storing[place]
            if not ok:
                self.free_host.add(self.host.pop(place))
                self.given_up.add(place)
        return places

    def shortened(self, end: Place) -> Place:
        """Returns what is left of a place."""
        return max((part for part in parts(end) if part in self.places), key=lambda p: len(p[1]), default=(end[0], ()))

    def cut(self, gone: set[Place], end: Place | None = None) -> None:
        """Removes places whatever uses them; copies in flight get their pages."""
        for place in gone:
            op = self.ops.get(self.busy(place) or 0)
            if place in self.device:
                page = self.device.pop(place)
                if op:
                    op.orphans.add(page)
                else:
                    self._free_device(page)
            if place in self.host:
                self._free_host(self.host.pop(place), op)
            self.loading.pop(place, None)
            self.storing.pop(place, None)
            self._forget(place)
        for number, held in self.held.items():
            self.held[number] = self.shortened(held)
        for op in self.ops.values():
            if op.end in gone:
                op.end, op.is_lost = self.shortened(op.end), True

    def flush(self, tier: str | None) -> int:
        if tier == "device":
            count = len(self.evictable())
            self.evict(count, dict.fromkeys(self.device, 0))
            return count
        before = len(self.free) + len(self.free_host)
        kept = {part for held in self.held.values() for part in parts(held)}
        spared = self.device.keys() if tier == "host" else set()
        self.cut(self.places - kept - spared)
        to_load = {part for held in self.held.values() if held[1] and held not in self.device for part in parts(held)}
        for place in self.host.keys() - to_load:
            self._free_host(self.host.pop(place), self.ops.get(self.busy(place) or 0))
            self.storing.pop(place, None)
        for op in self.ops.values():
            if op.kind in ("prefetch", "upload"):
                on_host = [part for part in parts(op.end) if part in self.host]
                op.end = on_host[-1] if on_host else (op.end[0], ())
                op.is_lost |= op.kind == "prefetch"
        self.given_up |= self.device.keys()
        return len(self.free) + len(self.free_host) - before

    def insert_host(self, start: Place, contents: Prefix, pages: list[int]) -> int:
        """Caches host pages after a place; frees those that are there already, and those below what is not ready."""
        place, num_new, adds = start, 0, False
        for i, (content, page) in enumerate(zip(contents, pages, strict=True)):
            place = (place[0], (*place[1], content))
            if place in self.host or place in self.loading:
                self.free_host.add(page)
                if not self.is_host_ready(place):
                    self.free_host |= set(pages[i + 1 :])
                    break
                continue
            adds |= place not in self.device
            self.host[place] = page
            num_new += 1
        if adds:
            self.use(place)
            self.rank(place, 0)
        return num_new

    def _forget(self, place: Place) -> None:
        self.used.pop(place, None)
        self.priority.pop(place, None)
        self.until.pop(place, None)
        self.wanted.discard(place)
        self.given_up.discard(place)
        self.num_awaited_lost += place in self.awaited
        self.awaited.discard(place)

    def _free_device(self, page: int) -> None:
        readers = (op for op in self.ops.values() if op.kind in ("store", "stage") and page in op.pages)
        reader = next(readers, None)
        (reader.orphans if reader else self.free).add(page)

    def _free_host(self, page: int, op: OpModel | None) -> None:
        uploads = [each for each in self.ops.values() if each.kind == "upload" and page in each.host_pages]
        (op.host_orphans if op else uploads[0].host_orphans if uploads else self.free_host).add(page)


def ints(pages: Iterable[int]) -> np.ndarray:
    """Returns pages as the int32 array that the index takes."""
    return np.array(list(pages), dtype=np.int32)
