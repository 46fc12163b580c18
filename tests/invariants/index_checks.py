"""Invariants of the prefix index that need nothing but the index: callable after any operation."""

from __future__ import annotations

from collections import Counter

import numpy as np

from hiserve.cache.index.locks import path
from hiserve.cache.index.nodes import Node
from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.core.transfers import CopyKind


def check_structure(cache: PrefixCache) -> None:
    """Asserts everything below; the tree is walked, so keep it small."""
    inv_01_roots_are_empty_and_kept_only_in_use(cache)
    inv_02_parents_and_children_agree(cache)
    inv_03_keys_are_whole_pages_and_siblings_differ_in_the_first(cache)
    inv_04_a_node_lies_on_a_tier_as_a_whole_or_not_at_all(cache)
    inv_05_no_dead_node(cache)
    inv_06_what_is_on_the_device_has_its_parent_there(cache)
    inv_07_what_is_on_the_host_has_its_parent_there(cache)
    inv_07_the_host_counts_its_children(cache)
    inv_09_no_parent_looks_older_or_less_important_than_its_child(cache)
    inv_10_a_parent_has_the_locks_of_all_its_children(cache)
    inv_12_what_a_copy_uses_is_locked(cache)
    inv_14_the_eviction_queues_hold_the_evictable_leaves(cache)
    inv_16_the_evictable_counts_are_right(cache)
    inv_16_what_is_spare_may_go_at_no_loss(cache)
    inv_16_every_page_counts_for_its_owner(cache)
    inv_19_no_page_has_two_owners_and_page_0_none(cache)
    inv_21_nodes_and_copies_agree(cache)
    inv_42_retained_nodes_are_counted_and_will_end(cache)


def inv_01_roots_are_empty_and_kept_only_in_use(cache: PrefixCache) -> None:
    for digest, root in cache.tree.roots.items():
        assert (
            root.parent is None and root.key == b"" and root.num_pages == root.pages.size == root.host_pages.size == 0
        )
        assert root.digests == [digest] and not root.is_evictable and not root.is_host_evictable
        assert root.children or root.num_locks or root.num_host_locks


def inv_02_parents_and_children_agree(cache: PrefixCache) -> None:
    for node in cache.tree.nodes():
        assert node.parent is not None and node.key
        assert node.parent.children[node.key[: cache.tree.page_bytes]] is node


def inv_03_keys_are_whole_pages_and_siblings_differ_in_the_first(cache: PrefixCache) -> None:
    for node in cache.tree.nodes():
        assert node.key and len(node.key) % cache.tree.page_bytes == 0
        assert all(child.key[: cache.tree.page_bytes] == first for first, child in node.children.items())


def inv_04_a_node_lies_on_a_tier_as_a_whole_or_not_at_all(cache: PrefixCache) -> None:
    for node in cache.tree.nodes():
        assert node.num_pages == len(node.digests) == len(node.key) // cache.tree.page_bytes
        assert {node.pages.size, node.host_pages.size} <= {0, node.num_pages}
        assert node.pages.dtype == node.host_pages.dtype == np.int32


def inv_05_no_dead_node(cache: PrefixCache) -> None:
    free, free_host = (set(tier.pages.free_pages().tolist()) for tier in (cache.device, cache.host))
    for node in cache.tree.nodes():
        assert node.pages.size or node.host_pages.size
        assert free.isdisjoint(node.pages.tolist()) and free_host.isdisjoint(node.host_pages.tolist())


def inv_06_what_is_on_the_device_has_its_parent_there(cache: PrefixCache) -> None:
    for node in [*cache.tree.roots.values(), *cache.tree.nodes()]:
        on_device = [child for child in node.children.values() if child.pages.size]
        assert node.num_device_children == len(on_device)
        assert node.is_root or node.pages.size or not on_device


def inv_07_what_is_on_the_host_has_its_parent_there(cache: PrefixCache) -> None:
    for node in cache.tree.nodes():
        assert node.parent is not None
        assert not node.host_pages.size or node.parent.is_root or node.parent.host_pages.size


def inv_07_the_host_counts_its_children(cache: PrefixCache) -> None:
    for node in [*cache.tree.roots.values(), *cache.tree.nodes()]:
        assert node.num_host_children == sum(child.host_pages.size > 0 for child in node.children.values())


def inv_09_no_parent_looks_older_or_less_important_than_its_child(cache: PrefixCache) -> None:
    for node in cache.tree.nodes():
        assert node.parent is not None
        assert node.parent.last_used >= node.last_used and node.parent.priority >= node.priority


