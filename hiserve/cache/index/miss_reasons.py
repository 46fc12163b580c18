"""The reason of a miss: why a match did not find more of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from hiserve.cache.index.nodes import Node
from hiserve.cache.index.radix import RadixTree

MAX_LOST = 65_536  # digests remembered: about 10 MiB
MAX_SIBLINGS = 32  # compared with a prompt that continues none of them


class MissReason(StrEnum):
    """The reason why a match ended; of several, the first in this order."""

    NOT_WORTH_LOADING = "not_worth_loading"  # the host has more, and loading it would take longer than computing it
    NO_TAIL = "no_tail"  # more pages are cached, but none with window pages and the snapshot that it needs
    PAGE_REMAINDER = "page_remainder"  # the rest is less than a page, or the last token
    IN_FLIGHT = "in_flight"  # the next page is being fetched from the store
    NOT_FETCHED = "not_fetched"  # a store has the next page, or did not answer in time
    EVICTED = "evicted"  # the next page was cached
    NAMESPACE = "namespace"  # other namespaces have pages, this one has none
    DIVERGED = "diverged_at"  # other prompts continue differently
    COLD = "cold"  # no cached prompt starts like this


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason and the position of a miss."""

    reason: MissReason
    num_tokens: int  # tokens of the prompt before the miss; of DIVERGED, shared tokens of a partial page included


class LostPages:
    """The digests of the last ``max_digests`` pages that left the cache.

    Attributes:
        awaited: Digests of cached pages that wait for their copy to a store.
        num_awaited_lost: Pages that left while they waited.
    """

    def __init__(self, max_digests: int = MAX_LOST) -> None:
        self._max_digests = max_digests
        self._digests: dict[bytes, None] = {}  # oldest first
        self.awaited: set[bytes] = set()
        self.num_awaited_lost = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, digests: list[bytes]) -> None:
        """Remembers pages that left the cache, and forgets the oldest ones above ``max_digests``."""
        known = self._digests
        for digest in digests:
            known.pop(digest, None)
            known[digest] = None
            if len(known) > self._max_digests:
                del known[next(iter(known))]
        if self.awaited:
            lost = self.awaited.intersection(digests)
            self.awaited -= lost
            self.num_awaited_lost += len(lost)


def explain(
    tree: RadixTree,
    root: Node,
    key: bytes,
    *,
    num_used: int,
    num_resumable: int | None,
    lost: LostPages,
    is_arriving: Callable[[bytes], bool],
    is_in_store: bool,
) -> Miss:
    """Returns why no more of a prompt was found.

    Args:
        tree: The present tree.
        root: Root of the prompt's namespace.
        key: The whole pages of the prompt that a match may use.
        num_used: Tokens of them that were taken from the cache.
        num_resumable: Tokens before the deepest boundary with a tail; None where each boundary can be resumed at.
        lost: Pages that left the cache.
        is_arriving: Whether a page is being fetched from the store.
        is_in_store: Whether a store has, or may have, the next page.
    """
    page_bytes = tree.page_bytes
    node, used, num_pages = tree.find(root, key)
    num_tokens = num_pages * tree.page_size
    if num_used < num_tokens:
        has_tail = num_resumable is None or num_used < num_resumable
        return Miss(MissReason.NOT_WORTH_LOADING if has_tail else MissReason.NO_TAIL, num_used)
    rest = key[num_pages * page_bytes :]
    if not rest:
        return Miss(MissReason.PAGE_REMAINDER, num_tokens)
    digest = tree.chain(node.digests[used - 1 if used else 0], rest[:page_bytes])[0]
    if is_arriving(digest):
        return Miss(MissReason.IN_FLIGHT, num_tokens)
    if is_in_store:
        return Miss(MissReason.NOT_FETCHED, num_tokens)
    if digest in lost:
        return Miss(MissReason.EVICTED, num_tokens)
    if not root.children:
        # Whether another tenant has these tokens is secret: the answer says only that other tenants have pages.
        return Miss(MissReason.NAMESPACE if tree.roots.keys() - {root.digests[0]} else MissReason.COLD, 0)
    if used < node.num_pages:
        siblings = [node.key[used * page_bytes : (used + 1) * page_bytes]]
    else:
        siblings = list(islice(node.children, MAX_SIBLINGS))  # by their first pages
    shared = tree.closest(siblings, rest[:page_bytes]) if siblings else 0
    if siblings and num_tokens + shared:
        return Miss(MissReason.DIVERGED, num_tokens + shared)
    return Miss(MissReason.COLD, num_tokens)
