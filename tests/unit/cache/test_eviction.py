"""Which leaf goes first: order, lazy deletion, and a heap that stays small."""

from __future__ import annotations

import numpy as np

from hiserve.cache.index.eviction import Eviction
from hiserve.cache.index.nodes import Node, make_root
from hiserve.core.transfers import NO_PAGES

ROOT = make_root(b"namespace")


def leaf(last_used: int) -> Node:
    node = Node(bytes(4), np.array([1], dtype=np.int32), [b"digest"], ROOT)
    node.last_used = last_used
    return node


def test_the_least_recently_used_goes_first() -> None:
    eviction, nodes = Eviction(), [leaf(used) for used in (3, 1, 2)]
    for node in nodes:
        eviction.add(node)
    assert [eviction.pop() for _ in range(4)] == [nodes[1], nodes[2], nodes[0], None]


def test_of_equally_old_ones_the_first_added_goes_first() -> None:
    eviction, nodes = Eviction(), [leaf(1) for _ in range(3)]
    for node in nodes:
        eviction.add(node)
    assert [eviction.pop() for _ in range(3)] == nodes


def test_use_moves_a_node_to_the_back() -> None:
    eviction, old, new = Eviction(), leaf(1), leaf(2)
    eviction.add(old)
    eviction.add(new)
    old.last_used = 3
    eviction.add(old)
    assert [eviction.pop() for _ in range(3)] == [new, old, None]


def test_what_is_locked_has_children_or_is_gone_is_passed_over() -> None:
    eviction, locked, parent, gone, victim = Eviction(), leaf(1), leaf(2), leaf(3), leaf(4)
    for node in (locked, parent, gone, victim):
        eviction.add(node)
    locked.num_locks = 1
    parent.num_device_children = 1
    gone.pages = NO_PAGES
    assert [eviction.pop(), eviction.pop()] == [victim, None]


def test_the_heap_stays_bounded_under_endless_use() -> None:
    eviction, nodes = Eviction(), [leaf(0) for _ in range(10)]
    for clock in range(1, 20_000):
        node = nodes[clock % 10]
        node.last_used = clock
        eviction.add(node)
    assert len(eviction) <= 1024
    assert [eviction.pop() for _ in range(11)] == [*nodes, None]


def test_a_sweep_keeps_what_nobody_used_since() -> None:
    eviction, idle, busy = Eviction(), [leaf(used) for used in range(1, 6)], leaf(6)
    for node in idle:
        eviction.add(node)
    for clock in range(6, 5000):
        busy.last_used = clock
        eviction.add(busy)
    assert [eviction.pop() for _ in range(7)] == [*idle, busy, None]


def test_the_heap_stays_within_twice_the_leaves_when_they_are_many() -> None:
    eviction, nodes = Eviction(), [leaf(0) for _ in range(3000)]
    for clock in range(1, 30_000):
        node = nodes[clock % 3000]
        node.last_used = clock
        eviction.add(node)
        assert len(eviction) <= 6000
    popped = [eviction.pop() for _ in range(3001)]
    assert popped == [*nodes, None]


# ---- by priority


def important(priority: int, last_used: int) -> Node:
    node = leaf(last_used)
    node.priority = priority
    return node


def test_the_lowest_priority_goes_first_and_of_equals_the_least_recently_used() -> None:
    eviction = Eviction("priority")
    nodes = [important(*rank) for rank in ((0, 9), (5, 1), (0, 3), (-2, 8), (5, 0))]
    for node in nodes:
        eviction.add(node)
    assert [eviction.pop() for _ in range(6)] == [nodes[3], nodes[2], nodes[0], nodes[4], nodes[1], None]


def test_a_node_that_a_request_of_higher_priority_used_goes_later() -> None:
    eviction, risen, other = Eviction("priority"), important(0, 1), important(1, 0)
    eviction.add(risen)
    eviction.add(other)
    risen.priority, risen.last_used = 2, 3
    eviction.add(risen)
    assert [eviction.pop() for _ in range(3)] == [other, risen, None]


def test_lru_does_not_look_at_priorities() -> None:
    eviction, nodes = Eviction(), [important(9, 1), important(0, 2)]
    for node in nodes:
        eviction.add(node)
    assert [eviction.pop(), eviction.pop()] == nodes
