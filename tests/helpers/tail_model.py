"""An independent model of resume points: sets of prefixes, without a tree."""

from __future__ import annotations

from hiserve.cache.index.prefix_cache import Tail, Tier
from hiserve.core.digest import chain, namespace_digest


class TailModel:
    """Which prefixes are cached on each tier, by the events of the cache, and at which of them a tail was kept."""

    def __init__(self, namespace: bytes, page_size: int) -> None:
        self._namespace = namespace
        self._page_size = page_size
        self.cached: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.loading: dict[int, list[bytes]] = {}  # by op; matched on the device before they are told
        self.tails: dict[bytes, list[Tail]] = {}

    def names(self, tokens: bytes, tenant: bytes = b"") -> list[bytes]:
        """The names of the prefixes of whole pages, shortest first."""
        return chain(namespace_digest(self._namespace, tenant), tokens, self._page_size)

    def apply(self, tier: Tier, published: bytes, removed: bytes) -> None:
        """Takes the events since the last call: pages that left take tails behind them along."""
        cached = self.cached[tier]
        cached |= {published[at : at + 16] for at in range(0, len(published), 16)}
        cached -= {removed[at : at + 16] for at in range(0, len(removed), 16)}

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
