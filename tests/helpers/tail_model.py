"""An independent model of resume points: sets of prefixes, without a tree."""

from __future__ import annotations

from typing import Any

from hiserve.cache.index.nodes import Node
from hiserve.cache.index.prefix_cache import PrefixCache, Tail, Tier
from hiserve.cache.index.tier_pages import TierPages
from hiserve.core.digest import chain, namespace_digest


class Readable:
    """Which pages became readable on a tier, in order, seen where the index records it."""

    def __init__(self, tier: TierPages[Any]) -> None:
        self.digests: dict[bytes, None] = {}
        insert, remove = tier.insert, tier.remove

        def inserted(node: Node, start: int = 0) -> None:
            self.digests |= dict.fromkeys(node.digests[start:])
            insert(node, start)

        def removed(digests: list[bytes]) -> None:
            for digest in digests:
                del self.digests[digest]
            remove(digests)

        tier.insert, tier.remove = inserted, removed  # type: ignore[method-assign]


class TailModel:
    """Which prefixes are cached on each tier, as the index records it, and at which of them a tail was kept."""

    def __init__(self, cache: PrefixCache) -> None:
        self._namespace = cache.namespace
        self._page_size = cache.page_size
        self._readable = {Tier.DEVICE: Readable(cache.device), Tier.HOST: Readable(cache.host)}
        self.told: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self._before: dict[bytes, list[bytes]] = {}  # of each prefix: those that it begins with, itself the last
        self.loading: dict[int, list[bytes]] = {}  # by op; matched on the device before they are told
        self.tails: dict[bytes, list[Tail]] = {}

    def names(self, tokens: bytes, tenant: bytes = b"") -> list[bytes]:
        """The names of the prefixes of whole pages, shortest first."""
        names = chain(namespace_digest(self._namespace, tenant), tokens, self._page_size)
        self._before |= {name: names[: at + 1] for at, name in enumerate(names)}
        return names

    def before(self, name: bytes) -> list[bytes]:
        """The names of the prefixes that a known one begins with, itself the last."""
        return self._before[name]

    @property
    def cached(self) -> dict[Tier, set[bytes]]:
        """The readable prefixes of each tier."""
        return {tier: set(readable.digests) for tier, readable in self._readable.items()}

    def check_told(self, tier: Tier, published: bytes, removed: bytes) -> None:
        """H11: told are exactly the readable pages with a tail at or behind them on the tier, parents first."""
        told = self.told[tier]
        told -= {removed[at : at + 16] for at in range(0, len(removed), 16)}
        for at in range(0, len(published), 16):
            name = published[at : at + 16]
            assert told.issuperset(self._before[name][:-1]), "a page is told before the one in front of it"
            told.add(name)
        of_host, cached = tier is Tier.HOST, self.cached[tier]
        ends = [name for name in self.tails if name in cached and self._can_give(name, of_host=of_host)]
        assert told == {name for end in ends for name in self._before[end]}, (
            f"{tier} tells other pages than it can give"
        )

    @property
    def on_device(self) -> set[bytes]:
        """Prefixes on the device, or on their way there."""
        return self.cached[Tier.DEVICE].union(*self.loading.values())

    def check(self) -> None:
        """No part of a tail outlives the history before it on its tier; a boundary has one tail."""
        for name, tails in list(self.tails.items()):
            for tail in tails:
                assert tail.pages is None or name in self.on_device, "a tail outlives the history on the device"
                assert tail.frames is None or name in self.cached[Tier.HOST], "a tail outlives the history on the host"
            self.tails[name] = [tail for tail in tails if tail.is_open]
            assert len(self.tails[name]) <= 1, "a boundary has two tails"

    def match(self, tokens: bytes) -> tuple[int, int, int]:
        """The pages of the deepest resume point on the device, of the deepest on any tier, and of the cached prefix, less the last token."""
        names = self.names(tokens[: max(0, len(tokens) - 4)])
        on_device, cached = self.on_device, self.on_device | self.cached[Tier.HOST]
        num_cached = next((at for at, name in enumerate(names) if name not in cached), len(names))
        ours = [at + 1 for at in range(num_cached) if names[at] in on_device and self._has(names[at], of_host=False)]
        theirs = [at + 1 for at in range(num_cached) if self._has(names[at], of_host=True)]
        deepest = max(ours, default=0)
        return deepest, max(deepest, *theirs, 0), num_cached

    def _has(self, name: bytes, *, of_host: bool) -> bool:
        tails = self.tails.get(name, [])
        if of_host:
            return any(tail.frames is not None and not tail.host_ready_op for tail in tails)
        return any(tail.pages is not None for tail in tails)

    def _can_give(self, name: bytes, *, of_host: bool) -> bool:
        """Whether a tail is there, and no transfer fills it."""
        tails = self.tails.get(name, [])
        if of_host:
            return any(tail.frames is not None and not tail.host_ready_op for tail in tails)
        return any(tail.pages is not None and not tail.device_ready_op for tail in tails)
