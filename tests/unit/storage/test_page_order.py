"""The order of removal against its definition: of the pages with none behind them the least recently used."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hiserve.cache.storage.page_order import PageOrder


def name(number: int) -> bytes:
    return number.to_bytes(2, "big")


@pytest.mark.parametrize("seed", range(3))
def test_the_least_recently_used_page_without_another_behind_it_goes_next(seed: int) -> None:
    """Prefixes are paths to the nodes of a tree: the page before page n is page n // 2."""
    rng, order = random.Random(seed), PageOrder()
    used: dict[bytes, int] = {}
    before: dict[bytes, bytes] = {}
    sizes: dict[bytes, int] = {}
    for tick in range(600):
        number, chain = rng.randrange(1, 64), list[bytes]()
        while number and len(chain) < rng.randint(1, 6):
            chain.insert(0, name(number))
            number //= 2
        chosen = rng.randrange(4)
        if chosen == 0:
            order.remove(chain[-1])
            for each in (used, before, sizes):
                each.pop(chain[-1], None)
        else:
            for key in chain if chosen > 1 else ():
                sizes[key] = rng.randint(1, 9)
                order.add(key, sizes[key])
                used.setdefault(key, 0)
            order.use(chain)
            for place, key in enumerate(reversed(chain)):
                if key in used:
                    used[key] = 100 * tick + place
            before |= {key: first for first, key in pairwise(chain) if key in used and key not in before}
        free = [key for key in used if key not in before.values()]
        assert order.next() == min(free, key=lambda key: used[key], default=None)
        assert order.num_bytes == sum(sizes.values()) and len(order) == len(used)
        assert order.by_use() == sorted(used, key=lambda key: used[key])
        if rng.random() < 0.05:
            order.retain(kept := rng.sample(sorted(used), len(used) // 2))
            for each in (used, before, sizes):
                for key in [*each]:
                    if key not in kept:
                        del each[key]
    assert len(order._last) <= 4 * 64 + 64


def test_pages_that_are_each_said_to_be_behind_another_go_too() -> None:
    order = PageOrder()
    for key in (b"a", b"b"):
        order.add(key, 1)
    order.use([b"a", b"b"])
    order.use([b"b", b"a"])
    assert order.next() == b"a"
    order.remove(b"a")
    assert order.next() == b"b"
    order.remove(b"b")
    assert order.next() is None and order.num_bytes == 0
