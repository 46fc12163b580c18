"""Reports of the index: pages that became readable or unreadable, counts, and the shape of the tree without tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import nlargest
from operator import attrgetter
from typing import Protocol

from hiserve.cache.index.nodes import STEP_SHIFT, Node
from hiserve.cache.index.radix import RadixTree
from hiserve.core.transfers import CopyKind
from hiserve.ipc.cache_stats import NodeFacts, TierStats, WindowStats

MAX_NODES = 64  # of a level
SHOWN_DIGEST_BYTES = 8


class Tier(StrEnum):
    """A tier of the index; a store is not one."""

    DEVICE = "device"
    HOST = "host"


class TierListener(Protocol):
    """Called, in order, for every page that becomes readable or unreadable on a tier."""

    def stored(self, tier: Tier, parent: bytes | None, digests: list[bytes], key: bytes) -> None:
        """A run of pages became readable.

        Args:
            tier: Of the pages.
            parent: Digest of the page before the run, on the same tier; None at the start of a prefix.
            digests: Of the run.
            key: Its packed tokens.
        """

    def removed(self, tier: Tier, digests: list[bytes]) -> None:
        """Pages became unreadable. The list changes after the call."""

    def cleared(self) -> None:
        """All pages of all tiers became unreadable."""


class PrefixEvents:
    """Collects digests of published and removed pages, in order, until they are taken.

    A page that is published and removed, or removed and published, between two takes is in neither list. A page's parent
    precedes it in ``published``, or was reported earlier.
    """

    def __init__(self) -> None:
        self._published: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def publish(self, digests: list[bytes]) -> None:
        _move(digests, self._removed, self._published)

    def remove(self, digests: list[bytes]) -> None:
        _move(digests, self._published, self._removed)

    def take(self) -> tuple[bytes, bytes]:
        """Returns (published, removed) as joined 16-byte digests, and clears both."""
        taken = b"".join(self._published), b"".join(self._removed)
        self._published.clear()
        self._removed.clear()
        return taken


def _move(digests: list[bytes], undone: dict[bytes, None], done: dict[bytes, None]) -> None:
    """Adds digests to ``done``, except those that cancel an event not taken yet."""
    if len(digests) > 1 and undone.keys().isdisjoint(digests):
        done.update(dict.fromkeys(digests))
        return
    for digest in digests:
        if undone.pop(digest, done) is done:
            done[digest] = None


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Counts of the index: gauges of the moment, and counters, which never decrease."""

    device: TierStats  # pages of the device tier, page 0 not counted
    host: TierStats  # pages of the host tier; all 0 without one
    windows: WindowStats  # pages of layers with a window; all 0 where they share those of the others
    snapshots: WindowStats  # their slots; all 0 of a model without
    num_begun: Mapping[CopyKind, int]  # counter: pages of all transfers, by kind
    num_in_flight: Mapping[CopyKind, int]  # gauge: of them, those in flight
    num_unbacked: int  # pages evicted from the device that were on no other tier
    num_retained: int  # gauge: pages that are evicted after all others
    num_not_retained: int  # pages that were not retained because their account had its quota
    num_without_room: int  # pages that were not offloaded because no host page could be freed
    num_not_uploaded: int  # pages offered to the store whose upload never began
    num_prefetches_wanted: int  # pages requested from prefetches
    num_prefetched: int  # of them, inserted ones
    not_prefetched: Mapping[str, int]  # of them, those whose prefetch ended without them or was refused, by reason


def outline(tree: RadixTree, depth: int) -> list[NodeFacts]:
    """Returns the roots and ``depth`` levels below them, parents first; of each level the ``MAX_NODES`` latest used."""
    shown: list[NodeFacts] = []
    level = list(tree.roots.values())
    for at in range(depth + 1):
        level = nlargest(MAX_NODES, level, key=attrgetter("last_used"))
        shown += [_facts(node, at) for node in level]
        level = [child for node in level for child in node.children.values()]
    return shown


def _facts(node: Node, depth: int) -> NodeFacts:
    return NodeFacts(
        digest=_name(node),
        parent="" if node.parent is None else _name(node.parent),
        depth=depth,
        num_tokens=len(node.key) // 4,
        state="" if node.is_root else node.state.name,
        num_locks=node.num_locks,
        num_host_locks=node.num_host_locks,
        last_step=node.last_used >> STEP_SHIFT,
        num_children=len(node.children),
    )


def _name(node: Node) -> str:
    return node.digests[-1][:SHOWN_DIGEST_BYTES].hex()
