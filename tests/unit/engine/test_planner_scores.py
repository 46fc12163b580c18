"""Which log-probabilities a request is told, when, and how often."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.core.plan import Scores
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.engine.queue import Request
from tests.helpers.echo import oracle, oracle_scores
from tests.helpers.steps import Steps

PAGE = 4  # the page size of ``echo_engine``


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)


def words(num_tokens: int, num_top: int) -> int:
    return num_tokens * (1 + 2 * num_top)


# --- generated tokens ---------------------------------------------------------------------


def test_each_row_gets_as_many_likeliest_tokens_as_it_asked_for_and_the_others_none() -> None:
    steps = Steps(num_pages=60, budget=64)
    wanted = {
        1: steps.add(1, prompt(5, seed=1), 3),
        2: steps.add(2, prompt(6, seed=2), 3, logprobs=2),
        3: steps.add(3, prompt(7, seed=3), 3),
        4: steps.add(4, prompt(8, seed=4), 3, logprobs=0),
    }
    steps.finish()
    for uid, sampling in wanted.items():
        assert steps.scores[uid] == oracle_scores(prompt(4 + uid, seed=uid), steps.said[uid], sampling)
    assert [len(steps.scores[uid]) for uid in wanted] == [0, 4 * words(3, 2), 0, 4 * words(3, 0)]


def test_scores_behind_a_stop_token_are_cut_with_their_tokens() -> None:
    steps = Steps(num_pages=30, num_draft=3, eos=(8,))
    steps.add(1, prompt(5, seed=1), logprobs=0)
    steps.add(2, prompt(6, seed=2), logprobs=1)

    def scores(num_tokens: int) -> Scores:
        own = -np.arange(num_tokens, dtype=np.float32)
        top = np.arange(num_tokens, dtype=np.int32)[:, None]
        return Scores(own, top, own[:, None])

    steps.emit(steps.planner.plan(), [11], [12], scores=scores(2))
    steps.emit(steps.planner.plan(), [20, 8, 21, 22], [30, 31], scores=scores(8))
    assert steps.said == {1: [11, 20, 8], 2: [12, 30, 31]}
    assert Scores.unpack(steps.scores[1], 0).logprobs.tolist() == [0, 0, -1]
    second = Scores.unpack(steps.scores[2], 1)
    assert second.logprobs.tolist() == [-1, -4, -5]
    assert second.top_tokens.tolist() == [[1], [4], [5]]
    assert second.top_logprobs.tolist() == [[-1], [-4], [-5]]


def test_a_preempted_request_gets_each_score_of_its_output_once() -> None:
    steps = Steps(num_pages=11, budget=64)
    first = steps.add(1, prompt(15, seed=1), 12, logprobs=1)
    second = steps.add(2, prompt(14, seed=2), 9, logprobs=2)
    steps.finish()
    assert steps.planner.stats().preemptions >= 1
    assert steps.scores[1] == oracle_scores(prompt(15, seed=1), oracle(prompt(15, seed=1), 12), first)
    assert steps.scores[2] == oracle_scores(prompt(14, seed=2), oracle(prompt(14, seed=2), 9), second)


# --- the prompt's tokens ------------------------------------------------------------------


def test_scores_of_a_prompt_come_with_its_chunks_and_before_those_of_the_output() -> None:
    steps = Steps(num_pages=30, budget=6)
    sampling = steps.add(1, prompt(15), 2, prompt_logprobs=1, logprobs=3)
    plans = [steps.step() for _ in range(4)]
    assert [plan.num_scored.tolist() for plan in plans] == [[6], [6], [2], [0]]  # nothing of the prompt follows its end
    last = words(2, 1) + words(1, 3)
    assert steps.told == [(1, 0, words(6, 1)), (1, 0, words(6, 1)), (1, 1, last), (1, 1, words(1, 3))]
    assert steps.scores[1] == oracle_scores(prompt(15), oracle(prompt(15), 2), sampling)
    assert steps.cached == {1: 0}


def test_a_prompt_of_one_token_has_no_scores() -> None:
    steps = Steps(num_pages=30)
    steps.add(1, prompt(1), 2, prompt_logprobs=2)
    steps.finish()
    assert steps.scores == {1: b""}
    assert steps.said == {1: oracle(prompt(1), 2)}


def test_chunks_of_one_request_are_told_beside_the_tokens_of_another() -> None:
    steps = Steps(num_pages=30, budget=8)
    decoding = steps.add(1, prompt(5, seed=1), 20, logprobs=0)
    steps.step()
    scored = steps.add(2, prompt(18, seed=2), 2, prompt_logprobs=2)
    steps.step()
    assert steps.told[1:] == [(1, 1, words(1, 0)), (2, 0, words(7, 2))]
    steps.finish()
    assert steps.scores[1] == oracle_scores(prompt(5, seed=1), steps.said[1], decoding)
    assert steps.scores[2] == oracle_scores(prompt(18, seed=2), steps.said[2], scored)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_scored_prompt_is_computed_whole_though_it_is_cached_and_takes_no_more_pages(depth: int) -> None:
    steps = Steps(num_pages=30, budget=64)
    steps.add(1, prompt(18), 1)
    steps.finish()
    free = steps.cache.device.pages.num_free
    sampling = steps.add(2, prompt(18), 2, prompt_logprobs=0)
    for _ in range(depth):
        steps.plan()
    steps.finish()
    assert steps.cached == {1: 0, 2: 0}
    assert steps.scores[2] == oracle_scores(prompt(18), oracle(prompt(18), 2), sampling)
    assert steps.cache.device.pages.num_free == free


def test_a_scored_prompt_is_published_for_others() -> None:
    steps = Steps(num_pages=30, budget=64)
    steps.add(1, prompt(18), 2, prompt_logprobs=0)
    steps.add(2, prompt(18), 2)
    steps.plan()
    assert steps.running() == [1]
    steps.finish()
    assert steps.cached == {1: 0, 2: 16}


def test_a_scored_prompt_waits_for_nobody() -> None:
    steps = Steps(num_pages=30, budget=64)
    steps.add(1, prompt(18), 2)
    steps.add(2, prompt(18), 2, prompt_logprobs=0)
    plan = steps.plan()
    assert steps.running() == [1, 2]
    assert plan.num_scored.tolist() == [0, 17]
    steps.finish()


# --- a row lost in between ----------------------------------------------------------------


def test_a_prompt_that_loses_its_row_goes_on_where_its_scores_end() -> None:
    steps = Steps(num_pages=60, budget=6)
    sampling = steps.add(1, prompt(15), 2, prompt_logprobs=1)
    steps.step()
    in_flight = steps.plan()
    assert in_flight.num_scored.tolist() == [6]
    steps.planner._ends.preempt(steps.row(1))
    again = steps.plan()
    assert [each.num_computed for each in again.admit] == [PAGE]  # six scores were told; a page holds four tokens
    assert again.num_scored.tolist() == [6]
    steps.finish()
    assert steps.told[0] == (1, 0, words(6, 1))
    assert steps.told[1] == (1, 0, words(4, 1))  # of the six that were computed, two were told before
    assert steps.scores[1] == oracle_scores(prompt(15), oracle(prompt(15), 2), sampling)


def test_a_prompt_that_loses_its_row_takes_no_more_from_the_cache_than_its_scores_cover() -> None:
    steps = Steps(num_pages=60, budget=6)
    steps.add(1, prompt(15), 1)
    steps.finish()
    sampling = steps.add(2, prompt(15), 2, prompt_logprobs=1)
    steps.step()
    steps.planner._ends.preempt(steps.row(2))
    again = steps.plan()
    assert [each.num_computed for each in again.admit] == [PAGE]  # of twelve that are cached
    steps.finish()
    assert steps.scores[2] == oracle_scores(prompt(15), oracle(prompt(15), 2), sampling)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_fault_in_the_middle_of_a_prompt_repeats_and_loses_no_score(depth: int) -> None:
    steps = Steps(num_pages=30, budget=5)
    sampling = steps.add(1, prompt(18), 2, prompt_logprobs=2, logprobs=0)
    steps.step()
    steps.executor.stale_rows.add(steps.row(1))
    for _ in range(1 + depth):
        steps.plan()
    steps.finish()
    assert steps.planner.stats().stale_rows == 1
    assert steps.ends == {1: FinishReason.LENGTH}
    assert steps.scores[1] == oracle_scores(prompt(18), oracle(prompt(18), 2), sampling)


def test_a_request_with_output_uses_the_cache_again_and_repeats_no_score() -> None:
    steps = Steps(num_pages=30, budget=64)
    sampling = steps.add(1, prompt(18), 4, prompt_logprobs=0, logprobs=0)
    steps.step()
    steps.planner._ends.preempt(steps.row(1))
    again = steps.plan()
    assert [each.num_computed for each in again.admit] == [16]
    assert again.num_scored.tolist() == [0]
    steps.finish()
    assert steps.scores[1] == oracle_scores(prompt(18), oracle(prompt(18), 4), sampling)


def test_a_request_that_comes_with_output_was_told_the_scores_of_its_prompt() -> None:
    steps = Steps(num_pages=30, budget=64)
    out = oracle(prompt(10), 4)
    sampling = SamplingParams(seed=1, max_tokens=4, prompt_logprobs=0, logprobs=0)
    tokens = np.append(prompt(10), np.array(out[:2], dtype=np.int32))
    steps.planner.add(Request(1, tokens, 10, sampling, b"", choice=0))
    plan = steps.step()
    assert (plan.num_scored.tolist(), plan.admit[0].num_prompt) == ([0], 10)
    steps.finish()
    assert steps.said == {1: out[2:]}
    assert steps.scores[1] == oracle_scores(prompt(10), out, sampling)[-8:]


def test_the_next_tenant_of_a_row_is_told_no_scores() -> None:
    steps = Steps(num_pages=30, budget=64, max_rows=2)
    steps.add(1, prompt(9, seed=1), 2, prompt_logprobs=0, logprobs=0)
    steps.add(2, prompt(9, seed=2), 20, logprobs=0)
    steps.add(3, prompt(9, seed=3), 2)
    steps.finish()
    assert steps.scores[3] == b""


def test_scored_prompts_share_what_a_step_may_score() -> None:
    steps = Steps(num_pages=800, max_len=800, budget=2000)
    params = {}
    for uid, length in enumerate((600, 20, 300, 30)):
        params[uid] = steps.add(uid, prompt(length, seed=uid), max_tokens=2, prompt_logprobs=1 if length > 20 else None)
    plans = [steps.step() for _ in range(2)]
    assert [int(plan.num_scored.sum()) for plan in plans] == [512, 599 - 512 + 299 + 29]
    assert [each.row for each in plans[0].admit] == [1, 2]
    steps.finish()
    for uid, length in enumerate((600, 20, 300, 30)):
        ours = prompt(length, seed=uid)
        assert steps.said[uid] == oracle(ours, 2)
        assert steps.scores.get(uid, b"") == oracle_scores(ours, steps.said[uid], params[uid])


def test_a_new_request_scores_what_running_ones_leave() -> None:
    steps = Steps(num_pages=800, max_len=800, budget=2000)
    first = steps.add(1, prompt(790, seed=1), max_tokens=2, prompt_logprobs=0)
    steps.add(3, prompt(5), max_tokens=1)  # ends with the first step
    steps.step()
    second = steps.add(2, prompt(700, seed=2), max_tokens=2, prompt_logprobs=0)
    assert steps.step().num_scored.tolist() == [789 - 512, 2 * 512 - 789]
    steps.finish()
    assert steps.scores[1] == oracle_scores(prompt(790, seed=1), steps.said[1], first)
    assert steps.scores[2] == oracle_scores(prompt(700, seed=2), steps.said[2], second)
