"""Which worker has how much of a prompt cached, as far as their reports tell."""

from __future__ import annotations

from dataclasses import dataclass, field

from hiserve.core.digest import Chain, chain, namespace_digest, pack_tokens, split_digests
from hiserve.core.plan import Int32Array

HASHED_PAGES = 32


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt as a chain of page digests, hashed as far as anybody asked.

    Attributes:
        key: Packed int32 tokens.
        max_pages: Full pages that may be shared: the last token is always computed.
        depths: Per replica, the pages that matched when last asked; where the next search starts.
    """

    root: bytes
    key: bytes
    max_pages: int
    digests: list[bytes] = field(default_factory=list)
    depths: dict[int, int] = field(default_factory=dict)


class PrefixIndex:
    """The page digests that each worker has on its device or host, fed by step reports.

    A hint: a worker may have evicted a page by the time a request arrives. Workers evict
    leaves first, so the pages of a prefix that are present are its first ones.

    Args:
        page_size: Tokens per page.
        link: Makes the digests of pages, as the workers do (``core.digest.chain_of``).
    """

    def __init__(self, page_size: int, link: Chain = chain) -> None:
        self._page_size = page_size
        self._link = link
        self._namespace = b""
        self._pages: dict[int, dict[bytes, int]] = {}  # by worker and digest: on how many tiers

    def attach(self, replica: int, namespace: bytes) -> None:
        """Adds a worker with an empty cache.

        Args:
            replica: The worker.
            namespace: Base digest of all that keeps caches apart but the tenant; the same for
                all replicas of one model.
        """
        assert self._namespace in (b"", namespace), f"replica {replica} has base {namespace.hex()}, not as the others"
        self._namespace = namespace
        self._pages[replica] = {}

    def detach(self, replica: int) -> None:
        """Forgets a worker and its cache."""
        self._pages.pop(replica, None)

    def num_pages(self, replica: int) -> int:
        """Returns the pages a worker is known to have."""
        return len(self._pages[replica])

    def update(self, replica: int, published: bytes, removed: bytes) -> None:
        """Applies what a worker reported.

        Args:
            replica: The worker.
            published: Joined digests of pages that a tier gained, once for each tier that did.
            removed: Likewise of those that one lost.
        """
        pages = self._pages[replica]
        for digest in split_digests(published):
            pages[digest] = pages.get(digest, 0) + 1
        for digest in split_digests(removed):
            num_tiers = pages.pop(digest, 0) - 1
            if num_tiers > 0:
                pages[digest] = num_tiers

    def prefix(self, prompt: Int32Array, namespace: bytes) -> Prefix:
        """Prepares a prompt for matching. Costs nothing until somebody matches it."""
        return Prefix(
            root=namespace_digest(self._namespace, namespace),
            key=pack_tokens(prompt),
            max_pages=(len(prompt) - 1) // self._page_size,
        )

    def match(self, prefix: Prefix, replica: int) -> int:
        """Returns the leading tokens of the prompt that a worker has cached."""
        pages = self._pages[replica]
        depth = prefix.depths.get(replica, 0)
        while depth and prefix.digests[depth - 1] not in pages:
            depth -= 1
        while depth < prefix.max_pages and self._digest(prefix, depth) in pages:
            depth += 1
        prefix.depths[replica] = depth
        return depth * self._page_size

    def _digest(self, prefix: Prefix, page: int) -> bytes:
        """Returns a page's digest, hashing a block of pages at a time: most prompts differ early."""
        digests = prefix.digests
        while page >= len(digests):
            start = 4 * self._page_size * len(digests)
            stop = start + 4 * self._page_size * HASHED_PAGES
            digests += self._link(digests[-1] if digests else prefix.root, prefix.key[start:stop], self._page_size)
        return digests[page]
