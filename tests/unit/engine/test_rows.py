"""The order of a row's lengths, which ``check`` asserts after each step of other tests."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.steps import Steps

PAGE = 4


def in_flight(num_draft: int) -> Steps:
    """Two rows after a step, another in flight."""
    steps = Steps(num_pages=40, page_size=PAGE, num_draft=num_draft, budget=64)
    for uid in (1, 2):
        steps.add(uid, np.random.default_rng(uid).integers(3, 200, 9).astype(np.int32), max_tokens=20)
    steps.step()
    steps.plan()
    steps.rows.check()
    return steps


@pytest.mark.parametrize("num_draft", [0, 3])
@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("num_published", 1),  # of pages
        ("num_published", -3),
        ("settled", -2),
        ("settled", 9),
        ("computed", -9),
        ("computed", 9),
        ("pending", -9),
        ("pending", 20),
        ("known", 30),
        ("limit", -30),
        ("limit", 100),
        ("drafted", 1),
        ("drafted", -4),
    ],
)
def test_a_length_out_of_order_is_found(column: str, change: int, num_draft: int) -> None:
    rows = in_flight(num_draft).rows
    getattr(rows, column)[2] += change
    with pytest.raises(AssertionError, match="row 2, published="):
        rows.check()


def test_a_row_without_the_pages_that_it_computes_is_found() -> None:
    rows = in_flight(0).rows
    rows.tables.num_pages[1] -= 1
    with pytest.raises(AssertionError, match=r"row 1, .* held=8"):
        rows.check()


def test_a_row_that_is_free_and_live_is_found() -> None:
    rows = in_flight(0).rows
    rows._free.append(2)
    with pytest.raises(AssertionError, match="free"):
        rows.check()


@pytest.mark.parametrize("num_draft", [0, 3])
def test_lengths_are_in_order_from_admission_to_release(num_draft: int) -> None:
    steps = in_flight(num_draft)
    rows, row = steps.rows, steps.row(1)
    assert rows.settled[row] < rows.computed[row] < rows.known[row] + rows.pending[row]
    steps.finish()
    rows.check()
    assert not rows.active.size
    assert len(steps.said[1]) == len(steps.said[2]) == 20