def inv_10_a_parent_has_the_locks_of_all_its_children(cache: PrefixCache) -> None:
    for node in [*cache.tree.roots.values(), *cache.tree.nodes()]:
        assert node.num_locks >= sum(child.num_locks for child in node.children.values()) >= 0
        assert node.num_host_locks >= sum(child.num_host_locks for child in node.children.values()) >= 0


def inv_12_what_a_copy_uses_is_locked(cache: PrefixCache) -> None:
    for node in cache.tree.nodes():
        assert not node.pending_op or node.num_locks, f"op {node.pending_op} uses a node that may be evicted"
        assert not (node.device_ready_op and node.host_ready_op), "two copies use one node"
        assert node.pages.size or not node.pending_op
        assert node.host_pages.size or not (node.host_ready_op or node.num_host_locks)


def inv_14_the_eviction_queues_hold_the_evictable_leaves(cache: PrefixCache) -> None:
    nodes = list(cache.tree.nodes())
    for tier, is_evictable in ((cache.device, _on_device), (cache.host, _on_host)):
        assert {id(node) for node in tier.eviction} == {id(node) for node in nodes if is_evictable(node)}
    assert {id(node) for node in cache.tiers.copies} == {id(node) for node in nodes if node.is_copy}


def inv_16_the_evictable_counts_are_right(cache: PrefixCache) -> None:
    nodes = list(cache.tree.nodes())
    assert cache.device.num_evictable == sum(node.pages.size for node in nodes if not node.num_locks)
    unlocked = [node for node in nodes if not node.num_locks and not node.num_host_locks]
    assert cache.host.num_evictable == sum(node.host_pages.size for node in unlocked)


def inv_16_what_is_spare_may_go_at_no_loss(cache: PrefixCache) -> None:
    spare = [node for node in cache.tree.nodes() if node.is_spare]
    assert cache.tiers.reserve.num_pages == sum(node.pages.size for node in spare)
    for node in spare:
        assert not node.num_locks and node.pages.size and (node.host_pages.size or not node.is_wanted)
        assert all(child.is_spare for child in node.children.values() if child.pages.size)


def inv_16_every_page_counts_for_its_owner(cache: PrefixCache) -> None:
    for tier, name in ((cache.device, "pages"), (cache.host, "host_pages")):
        held: Counter[bytes] = Counter()
        for root in cache.tree.roots.values():
            stack = [root]
            while stack:
                node = stack.pop()
                assert node.account == root.account
                held[node.account] += getattr(node, name).size
                stack.extend(node.children.values())
        assert +held == tier.shares.held


def inv_19_no_page_has_two_owners_and_page_0_none(cache: PrefixCache) -> None:
    for tier, name in ((cache.device, "pages"), (cache.host, "host_pages")):
        owned = [page for node in cache.tree.nodes() for page in getattr(node, name).tolist()]
        stack = tier.pages._stack[: tier.pages._top].tolist()
        free = tier.pages.free_pages().tolist()
        assert len(set(owned)) == len(owned) and set(free).isdisjoint(owned) and 0 not in [*owned, *stack]
        assert len(set(stack)) == len(stack) and set(free) <= set(stack)


def inv_21_nodes_and_copies_agree(cache: PrefixCache) -> None:
    nodes = list(cache.tree.nodes())
    for node in nodes:
        if node.pending_op:
            op = cache.ops[node.pending_op]
            assert op.kind is (CopyKind.LOAD if node.device_ready_op else CopyKind.OFFLOAD)
            below = path(op.lock.node)
            assert any(step is node for step in below), "the copy does not hold its node"
    known = {id(node) for node in [*nodes, *cache.tree.roots.values()]}
    assert all(id(op.lock.node) in known for op in cache.ops), "a copy holds what left the tree"


def inv_42_retained_nodes_are_counted_and_will_end(cache: PrefixCache) -> None:
    retention, held = cache.tiers.retention, Counter[bytes]()
    ends = {(until_s, id(step)) for until_s, node in retention.ends for step in path(node)}
    for node in cache.tree.nodes():
        assert node.parent is not None
        assert node.parent.is_root or node.parent.retained_until_s >= node.retained_until_s
        if node.retained_until_s:
            held[node.account] += node.num_pages
            assert (node.retained_until_s, id(node)) in ends, "nothing will end the retention of a node"
        for tail in (node.tails or {}).values():
            assert tail.is_open or not tail.retained_until_s, "a tail that is gone is retained"
            assert tail.retained_until_s <= node.retained_until_s, "a tail is retained longer than its history"
            held[tail.account] += tail.num_retained
    assert +held == retention.quota.held
    assert all(not root.retained_until_s for root in cache.tree.roots.values())


def _on_device(node: Node) -> bool:
    return node.is_evictable


def _on_host(node: Node) -> bool:
    return node.is_host_evictable
