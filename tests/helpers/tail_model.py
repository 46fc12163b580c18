"""An independent model of resume points: sets of prefixes, without a tree."""

from __future__ import annotations

from hiserve.cache.index.prefix_cache import Tail
from hiserve.core.digest import chain, namespace_digest


class TailModel:
    """Which prefixes are cached, by the events of the cache, and at which of them a tail was kept."""

    def __init__(self, namespace: bytes, page_size: int) -> None:
        self._namespace = namespace
        self._page_size = page_size
        self.cached: set[bytes] = set()
        self.tails: dict[bytes, Tail] = {}

    def names(self, tokens: bytes, tenant: bytes = b"") -> list[bytes]:
        """The names of the prefixes of whole pages, shortest first."""
        return chain(namespace_digest(self._namespace, tenant), tokens, self._page_size)

    def apply(self, published: bytes, removed: bytes) -> None:
        """Takes the events since the last call: pages that left take tails behind them along."""
        self.cached |= {published[at : at + 16] for at in range(0, len(published), 16)}
        self.cached -= {removed[at : at + 16] for at in range(0, len(removed), 16)}

    def check(self) -> None:
        """No tail outlives its page."""
        for name, tail in list(self.tails.items()):
            if name not in self.cached:
                assert not tail.is_open, "a tail outlives the history before it"
                del self.tails[name]

    def match(self, tokens: bytes) -> tuple[int, int]:
        """The pages of the deepest resume point, and those that are cached, less the last token."""
        names = self.names(tokens[: max(0, len(tokens) - 4)])
        num_cached = next((at for at, name in enumerate(names) if name not in self.cached), len(names))
        points = [at + 1 for at in range(num_cached) if (tail := self.tails.get(names[at])) and tail.is_open]
        return max(points, default=0), num_cached
