"""Invariants of the prefix index that need nothing but the index: callable after any operation."""

from __future__ import annotations

import numpy as np

from hiserve.cache.index.manager import CacheManager


def check_structure(cache: CacheManager) -> None:
    """Asserts everything below; the tree is walked, so keep it small."""
    inv_01_roots_are_empty_and_kept_only_in_use(cache)
    inv_02_parents_and_children_agree(cache)
    inv_03_keys_are_whole_pages_and_siblings_differ_in_the_first(cache)
    inv_04_one_page_and_one_digest_for_every_page_of_the_key(cache)
    inv_05_no_dead_node(cache)
    inv_09_no_parent_looks_older_than_its_child(cache)
    inv_10_a_parent_has_the_locks_of_all_its_children(cache)
    inv_14_the_eviction_queue_holds_the_evictable_leaves(cache)


def inv_01_roots_are_empty_and_kept_only_in_use(cache: CacheManager) -> None:
    for digest, root in cache.tree.roots.items():
        assert root.parent is None and root.key == b"" and root.pages.size == 0
        assert root.digests == [digest] and not root.is_evictable
        assert root.children or root.num_locks


def inv_02_parents_and_children_agree(cache: CacheManager) -> None:
    for node in cache.tree.nodes():
        assert node.parent is not None and node.key
        assert node.parent.children[node.key[: cache.tree.page_bytes]] is node


def inv_03_keys_are_whole_pages_and_siblings_differ_in_the_first(cache: CacheManager) -> None:
    for node in cache.tree.nodes():
        assert node.key and len(node.key) % cache.tree.page_bytes == 0
        assert all(child.key[: cache.tree.page_bytes] == first for first, child in node.children.items())


def inv_04_one_page_and_one_digest_for_every_page_of_the_key(cache: CacheManager) -> None:
    for node in cache.tree.nodes():
        assert node.pages.size == len(node.digests) == len(node.key) // cache.tree.page_bytes
        assert node.pages.dtype == np.int32


def inv_05_no_dead_node(cache: CacheManager) -> None:
    free = set(cache.pages.free_pages().tolist())
    assert all(node.pages.size and free.isdisjoint(node.pages.tolist()) for node in cache.tree.nodes())


def inv_09_no_parent_looks_older_than_its_child(cache: CacheManager) -> None:
    assert all(n.parent.last_used >= n.last_used for n in cache.tree.nodes() if n.parent is not None)


def inv_10_a_parent_has_the_locks_of_all_its_children(cache: CacheManager) -> None:
    for node in [*cache.tree.roots.values(), *cache.tree.nodes()]:
        assert node.num_locks >= sum(child.num_locks for child in node.children.values()) >= 0


def inv_14_the_eviction_queue_holds_the_evictable_leaves(cache: CacheManager) -> None:
    queued = [node for used, _, node in cache.device.eviction._heap if node.pages.size and node.last_used == used]
    live = [id(node) for node in queued if node.is_evictable]
    assert sorted(live) == sorted(id(node) for node in cache.tree.nodes() if node.is_evictable)
