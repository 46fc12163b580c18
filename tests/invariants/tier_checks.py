"""Invariants of the two tiers against their model, one function each; called after every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import xxhash

from hiserve.cache.index.locks import PrefixLock, path
from hiserve.cache.index.nodes import Node, NodeState
from hiserve.cache.index.prefix_cache import PrefixCache, Tier
from tests.invariants.index_model import IndexModel, Place, Prefix
from tests.invariants.tier_model import TierModel, parts

NAMESPACE = b"namespace"
TENANTS = [b"", b"a"]
LEGAL = {
    (NodeState.D, NodeState.DW),
    (NodeState.D, NodeState.DH),  # a store had the page, too
    (NodeState.DW, NodeState.DH),
    (NodeState.DW, NodeState.D),  # the store failed, or was flushed
    (NodeState.DH, NodeState.H),
    (NodeState.DH, NodeState.DW),  # forgotten for another page's sake, and then among the next to go itself
    (NodeState.DH, NodeState.D),  # flushed on the host
    (NodeState.H, NodeState.HL),
    (NodeState.H, NodeState.DH),  # computed again
    (NodeState.HL, NodeState.DH),
    (NodeState.HL, NodeState.L),  # flushed on the host
    (NodeState.L, NodeState.D),
}


def digest(place: Place) -> bytes:
    """Returns the chain digest of a place, computed from its root."""
    link = IndexModel.root_digest(NAMESPACE, place[0])
    for page in place[1]:
        link = xxhash.xxh3_128(link + page).digest()
    return link


def pages_in_tree(cache: PrefixCache) -> Iterator[tuple[Place, Node, int]]:
    """Walks the tree without its own search: every page as (place, node, index in the node)."""
    page_bytes = cache.tree.page_bytes
    for tenant in TENANTS:
        root = cache.tree.roots.get(IndexModel.root_digest(NAMESPACE, tenant))
        stack: list[tuple[Node, Prefix]] = [(root, ())] if root is not None else []
        while stack:
            node, prefix = stack.pop()
            for i in range(node.num_pages):
                prefix = (*prefix, node.key[i * page_bytes : (i + 1) * page_bytes])
                yield (tenant, prefix), node, i
            stack += [(child, prefix) for child in node.children.values()]


def place_of(cache: PrefixCache, node: Node) -> Place:
    """Returns the place that a node ends at."""
    *nodes, root = path(node)
    tenant = next(t for t in TENANTS if IndexModel.root_digest(NAMESPACE, t) == root.digests[0])
    key = b"".join(step.key for step in reversed(nodes))
    page_bytes = cache.tree.page_bytes
    return tenant, tuple(key[i : i + page_bytes] for i in range(0, len(key), page_bytes))


def inv_02_the_tree_holds_what_the_model_holds(cache: PrefixCache, model: TierModel) -> None:
    device, host = {}, {}
    for place, node, i in pages_in_tree(cache):
        if node.pages.size:
            device[place] = int(node.pages[i])
        if node.host_pages.size:
            host[place] = int(node.host_pages[i])
    assert (device, host) == (model.device, model.host)


def inv_09_priorities_are_those_of_the_model(cache: PrefixCache, model: TierModel) -> None:
    assert {place: node.priority for place, node, _ in pages_in_tree(cache)} == model.priority


def inv_09_uses_have_the_order_of_the_model(cache: PrefixCache, model: TierModel) -> None:
    uses = sorted((model.used[place], node.last_used) for place, node, _ in pages_in_tree(cache))
    assert all(one[1] <= other[1] for one, other in pairwise(uses))


def inv_42_retained_pages_are_those_of_the_model(cache: PrefixCache, model: TierModel) -> None:
    found = {place: node.retained_until_s for place, node, _ in pages_in_tree(cache) if node.retained_until_s}
    assert found == model.until


def inv_11_locks_are_what_receipts_and_copies_hold(
    cache: PrefixCache, model: TierModel, receipts: dict[int, PrefixLock]
) -> None:
    locks: Counter[int] = Counter()
    host_locks: Counter[int] = Counter()
    for number, lock in receipts.items():
        assert lock.is_open and place_of(cache, lock.node) == model.held[number]
        locks.update(id(node) for node in path(lock.node))
    for op in cache.ops:
        assert place_of(cache, op.lock.node) == model.ops[op.number].end
        (host_locks if op.lock.is_host else locks).update(id(node) for node in path(op.lock.node))
    for node in [*cache.tree.roots.values(), *cache.tree.nodes()]:
        assert (node.num_locks, node.num_host_locks) == (locks.pop(id(node), 0), host_locks.pop(id(node), 0))
    assert not locks and not host_locks, "somebody holds a node outside the tree"


def inv_12_what_is_held_stays(cache: PrefixCache, model: TierModel) -> None:
    free, free_host = (set(tier.pages.free_pages().tolist()) for tier in (cache.device, cache.host))
    assert all(model.device.get(place) not in free for place in model.locked())
    assert all(model.host.get(place) not in free_host for place in model.locked() | model.host_locked())


def inv_16_the_evictable_counts_agree_with_the_model(cache: PrefixCache, model: TierModel) -> None:
    assert cache.device.num_evictable == len(model.evictable())
    assert cache.host.num_evictable == len(model.host_evictable())


def inv_17_free_evictable_protected_and_private_make_the_device_pool(cache: PrefixCache, model: TierModel) -> None:
    assert set(cache.device.pages.free_pages().tolist()) == model.free and cache.device.pages.num_free == len(
        model.free
    )
    orphans = sum(len(op.orphans) for op in model.ops.values())
    protected = len(model.device.keys() & model.locked())
    total = cache.device.pages.num_free + cache.device.num_evictable + protected + len(model.private) + orphans
    assert total == model.num_pages - 1


def inv_18_cached_staged_and_orphaned_make_the_host_pool(cache: PrefixCache, model: TierModel) -> None:
    free = set(cache.host.pages.free_pages().tolist())
    assert free == model.free_host and cache.host.pages.num_free == len(free)
    staged = [page for op in model.ops.values() if op.kind in ("prefetch", "stage") for page in op.host_pages]
    orphans = [page for op in model.ops.values() for page in op.host_orphans]
    used = sorted([*model.host.values(), *staged, *orphans])
    assert used == sorted(set(range(1, model.num_ready)) - free)


def a_store_is_promised_what_was_offered_and_is_cached(cache: PrefixCache, model: TierModel) -> None:
    assert cache.tiers.lost.awaited == {digest(place) for place in model.awaited}
    assert cache.tiers.lost.num_awaited_lost == model.num_awaited_lost


def inv_22_the_copies_in_flight_are_those_not_settled(cache: PrefixCache, model: TierModel) -> None:
    numbers = [op.number for op in cache.ops]
    assert numbers == sorted(numbers) and set(numbers) == model.ops.keys()


def inv_23_every_part_of_a_node_knows_its_copy(cache: PrefixCache, model: TierModel) -> None:
    loading, storing = {}, {}
    for place, node, _ in pages_in_tree(cache):
        if node.device_ready_op:
            loading[place] = node.device_ready_op
        if node.host_ready_op:
            storing[place] = node.host_ready_op
    assert (loading, storing) == (model.loading, model.storing)


def inv_27_who_reads_what_is_being_loaded_knows(model: TierModel, receipts: dict[int, PrefixLock]) -> None:
    for number, lock in receipts.items():
        if not lock.host_pages.size:  # else it has not decided yet; if others loaded meanwhile, it comes too late
            path = parts(model.held[number])
            assert lock.ops == {model.loading[place] for place in path if place in model.loading}


def inv_36_events_replay_to_what_each_tier_can_give(
    cache: PrefixCache, model: TierModel, replicas: dict[Tier, set[bytes]]
) -> int:
    ready = {
        Tier.DEVICE: {digest(place) for place in model.device if place not in model.loading},
        Tier.HOST: {digest(place) for place in model.host if place not in model.storing},
    }
    parents = {digest(place): digest((place[0], place[1][:-1])) for place in model.places}
    num_events = 0
    for tier, replica in replicas.items():
        published, removed = ([j[i : i + 16] for i in range(0, len(j), 16)] for j in cache.take_events(tier))
        assert replica.isdisjoint(published) and replica >= set(removed) and set(published).isdisjoint(removed)
        known = replica | {IndexModel.root_digest(NAMESPACE, tenant) for tenant in TENANTS}
        for each in published:
            assert parents[each] in known, f"a page was reported on the {tier} before its parent"
            known.add(each)
        replica |= set(published)
        replica -= set(removed)
        assert replica == ready[tier]
        num_events += len(published) + len(removed)
    return num_events


def states(cache: PrefixCache) -> dict[Place, NodeState]:
    """Returns the state of every page."""
    return {place: node.state for place, node, _ in pages_in_tree(cache)}


def transitions_are_legal(before: dict[Place, NodeState], after: dict[Place, NodeState], *, is_cut: bool) -> None:
    """Of a page that stays, only legal transitions are seen; only from D and H a page goes, unless it is cut off."""
    for place, state in before.items():
        if place in after:
            step = state, after[place]
            assert step[0] is step[1] or step in LEGAL, f"a page went from {step[0].name} to {step[1].name}"
        else:
            assert is_cut or state in (NodeState.D, NodeState.H), f"a page was evicted in state {state.name}"
