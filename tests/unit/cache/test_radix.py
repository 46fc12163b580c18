"""The radix tree: search, splits, growth and trims, away from locks and pools."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.nodes import Node, Tail
from hiserve.cache.index.radix import MAX_NODE_PAGES, RadixTree
from hiserve.core.digest import chain, pack_tokens

PAGE_SIZE = 2
PAGE_BYTES = 4 * PAGE_SIZE


def key(*pages: int) -> bytes:
    """Packs one page per number; two pages of equal tens begin with the same token."""
    return pack_tokens(np.array([[page // 10, page % 10] for page in pages], dtype=np.int32))


def grown(tree: RadixTree, parent: Node, *pages: int, at: int = 1) -> Node:
    """Adds a run below ``parent`` whose pages lie at ``at`` and on."""
    return tree.extend(parent, key(*pages), np.arange(at, at + len(pages), dtype=np.int32))


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree(PAGE_SIZE)


@pytest.fixture
def root(tree: RadixTree) -> Node:
    return tree.add_root(tree.root(b"namespace"))


def test_an_unknown_namespace_has_an_empty_root_that_is_not_kept(tree: RadixTree) -> None:
    assert tree.root(b"namespace").is_root and not tree.roots


def test_a_namespace_keeps_one_root(tree: RadixTree) -> None:
    first, second = tree.root(b"namespace"), tree.root(b"namespace")
    assert tree.add_root(first) is first
    assert tree.add_root(second) is first is tree.root(b"namespace")


def test_a_root_is_dropped_only_without_children_and_locks(tree: RadixTree, root: Node) -> None:
    root.num_locks = 1
    tree.drop_root_if_unused(root)
    assert tree.roots
    root.num_locks = 0
    leaf = grown(tree, root, 1)
    tree.drop_root_if_unused(root)
    assert tree.roots
    tree.trim(leaf, 1)
    tree.drop_root_if_unused(root)
    assert not tree.roots


def test_find_stops_where_tokens_differ_and_counts_whole_pages(tree: RadixTree, root: Node) -> None:
    upper = grown(tree, root, 11, 12, 13)
    lower = grown(tree, upper, 21, 22, at=4)
    assert tree.find(root, b"") == (root, 0, 0)
    assert tree.find(root, key(14)) == (root, 0, 0)
    assert tree.find(root, key(11)) == (upper, 1, 1)
    assert tree.find(root, key(11, 12, 14)) == (upper, 2, 2)
    assert tree.find(root, key(11, 12, 13)) == (upper, 3, 3)
    assert tree.find(root, key(11, 12, 13, 22)) == (upper, 3, 3)
    assert tree.find(root, key(11, 12, 13, 21, 23)) == (lower, 1, 4)
    assert tree.find(root, key(11, 12, 13, 21, 22, 99)) == (lower, 2, 5)


@pytest.mark.parametrize("num_tokens", [1, 3, 5])
def test_a_partial_page_matches_nothing(tree: RadixTree, root: Node, num_tokens: int) -> None:
    grown(tree, root, 11, 12, 13)
    assert tree.find(root, key(11, 12, 13)[: 4 * num_tokens])[2] == num_tokens // PAGE_SIZE


def test_a_split_keeps_the_old_node_as_the_lower_part(tree: RadixTree, root: Node) -> None:
    node = grown(tree, root, 11, 12, 13)
    child = grown(tree, node, 21, at=4)
    node.num_locks, node.last_used = 2, 7
    upper = tree.split(node, 1)
    assert (upper.key, upper.pages.tolist()) == (key(11), [1])
    assert (node.key, node.pages.tolist()) == (key(12, 13), [2, 3])
    assert upper.digests + node.digests == chain(b"namespace", key(11, 12, 13), PAGE_SIZE)
    assert (upper.num_locks, upper.last_used, node.num_locks, node.last_used) == (2, 7, 2, 7)
    assert root.children == {key(11): upper} and upper.children == {key(12): node} and node.children == {key(21): child}
    assert upper.parent is root and node.parent is upper and child.parent is node
    assert tree.find(root, key(11, 12, 13, 21)) == (child, 1, 4)


@pytest.mark.parametrize("num_pages", [0, 3, 4])
def test_a_split_leaves_pages_on_both_sides(tree: RadixTree, root: Node, num_pages: int) -> None:
    with pytest.raises(AssertionError, match="cannot cut"):
        tree.split(grown(tree, root, 11, 12, 13), num_pages)


def test_digests_go_on_from_the_parent(tree: RadixTree, root: Node) -> None:
    upper = grown(tree, root, 11, 12)
    lower = tree.extend(upper, key(13), np.array([3], dtype=np.int32))
    assert upper.digests + lower.digests == chain(b"namespace", key(11, 12, 13), PAGE_SIZE)


def test_a_leaf_that_only_the_caller_holds_grows_in_place(tree: RadixTree, root: Node) -> None:
    leaf = grown(tree, root, 11)
    leaf.num_locks = 1
    assert grown(tree, leaf, 12, 13, at=2) is leaf
    assert (leaf.key, leaf.pages.tolist(), len(leaf.digests)) == (key(11, 12, 13), [1, 2, 3], 3)
    assert root.children == {key(11): leaf}


@pytest.mark.parametrize("num_locks", [0, 2])
def test_a_leaf_that_others_may_hold_gets_a_child(tree: RadixTree, root: Node, num_locks: int) -> None:
    leaf = grown(tree, root, 11)
    leaf.num_locks = num_locks
    assert grown(tree, leaf, 12).parent is leaf
    assert leaf.pages.size == 1


def test_a_node_with_children_gets_another_child(tree: RadixTree, root: Node) -> None:
    node = grown(tree, root, 11)
    grown(tree, node, 12)
    node.num_locks = 1
    assert grown(tree, node, 13).parent is node


def test_a_root_never_grows_in_place(tree: RadixTree, root: Node) -> None:
    root.num_locks = 1
    assert grown(tree, root, 11) is not root and root.key == b""


def test_growth_in_place_ends_at_the_largest_node(tree: RadixTree, root: Node) -> None:
    leaf = grown(tree, root, *[11] * (MAX_NODE_PAGES - 1))
    leaf.num_locks = 1
    assert grown(tree, leaf, 12) is leaf and leaf.pages.size == MAX_NODE_PAGES
    assert grown(tree, leaf, 13) is not leaf and leaf.pages.size == MAX_NODE_PAGES


def test_extending_with_what_is_there_is_our_own_fault(tree: RadixTree, root: Node) -> None:
    grown(tree, root, 11)
    with pytest.raises(AssertionError, match="already in the tree"):
        grown(tree, root, 11, 12)


@pytest.mark.parametrize("num_pages", [0, 1, 3])
def test_extending_needs_a_page_for_each_page_of_the_key(tree: RadixTree, root: Node, num_pages: int) -> None:
    with pytest.raises(AssertionError, match=f"{num_pages} pages for a key of"):
        tree.extend(root, key(11, 12)[: 16 * bool(num_pages)], np.ones(num_pages, dtype=np.int32))


def test_the_tree_keeps_no_view_of_the_callers_pages(tree: RadixTree, root: Node) -> None:
    pages = np.array([1, 2], dtype=np.int32)
    node = tree.extend(root, key(11, 12), pages)
    pages[:] = 0
    assert node.pages.tolist() == [1, 2]


def test_a_trim_takes_the_tail_and_unlinks_what_is_empty(tree: RadixTree, root: Node) -> None:
    leaf = grown(tree, root, 11, 12, 13)
    digests = list(leaf.digests)
    pages, _, lost = tree.trim(leaf, 2)
    assert (pages.tolist(), lost) == ([2, 3], digests[1:])
    assert (leaf.key, leaf.pages.tolist(), leaf.digests) == (key(11), [1], digests[:1])
    assert root.children == {key(11): leaf}
    pages, _, lost = tree.trim(leaf, 1)
    assert (pages.tolist(), lost, root.children) == ([1], digests[:1], {})


class Pools:
    """Notes which tails leave the device."""

    def __init__(self) -> None:
        self.left: list[Tail] = []

    def leave_device(self, tail: Tail) -> None:
        tail.pages = None
        self.left.append(tail)

    def leave_host(self, tail: Tail) -> None:
        raise AssertionError("no tail is on the host")


def test_a_trim_closes_the_tails_behind_it_alone(tree: RadixTree, root: Node) -> None:
    leaf, pools = grown(tree, root, 11, 12, 13), Pools()
    made = {at: Tail(leaf, at, at, pools) for at in (1, 2, 3)}
    for at, tail in made.items():
        tail.pages = np.array([at], dtype=np.int32)
    leaf.tails = dict(made)
    tree.trim(leaf, 1)
    assert pools.left == [made[3]] and leaf.tails == {1: made[1], 2: made[2]}


def test_trimming_more_than_there_is_or_an_inner_node_is_our_own_fault(tree: RadixTree, root: Node) -> None:
    node = grown(tree, root, 11)
    with pytest.raises(AssertionError, match="cannot remove 2 of 1"):
        tree.trim(node, 2)
    grown(tree, node, 12)
    with pytest.raises(AssertionError):
        tree.trim(node, 1)


def test_nodes_walks_everything_but_roots(tree: RadixTree, root: Node) -> None:
    upper = grown(tree, root, 11)
    expected = [upper, grown(tree, upper, 12), grown(tree, upper, 13)]
    other = grown(tree, tree.add_root(tree.root(b"other")), 11)
    assert {id(node) for node in tree.nodes()} == {id(node) for node in [*expected, other]}


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_tails_keep_their_boundaries_when_a_node_is_split_and_joined(tree: RadixTree, root: Node, cut: int) -> None:
    leaf = grown(tree, root, 11, 12, 13, 14)
    tails = {at: Tail(leaf, at, at, Pools()) for at in (1, 2, 4)}
    for at, tail in tails.items():
        tail.pages = np.array([at], dtype=np.int32)
    leaf.tails = dict(tails)
    upper = tree.split(leaf, cut)
    assert upper.tails == {at: tail for at, tail in tails.items() if at <= cut}
    assert leaf.tails == {at - cut: tail for at, tail in tails.items() if at > cut}
    tree.join(leaf)
    assert leaf.tails == tails and all(tail.is_open for tail in tails.values())
    assert not upper.tails and [(tail.node, tail.at) for tail in tails.values()] == [(leaf, at) for at in tails]
