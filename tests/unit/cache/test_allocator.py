"""The page allocator: who gets which page, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.allocator import PADDING_PAGE, PageAllocator
from hiserve.core.plan import Int32Array


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def taken(pages: PageAllocator, *wanted: int) -> list[int]:
    result = pages.allocate(ints(*wanted))
    assert result is not None and result.dtype == np.int32
    return result.tolist()


def test_every_page_but_the_sink_is_handed_out_once() -> None:
    pages = PageAllocator(6)
    assert sorted(taken(pages, *[0] * 5)) == [1, 2, 3, 4, 5]
    assert pages.num_free == 0 and pages.free_pages().size == 0


def test_fresh_pages_come_in_ascending_order() -> None:
    assert taken(PageAllocator(6), 0, 0, 0) == [1, 2, 3]


def test_too_few_free_pages_is_an_answer_and_takes_nothing() -> None:
    pages = PageAllocator(4)
    taken(pages, 0)
    assert pages.allocate(ints(2, 0, 0)) is None
    assert pages.free_pages().tolist() == [2, 3] and pages.num_free == 2
    assert taken(pages, 0, 0) == [2, 3]


def test_nothing_wanted_is_nothing_taken() -> None:
    assert taken(PageAllocator(4)) == []


def test_a_free_page_that_is_wished_for_is_granted_and_not_handed_out_again() -> None:
    pages = PageAllocator(8)
    assert taken(pages, 5) == [5]
    assert taken(pages, 0, 0, 0, 0, 0, 0) == [1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("wish", [PADDING_PAGE, 1, 8, 1000])
def test_a_wish_for_the_sink_or_a_used_page_or_one_outside_the_pool_is_no_wish(wish: int) -> None:
    pages = PageAllocator(8)
    taken(pages, 1)
    assert taken(pages, wish) == [2]


def test_of_two_wishes_for_a_page_the_first_is_granted() -> None:
    assert taken(PageAllocator(8), 4, 4, 0, 4) == [4, 1, 2, 3]


def test_a_wish_comes_before_those_without_one() -> None:
    assert taken(PageAllocator(4), 0, 1, 0) == [2, 1, 3]


def test_each_allocation_of_a_page_has_a_number_of_its_own() -> None:
    pages = PageAllocator(4)
    first = pages.allocate(ints(0, 0))
    assert first is not None and pages.owner[first].tolist() == [1, 2]
    pages.free(first)
    assert taken(pages, 0) == [1]
    assert pages.owner.tolist() == [0, 3, 2, 0]


def test_whoever_wishes_for_none_gets_what_comes_first() -> None:
    pages = PageAllocator(6)
    taken(pages, 2)
    assert pages.allocate_any(5) is None and pages.num_free == 4
    found = pages.allocate_any(3)
    assert found is not None and found.tolist() == [1, 3, 4]
    assert pages.owner.tolist() == [0, 2, 1, 3, 4, 0] and pages.num_free == 1
    assert taken(pages, 0) == [5]


def test_given_pages_come_back_in_the_order_given() -> None:
    pages = PageAllocator(6)
    taken(pages, *[0] * 5)
    pages.free(ints(4, 2, 5))
    assert taken(pages, 0, 0, 0) == [4, 2, 5]


def test_a_page_taken_by_wish_and_given_back_is_handed_out_once() -> None:
    pages = PageAllocator(6)
    for _ in range(10):
        pages.free(ints(*taken(pages, 3, 4)))
    assert sorted(taken(pages, *[0] * 5)) == [1, 2, 3, 4, 5]


def test_giving_a_free_page_or_the_sink_is_our_own_fault() -> None:
    pages = PageAllocator(4)
    taken(pages, 0)
    pages.free(ints(1))
    for wrong in (ints(1), ints(3), ints(PADDING_PAGE)):
        with pytest.raises(AssertionError, match="not all in use"):
            pages.free(wrong)
    assert pages.num_free == 3


def test_giving_a_page_twice_at_once_is_our_own_fault() -> None:
    pages = PageAllocator(4)
    taken(pages, 0, 0)
    with pytest.raises(AssertionError, match="twice"):
        pages.free(ints(1, 2, 1))
    assert pages.num_free == 1


def test_a_pool_needs_a_page_beside_the_sink() -> None:
    with pytest.raises(AssertionError, match="padding page"):
        PageAllocator(1)
