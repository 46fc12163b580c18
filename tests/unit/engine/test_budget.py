from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hiserve.engine.budget import Allocation, allocate_tokens


def share(
    known: list[int],
    computed: list[int],
    *,
    budget: int,
    pending: list[int] | None = None,
    limit: list[int] | None = None,
    to_score: list[int] | None = None,
    num_draft: int = 0,
    max_len: int = 1000,
) -> Allocation:
    def column(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    return allocate_tokens(
        known=column(known),
        pending=column(pending or [0] * len(known)),
        computed=column(computed),
        limit=column(limit or [1000] * len(known)),
        to_score=column(to_score or [0] * len(known)),
        drafted=column([num_draft] * len(known)) if num_draft else None,
        max_len=max_len,
        budget=budget,
    )


def test_decode_rows_come_before_prompts_wherever_they_stand() -> None:
    got = share(known=[100, 51, 80, 61], computed=[0, 50, 40, 60], budget=10)
    assert got.num_new.tolist() == [8, 1, 0, 1]
    assert got.samples.tolist() == [False, True, False, True]


def test_prompts_get_what_is_left_in_order() -> None:
    got = share(known=[5, 6, 7], computed=[0, 0, 0], budget=12)
    assert got.num_new.tolist() == [5, 6, 1]
    assert got.samples.tolist() == [True, True, False]


def test_a_step_samples_only_when_it_reaches_the_end() -> None:
    assert share(known=[20], computed=[10], budget=9).samples.tolist() == [False]
    assert share(known=[20], computed=[10], budget=10).samples.tolist() == [True]


def test_a_row_counts_the_tokens_that_steps_in_flight_will_append() -> None:
    got = share(known=[20], pending=[1], computed=[20], budget=9)
    assert (got.num_new.tolist(), got.samples.tolist()) == ([1], [True])


def test_a_row_that_may_have_reached_its_limit_in_flight_waits() -> None:
    got = share(known=[20, 20, 20], pending=[4, 4, 4], computed=[23, 23, 22], limit=[24, 25, 24], budget=9)
    assert got.num_new.tolist() == [0, 1, 0]
    assert got.samples.tolist() == [False, True, False]


def test_a_row_drafts_only_once_it_has_caught_up() -> None:
    got = share(known=[20, 20], computed=[10, 19], budget=100, num_draft=3)
    assert got.num_new.tolist() == [10, 4]
    assert got.num_draft.tolist() == [0, 3]


def test_drafts_stop_before_the_end_of_the_context_since_a_bonus_token_follows() -> None:
    """Where a row may go no further they do not stop: rows of one width are one graph."""
    got = share(known=[29, 28, 20], computed=[28, 27, 19], limit=[30, 30, 21], budget=100, num_draft=3, max_len=30)
    assert got.num_draft.tolist() == [0, 1, 3]
    assert got.num_new.tolist() == [1, 2, 4]


def test_drafts_are_cut_by_the_budget_but_the_last_token_is_not() -> None:
    got = share(known=[20, 20, 20], computed=[19, 19, 19], budget=6, num_draft=3)
    assert got.num_new.tolist() == [4, 2, 0]
    assert got.num_draft.tolist() == [3, 1, 0]
    assert got.samples.tolist() == [True, True, False]


def test_a_step_scores_no_more_than_it_may_and_others_compute_on() -> None:
    lengths = [2000, 300, 400, 51]
    got = share(known=lengths, computed=[0, 0, 0, 50], to_score=[0, 299, 399, 0], limit=[3000] * 4, budget=5000)
    assert got.num_new.tolist() == [2000, 300, 512 - 299, 1]
    assert got.num_scored.tolist() == [0, 299, 512 - 299, 0]
    assert got.samples.tolist() == [True, True, False, True]


def test_a_prompt_longer_than_a_step_may_score_comes_in_pieces() -> None:
    got = share(known=[2000, 900], computed=[0, 0], to_score=[1999, 899], limit=[3000] * 2, budget=5000)
    assert (got.num_new.tolist(), got.num_scored.tolist()) == ([512, 0], [512, 0])
    assert share(known=[2000], computed=[1900], to_score=[99], limit=[3000], budget=5000).num_new.tolist() == [100]


rows = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 4), st.integers(1, 60), st.integers(-2, 20)), min_size=1, max_size=8
)


@settings(max_examples=200, deadline=None)
@given(rows=rows, budget=st.integers(0, 120), num_draft=st.integers(0, 4))
def test_the_budget_is_used_up_and_never_exceeded(
    rows: list[tuple[int, int, int, int]], budget: int, num_draft: int
) -> None:
    known = [known for known, *_ in rows]
    pending = [pending for _, pending, *_ in rows]
    computed = [max(0, k + p - behind) for (k, p, behind, _) in rows]
    limit = [k + p + left for (k, p, _, left) in rows]
    got = share(known, computed, pending=pending, limit=limit, budget=budget, num_draft=num_draft)
    most = share(known, computed, pending=pending, limit=limit, budget=10_000, num_draft=num_draft)
    assert got.num_new.sum() == min(budget, most.num_new.sum())
    assert (got.num_new <= most.num_new).all()
    assert (got.num_draft <= most.num_draft).all()
    assert (got.num_draft[~got.samples] == 0).all()
    behind = np.array(known) + np.array(pending) - np.array(computed)
    assert (got.num_new - got.num_draft <= behind).all()
    assert ((got.num_new - got.num_draft == behind) == got.samples)[got.num_new > 0].all()
