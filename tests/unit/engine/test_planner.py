"""Who runs when, where requests end, and what a late result may do."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.core.request import FinishReason, SamplingParams
from hiserve.engine.queue import Request
from tests.helpers.echo import oracle
from tests.helpers.steps import Steps

PAGE = 4  # the page size of ``echo_engine``


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)


# --- chunks and rows ----------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_beside_a_decoding_row() -> None:
    steps = Steps(num_pages=30, budget=8)
    steps.add(1, prompt(5, seed=1), max_tokens=20)
    steps.step()
    steps.add(2, prompt(18, seed=2), max_tokens=5)
    plans = [steps.step() for _ in range(4)]
    assert [plan.num_new.tolist() for plan in plans] == [[1, 7], [1, 7], [1, 4], [1, 1]]
    assert [plan.samples.tolist() for plan in plans] == [[True, False], [True, False], [True, True], [True, True]]
    assert len(steps.said[1]) == 5
    assert steps.said[2] == oracle(prompt(18, seed=2), 2)


def test_requests_are_admitted_in_order_while_rows_last() -> None:
    steps = Steps(num_pages=60, budget=64, max_rows=2)
    for uid in range(3):
        steps.add(uid, prompt(5, seed=uid), max_tokens=1 + uid)
    assert [steps.rows.uid[each.row] for each in steps.plan().admit] == [0, 1]
    steps.commit()
    assert [steps.rows.uid[each.row] for each in steps.plan().admit] == [2]
    steps.finish()
    assert {uid: len(said) for uid, said in steps.said.items()} == {0: 1, 1: 2, 2: 3}


def test_nothing_to_do_is_no_step() -> None:
    steps = Steps(num_pages=10)
    assert steps.planner.plan() is None
    assert not steps.planner.has_work


# --- where a request ends -----------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_ends_at_max_tokens(depth: int) -> None:
    steps = Steps(num_pages=30, budget=64)
    steps.add(1, prompt(10), max_tokens=3)
    for _ in range(depth):
        steps.plan()
    steps.finish()
    assert steps.said == {1: oracle(prompt(10), 3)}
    assert steps.ends == {1: FinishReason.LENGTH}


@pytest.mark.parametrize("max_tokens", [None, 50])
def test_a_request_ends_at_the_context_limit(max_tokens: int | None) -> None:
    steps = Steps(num_pages=30, max_len=24, budget=64)
    steps.add(1, prompt(20), max_tokens)
    steps.finish()
    assert steps.said == {1: oracle(prompt(20), 4)}
    assert steps.ends == {1: FinishReason.LENGTH}


def test_a_stop_token_is_reported_and_ends_the_reply_even_as_the_last_allowed_one() -> None:
    out = oracle(prompt(10), 6)
    assert out.index(out[3]) == 3
    for max_tokens in (4, 6):
        steps = Steps(num_pages=30, budget=64, eos=(out[3],))
        steps.add(1, prompt(10), max_tokens)
        steps.finish()
        assert steps.said == {1: out[:4]}
        assert steps.ends == {1: FinishReason.STOP}


def test_a_stop_token_inside_an_accepted_run_cuts_the_rest() -> None:
    steps = Steps(num_pages=30, num_draft=3, eos=(7, 8))
    steps.add(1, prompt(5, seed=1))
    steps.add(2, prompt(6, seed=2))
    steps.emit(steps.planner.plan(), [11], [12])
    plan = steps.planner.plan()
    assert plan.num_draft.tolist() == [3, 3]
    steps.emit(plan, [20, 8, 21, 7], [30, 31, 32, 33])
    assert steps.said == {1: [11, 20, 8], 2: [12, 30, 31, 32, 33]}
    assert steps.ends == {1: FinishReason.STOP}
    assert steps.planner.stats().generated_tokens == 8


def test_a_rejected_draft_that_is_a_stop_token_stops_nothing() -> None:
    steps = Steps(num_pages=30, num_draft=2, eos=(8,))
    steps.add(1, prompt(5))
    steps.emit(steps.planner.plan(), [11])
    plan = steps.planner.plan()
    steps.emit(plan, [20], rejected=8)  # 20 stands in for the first of two drafts
    assert steps.said == {1: [11, 20]}
    assert not steps.ends


def test_a_request_that_ignores_stop_tokens_runs_to_its_limit() -> None:
    out = oracle(prompt(10), 6)
    steps = Steps(num_pages=30, budget=64, eos=(out[3],))
    sampling = SamplingParams(seed=1, max_tokens=6, ignore_eos=True)
    steps.planner.add(Request(1, prompt(10), 10, sampling, b"", choice=0))
    steps.finish()
    assert steps.said == {1: out}
    assert steps.ends == {1: FinishReason.LENGTH}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_requests_own_stop_token_ends_its_reply_and_no_other(ignore_eos: bool) -> None:
    out = oracle(prompt(10), 6)
    steps = Steps(num_pages=30, budget=64, eos=(500,))
    steps.add(1, prompt(10), 6, stop_token_ids=(501, out[3]), ignore_eos=ignore_eos)
    steps.add(2, prompt(10), 6, stop_token_ids=(501,))
    steps.add(3, prompt(10), 6)
    steps.finish()
    assert steps.said == {1: out[:4], 2: out, 3: out}
    assert steps.ends == {1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.LENGTH}


def test_when_the_last_request_with_stop_tokens_has_left_steps_compare_with_none() -> None:
    steps = Steps(num_pages=30, budget=64)
    steps.add(1, prompt(10), 3, stop_token_ids=(501, 502, 503))
    steps.add(2, prompt(10), 6, stop_token_ids=(501,))
    steps.add(3, prompt(10), 9)
    found = []
    while steps.planner.has_work:
        steps.step()
        found.append(steps.rows._stops._max_stops)
    assert sorted(set(found), reverse=True) == [3, 1, 0]


def test_a_row_forgets_the_stop_tokens_of_the_tenant_before() -> None:
    out = oracle(prompt(10), 6)
    steps = Steps(num_pages=30, budget=64, max_rows=2)
    steps.add(1, prompt(10), 6, stop_token_ids=(501, 502, out[3]))
    steps.add(2, prompt(10, seed=2), 20, stop_token_ids=(501, 502, 503))
    steps.add(3, prompt(10), 6, stop_token_ids=(501,))
    steps.finish()
    assert (steps.said[1], steps.said[3]) == (out[:4], out)


def test_the_first_of_several_stop_tokens_in_an_accepted_run_ends_the_reply() -> None:
    steps = Steps(num_pages=30, num_draft=3, eos=(7,))
    steps.add(1, prompt(5, seed=1), stop_token_ids=(21, 8))
    steps.add(2, prompt(6, seed=2))
    steps.emit(steps.planner.plan(), [11], [12])
    steps.emit(steps.planner.plan(), [20, 8, 21, 7], [8, 21, 7, 33])
    assert steps.said == {1: [11, 20, 8], 2: [12, 8, 21, 7]}
    assert steps.ends == {1: FinishReason.STOP, 2: FinishReason.STOP}


def test_a_reply_ends_at_its_limit_inside_an_accepted_run() -> None:
    steps = Steps(num_pages=30, num_draft=3)
    steps.add(1, prompt(5), max_tokens=4)
    steps.emit(steps.planner.plan(), [11])
    plan = steps.planner.plan()
    assert plan.num_draft.tolist() == [3]
    steps.emit(plan, [12, 13, 14, 15])
    assert steps.said == {1: [11, 12, 13, 14]}
    assert steps.ends == {1: FinishReason.LENGTH}


def test_rejected_drafts_are_computed_again() -> None:
    steps = Steps(num_pages=30, num_draft=3)
    steps.add(1, prompt(5))
    steps.emit(steps.planner.plan(), [11])
    plan = steps.planner.plan()
    assert (plan.num_new.tolist(), plan.max_len.tolist()) == ([4], [9])
    steps.emit(plan, [12, 13])  # one draft accepted, two rejected
    plan = steps.planner.plan()
    assert (plan.num_new.tolist(), plan.max_len.tolist()) == ([4], [11])
    assert steps.said == {1: [11, 12, 13]}


# --- aborts and late results --------------------------------------------------------------


def test_an_aborted_waiting_request_is_reported_once_and_never_runs() -> None:
    steps = Steps(num_pages=30, max_rows=1)
    steps.add(1, prompt(5, seed=1), max_tokens=2)
    steps.add(2, prompt(5, seed=2), max_tokens=2)
    steps.step()
    steps.planner.abort([2])
    steps.planner.abort([2])
    steps.finish()
    assert steps.ends == {1: FinishReason.LENGTH, 2: FinishReason.ABORT}
    assert steps.said[2] == []


def test_an_aborted_running_request_gives_its_pages_back_and_says_nothing_more() -> None:
    steps = Steps(num_pages=11, budget=64)
    steps.add(1, prompt(18, seed=1), max_tokens=9)
    steps.step()
    late = steps.plan()
    steps.planner.abort([1])
    steps.take_report()
    assert steps.ends == {1: FinishReason.ABORT}
    assert steps.cache.device.pages.num_free + steps.cache.device.num_evictable == 10
    steps.commit()
    assert late.samples.tolist() == [True]
    assert steps.said == {1: oracle(prompt(18, seed=1), 1)}
    steps.finish()


def test_aborting_a_finished_or_unknown_request_does_nothing() -> None:
    steps = Steps(num_pages=30)
    steps.add(1, prompt(5), max_tokens=2)
    steps.finish()
    steps.planner.abort([1, 99])
    assert not steps.planner.has_work
    assert steps.planner.take_report() is None


def test_a_late_result_never_reaches_the_next_tenant_of_a_row() -> None:
    steps = Steps(num_pages=30, max_rows=1, budget=64)
    steps.add(1, prompt(9, seed=1), max_tokens=9)
    first = steps.plan()
    steps.planner.abort([1])
    steps.add(2, prompt(5, seed=2), max_tokens=3)
    second = steps.plan()
    assert first.rows.tolist() == second.rows.tolist() == second.release.tolist()
    steps.commit()
    assert steps.said == {1: []}
    steps.finish()
    assert steps.said == {1: [], 2: oracle(prompt(5, seed=2), 3)}
    assert steps.ends == {1: FinishReason.ABORT, 2: FinishReason.LENGTH}


# --- waiting for a prefix that another row computes ---------------------------------------


def test_a_request_waits_for_a_row_that_computes_its_prefix_and_then_hits() -> None:
    steps = Steps(num_pages=60, budget=64)
    shared = prompt(18)
    steps.add(1, shared, max_tokens=2)
    steps.add(2, np.append(shared[:13], prompt(9, seed=2)), max_tokens=2)
    steps.add(3, shared, max_tokens=2)
    steps.add(4, prompt(7, seed=4), max_tokens=2)
    steps.plan()
    assert steps.running() == [1, 4]  # the stranger does not wait with them
    steps.plan()
    assert steps.running() == [1, 4]  # step 1 is still in flight
    steps.commit()
    steps.plan()
    assert steps.running() == [1, 4, 2, 3]
    steps.finish()
    assert steps.cached == {1: 0, 2: 12, 3: 16, 4: 0}
    assert steps.said[2] == oracle(np.append(shared[:13], prompt(9, seed=2)), 2)
    assert steps.said[1] == steps.said[3] == oracle(shared, 2)


def test_nobody_waits_for_a_prefix_shorter_than_a_page() -> None:
    steps = Steps(num_pages=60, budget=64)
    shared = prompt(PAGE - 1)
    steps.add(1, np.append(shared, prompt(9, seed=1)), max_tokens=2)
    steps.add(2, np.append(shared, prompt(9, seed=2)), max_tokens=2)
    steps.plan()
    assert steps.running() == [1, 2]
    steps.finish()


def test_other_tenants_neither_wait_nor_hit() -> None:
    steps = Steps(num_pages=60, budget=64)
    steps.add(1, prompt(18), max_tokens=2, tenant=b"a")
    steps.add(2, prompt(18), max_tokens=2, tenant=b"b")
    steps.plan()
    assert steps.running() == [1, 2]
    steps.finish()
    assert steps.cached == {1: 0, 2: 0}


def test_nobody_waits_for_an_aborted_row() -> None:
    steps = Steps(num_pages=60, budget=64)
    steps.add(1, prompt(18), max_tokens=2)
    steps.add(2, prompt(18), max_tokens=2)
    steps.plan()
    assert steps.running() == [1]
    steps.planner.abort([1])
    plan = steps.plan()
    assert steps.running() == [2]
    assert plan.num_new.tolist() == [18]
    steps.finish()
    assert steps.said[2] == oracle(prompt(18), 2)


def test_nobody_waits_for_a_preempted_row() -> None:
    steps = Steps(num_pages=12, budget=64, num_draft=3)
    steps.add(1, prompt(15, seed=1), max_tokens=12)
    steps.step()
    steps.add(2, prompt(16), max_tokens=2)
    steps.add(3, prompt(16), max_tokens=2)
    steps.plan()
    assert steps.running() == [1, 2]
    assert steps.cache.device.pages.num_free == 0
    plan = steps.plan()  # 1 wants a page: 2 loses its row while its prompt is in flight
    assert steps.running() == [1]
    assert plan.release.size == 1
    steps.planner.abort([2])
    steps.finish()
    assert steps.said == {1: oracle(prompt(15, seed=1), 12), 2: [], 3: oracle(prompt(16), 2)}
