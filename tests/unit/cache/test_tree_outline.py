"""The outline of the radix tree: levels, tiers, locks, and never a token."""

from __future__ import annotations

import msgspec

from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.cache.index.reports import MAX_NODES, outline
from tests.helpers.tiers import backed, demoted, digests, load, new_cache, serve, squeeze, store


def shown(cache: PrefixCache, depth: int = 9) -> list[tuple[int, str, int, int]]:
    return [(node.depth, node.state, node.num_tokens, node.num_locks) for node in outline(cache.tree, depth)]


def test_levels_come_parents_first_with_state_tokens_and_locks() -> None:
    cache = new_cache()
    cache.release(serve(cache, 1, 2, 3))
    lock = serve(cache, 1, 2, 4)
    assert shown(cache) == [(0, "", 0, 1), (1, "D", 4, 1), (2, "D", 2, 1), (2, "D", 2, 0)]
    assert shown(cache, 1) == [(0, "", 0, 1), (1, "D", 4, 1)]
    root, upper, used, other = outline(cache.tree, 2)
    assert (root.parent, upper.parent, used.parent, other.parent) == ("", root.digest, upper.digest, upper.digest)
    assert (root.num_children, upper.num_children, used.num_children) == (1, 2, 0)
    assert used.digest == digests(1, 2, 4)[-1].hex()[:16]
    cache.release(lock)


def test_states_tell_where_the_pages_are() -> None:
    cache = new_cache()
    demoted(cache, 1, 2)
    backed(cache, 3, 4)
    cache.release(serve(cache, 5, 6))
    found = sorted(node.state for node in outline(cache.tree, 1) if node.depth)
    assert found == ["D", "DH", "H"]
    cache.begin_offloads(9)
    _, copy = load(cache, 1, 2)
    assert sorted(node.state for node in outline(cache.tree, 1) if node.depth) == ["DH", "DW", "HL"]
    assert copy.host_pages.size == 2


def test_a_level_shows_those_used_last() -> None:
    cache = new_cache(400, 0)
    for page in range(MAX_NODES + 30):
        cache.begin_after(page + 1)
        cache.release(serve(cache, page))
    nodes = outline(cache.tree, 1)
    assert len(nodes) == 1 + MAX_NODES
    assert nodes[0].num_children == MAX_NODES + 30
    assert [node.last_step for node in nodes[1:]] == list(range(MAX_NODES + 30, 30, -1))


def test_nodes_below_what_is_not_shown_are_not_shown() -> None:
    cache = new_cache(400, 0)
    cache.begin_after(1)
    for page in range(2):
        cache.release(serve(cache, 999, page))
    for page in range(MAX_NODES):
        cache.begin_after(page + 2)
        cache.release(serve(cache, page))
    assert {node.depth for node in outline(cache.tree, 5)} == {0, 1}


def test_tenants_have_roots_of_their_own_and_no_token_is_told() -> None:
    cache = new_cache()
    for tenant in (b"one", b"two"):
        cache.release(serve(cache, 11, 12, 13, tenant=tenant))
    nodes = outline(cache.tree, 3)
    assert [node.depth for node in nodes] == [0, 0, 1, 1]
    assert len({node.digest for node in nodes}) == 4
    assert set(nodes[0].__struct_fields__) == {
        "digest",
        "parent",
        "depth",
        "num_tokens",
        "state",
        "num_locks",
        "num_host_locks",
        "last_step",
        "num_children",
    }
    packed = msgspec.msgpack.encode(nodes)
    assert all(key not in packed for node in cache.tree.nodes() for key in [node.key])


def test_an_empty_tree_has_no_nodes() -> None:
    cache = new_cache()
    assert outline(cache.tree, 3) == []
    cache.release(serve(cache, 1))
    store(cache)
    squeeze(cache)
    cache.flush()
    assert outline(cache.tree, 3) == []
