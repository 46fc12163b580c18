"""Which pages a row gets, publishes, moves to and loses."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.core.digest import pack_tokens
from hiserve.core.plan import NO_WRITES, BatchPlan
from hiserve.core.request import FinishReason
from tests.helpers.echo import oracle
from tests.helpers.steps import Steps

PAGE = 4  # the page size of ``echo_engine``


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)


def continued(tokens: np.ndarray, count: int) -> np.ndarray:
    """The tokens and what the echo model says to them."""
    return np.append(tokens, oracle(tokens, count)).astype(np.int32)


def writes(plan: BatchPlan) -> list[tuple[int, int, int, int]]:
    table = plan.table
    columns = (table.rows, table.indices, table.pages, table.owners)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def num_findable(steps: Steps, tokens: np.ndarray) -> int:
    return steps.cache.match(b"", pack_tokens(np.append(tokens, 0))).num_tokens


# --- publication --------------------------------------------------------------------------


def test_a_page_is_findable_once_the_step_that_filled_it_is_committed() -> None:
    steps = Steps(num_pages=30)
    known = continued(prompt(3), 8)
    steps.add(1, prompt(3), max_tokens=8)
    steps.step()
    assert num_findable(steps, known) == 0  # the fourth token is known, but not computed
    steps.plan()
    assert num_findable(steps, known) == 0  # it is being computed
    steps.commit()
    assert num_findable(steps, known) == 4
    for _ in range(3):
        steps.step()
    assert num_findable(steps, known) == 4
    steps.step()
    assert num_findable(steps, known) == 8


def test_a_page_is_not_published_by_the_step_before_the_one_that_fills_it() -> None:
    steps = Steps(num_pages=30, budget=5)
    steps.add(1, prompt(9), max_tokens=2)
    steps.plan()
    steps.plan()  # the rest of the prompt
    steps.commit()
    assert num_findable(steps, prompt(9)) == 4
    steps.commit()
    assert num_findable(steps, prompt(9)) == 8
    steps.finish()


def test_rejected_drafts_do_not_fill_a_page() -> None:
    steps = Steps(num_pages=30, num_draft=3)
    steps.add(1, prompt(5))
    steps.emit(steps.planner.plan(), [11])
    steps.emit(steps.planner.plan(), [12, 13])  # computed: 11 and three drafts, of which 12 was right
    steps.emit(steps.planner.plan(), [14])  # computed: 13 and three drafts, all wrong
    known = np.append(prompt(5), [11, 12, 13, 14])
    assert num_findable(steps, known) == 8
    steps = Steps(num_pages=30, num_draft=3)
    steps.add(1, prompt(6))
    steps.emit(steps.planner.plan(), [11])
    steps.emit(steps.planner.plan(), [12])  # known: eight, the last of them not computed
    assert num_findable(steps, np.append(prompt(6), [11, 12])) == 4


def test_chunks_of_a_prompt_are_published_as_they_are_committed() -> None:
    steps = Steps(num_pages=30, budget=6)
    steps.add(1, prompt(15), max_tokens=1)
    found = []
    for _ in range(3):
        steps.step()
        found.append(num_findable(steps, prompt(15)))
    assert found == [4, 12, 12]
    assert steps.ends


def test_what_was_computed_after_a_stop_is_not_published() -> None:
    steps = Steps(num_pages=30, num_draft=3, eos=(8,))
    steps.add(1, prompt(5))
    steps.emit(steps.planner.plan(), [11])
    steps.emit(steps.planner.plan(), [8, 12, 13, 14])  # nine tokens computed, seven of them wanted
    assert steps.ends == {1: FinishReason.STOP}
    known = np.append(prompt(5), [11, 8, 12, 13])
    assert num_findable(steps, known) == 4
    assert steps.cache.device.num_evictable == 1
    assert steps.cache.device.pages.num_free == 28


def test_a_reply_is_cached_for_the_next_turn() -> None:
    steps = Steps(num_pages=30, budget=64)
    steps.add(1, prompt(6), max_tokens=11)
    steps.finish()
    steps.add(2, np.append(continued(prompt(6), 11), prompt(3, seed=2)), max_tokens=2)
    steps.finish()
    assert steps.cached == {1: 0, 2: 16}


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    steps = Steps(num_pages=30, budget=64)
    steps.add(1, prompt(8), max_tokens=1)
    steps.finish()
    steps.add(2, prompt(8), max_tokens=2)
    plan = steps.step()
    assert plan.num_new.tolist() == [4]
    assert plan.admit[0].num_computed == 4
    steps.finish()
    assert steps.cached[2] == 4
    assert steps.said[2] == oracle(prompt(8), 2)


# --- relocation ---------------------------------------------------------------------------


def relocated() -> tuple[Steps, int, int, int]:
    """Request 2 has just filled a page with the tokens of request 1's first page, which is older.

    Returns the steps, 2's row, 1's page and the number of that page's allocation.
    """
    steps = Steps(num_pages=30, budget=64)
    known = continued(prompt(3), 5)
    steps.add(1, known, max_tokens=9)
    owner = writes(steps.step())[0][3]
    steps.add(2, prompt(3), max_tokens=9)  # shorter than a page: neither waits nor hits
    steps.step()
    row, canonical = steps.row(2), int(steps.rows.tables.pages[steps.row(1), 0])
    assert steps.rows.tables.pages[row, 0] != canonical
    before, free = steps.cache.tiers.relocation_version, steps.cache.device.pages.num_free
    growth = steps.plan()
    steps.commit()
    assert steps.rows.tables.pages[row, 0] == canonical
    assert steps.cache.tiers.relocation_version == growth.relocation_version + 1 == before + 1
    assert steps.cache.device.pages.num_free == free - len(writes(growth)) + 1
    return steps, row, canonical, owner


def test_filling_a_page_that_is_cached_already_moves_the_row_to_the_cached_one() -> None:
    steps, row, canonical, owner = relocated()
    plan = steps.plan()
    assert plan.relocation_version == steps.cache.tiers.relocation_version
    assert (row, 0, canonical, owner) in writes(plan)
    assert [entry[:2] for entry in writes(steps.plan())].count((row, 0)) == 0
    steps.finish()
    assert steps.said[2] == oracle(prompt(3), 9)
    assert steps.said[1] == oracle(continued(prompt(3), 5), 9)


def test_a_move_is_dropped_when_the_row_changes_hands_before_the_next_plan() -> None:
    steps, row, canonical, _ = relocated()
    steps.planner.abort([2])
    steps.add(3, prompt(6, seed=3), max_tokens=9)
    plan = steps.plan()
    assert steps.row(3) == row
    assert canonical not in [page for r, _, page, _ in writes(plan) if r == row]
    assert [index for r, index, *_ in writes(plan) if r == row] == [0, 1]
    steps.finish()
    assert steps.said[3] == oracle(prompt(6, seed=3), 9)


def test_a_page_reaches_the_device_with_the_number_of_its_allocation_each_time() -> None:
    steps = Steps(num_pages=30, budget=64)
    steps.add(1, prompt(9), max_tokens=9)
    first = writes(steps.step())
    assert [index for _, index, *_ in first] == [0, 1, 2]
    assert [owner for *_, owner in first] == steps.cache.device.pages.owner[steps.rows.tables.pages[1, :3]].tolist()
    steps.finish()
    steps.add(2, np.append(prompt(9), 5), max_tokens=2)
    again = writes(steps.step())
    assert again[:2] == first[:2]  # the same row, and two pages that it hits
    assert again[2][3] > max(owner for *_, owner in first)


def test_a_row_grows_into_the_pages_after_its_last_one() -> None:
    steps = Steps(num_pages=30, budget=64)
    steps.add(1, prompt(9), max_tokens=20)
    for _ in range(20):
        steps.step()
    pages = steps.rows.tables.pages[1, :7]
    assert np.array_equal(pages, pages[0] + np.arange(7))


# --- too few pages ------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_latest_admitted_is_preempted_and_goes_on_with_the_same_tokens(ahead: int) -> None:
    steps = Steps(num_pages=13, budget=64)
    for uid in (1, 2, 3):
        steps.add(uid, prompt(10, seed=uid), max_tokens=20)
    for _ in range(ahead):
        steps.plan()
    while not steps.planner.stats().preemptions:
        plan = steps.plan()
        steps.commit()
    assert steps.running() == [1, 2]
    assert plan.release.tolist() == [3]
    said = list(steps.said[3])
    assert said
    while len(steps.running()) != 1:
        steps.plan()
        steps.commit()
    steps.finish()
    assert steps.said == {uid: oracle(prompt(10, seed=uid), 20) for uid in (1, 2, 3)}
    assert steps.said[3][: len(said)] == said
    assert steps.cached == {1: 0, 2: 0, 3: 0}  # told once, as of the first admission
    assert steps.planner.stats().prompt_tokens == 30
    assert steps.planner.stats().cached_tokens == 0


def test_a_row_that_loses_its_place_before_its_first_token_reports_its_first_hit_later() -> None:
    steps = Steps(num_pages=12, budget=64, num_draft=3)
    steps.add(9, prompt(9), max_tokens=1)
    steps.finish()
    steps.add(1, prompt(15, seed=1), max_tokens=12)
    steps.step()
    steps.add(2, prompt(16), max_tokens=4)
    steps.plan()
    assert steps.running() == [1, 2]
    while 2 in steps.running():
        steps.plan()
    assert steps.planner.stats().preemptions == 1
    assert 2 not in steps.cached
    steps.finish()
    assert steps.cached[2] == 8
    assert steps.said[2] == oracle(prompt(16), 4)


def test_admission_leaves_the_pages_that_running_rows_will_need() -> None:
    steps = Steps(num_pages=6, budget=64)
    steps.add(1, prompt(8, seed=1), max_tokens=4)
    steps.add(2, prompt(11, seed=2), max_tokens=2)
    steps.plan()
    assert steps.running() == [1]  # three pages are free, but one is promised: 1 says a token that opens a page
    steps.finish()
    assert steps.planner.stats().preemptions == 0
    assert steps.said == {1: oracle(prompt(8, seed=1), 4), 2: oracle(prompt(11, seed=2), 2)}


def test_admission_counts_the_pages_it_hits_and_locks() -> None:
    steps = Steps(num_pages=6, budget=64)
    steps.add(1, prompt(16), max_tokens=1)
    steps.finish()
    assert steps.cache.device.num_evictable == 4
    steps.add(2, np.append(prompt(16), 7).astype(np.int32), max_tokens=3)  # 4 pages hit, one more to take
    steps.finish()
    assert steps.cached[2] == 16
    assert steps.planner.stats().evicted_pages == 0
    assert steps.planner.stats().preemptions == 0


def test_a_request_too_big_for_now_waits_without_evicting_anything() -> None:
    steps = Steps(num_pages=11, budget=64)
    steps.add(1, prompt(8, seed=1), max_tokens=1)
    steps.finish()
    steps.add(2, prompt(17, seed=2), max_tokens=3)
    steps.step()
    steps.add(3, prompt(21, seed=3), max_tokens=2)
    steps.step()
    assert steps.running() == [2]
    assert num_findable(steps, prompt(8, seed=1)) == 8
    steps.finish()
    assert steps.said[3] == oracle(prompt(21, seed=3), 2)


# --- flush --------------------------------------------------------------------------------


def test_flush_empties_the_cache_but_for_pages_in_use() -> None:
    steps = Steps(num_pages=30, budget=64)
    steps.add(1, prompt(13, seed=1), max_tokens=1)
    steps.finish()
    steps.add(2, prompt(13, seed=2), max_tokens=6)
    steps.step()
    steps.plan()
    assert steps.planner.flush() == 3
    assert num_findable(steps, prompt(13, seed=1)) == 0
    assert num_findable(steps, prompt(13, seed=2)) == 12
    steps.finish()
    assert steps.said[2] == oracle(prompt(13, seed=2), 6)


def test_a_plan_makes_no_arrays_for_tables_that_do_not_change() -> None:
    steps = Steps(num_pages=30)
    steps.add(1, prompt(3), max_tokens=8)
    first, second, third = (steps.step() for _ in range(3))
    assert writes(first) and writes(third), "the prompt takes a page, and so does the fifth token"
    assert second.table is NO_WRITES
    assert all(plan.window_table is NO_WRITES for plan in (first, second, third)), "its pages have all layers"
