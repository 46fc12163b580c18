"""Every figure, computed by hand from samples whose times are chosen."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.bench.datasets.synthetic import conversations
from hiserve.bench.options import MultiturnOptions
from hiserve.bench.summary import (
    by_round,
    goodput,
    in_flight,
    num_without_ids,
    parse_objectives,
    spread,
    steady_state,
    summarize,
    throughput,
    token_gaps_s,
    tpot_s,
    ttft_s,
)
from hiserve.errors import ConfigError
from tests.helpers.samples import run_of, sample


def test_latencies_of_one_request() -> None:
    each = sample(100.0, 100.2, 100.3, 100.5)
    assert ttft_s(each) == pytest.approx(0.2)
    assert tpot_s(each) == pytest.approx(0.15)
    figures = summarize(run_of(each, begin=100.0))
    assert figures.ttft_ms.mean == pytest.approx(200)
    assert figures.tpot_ms.mean == pytest.approx(150)
    assert (figures.itl_chunk_ms.count, figures.itl_chunk_ms.mean) == (2, pytest.approx(150))
    assert figures.e2el_ms.mean == pytest.approx(500)


def test_tpot_is_a_mean_over_requests_and_itl_over_gaps() -> None:
    fast, slow = sample(0.0, 0.1, *np.arange(0.11, 0.205, 0.01)), sample(0.0, 0.1, 0.3)
    figures = summarize(run_of(fast, slow))
    assert figures.tpot_ms.mean == pytest.approx((10 + 200) / 2)
    assert figures.itl_chunk_ms.mean == pytest.approx((10 * 10 + 200) / 11)


def test_a_request_with_one_token_has_no_tpot() -> None:
    figures = summarize(run_of(sample(0.0, 0.1), sample(0.0, 0.1, 0.3)))
    assert (figures.tpot_ms.count, figures.tpot_ms.mean) == (1, pytest.approx(200))
    assert figures.ttft_ms.count == 2


def test_a_reply_without_text_is_counted_and_has_no_ttft() -> None:
    figures = summarize(run_of(sample(0.0, 0.1), sample(0.0, end_s=0.4, num_output=5)))
    assert (figures.num_ok, figures.num_silent, figures.ttft_ms.count, figures.tpot_ms.count) == (2, 1, 1, 0)
    assert figures.num_output == 6


def test_a_chunk_of_several_tokens_is_one_gap_per_chunk_and_several_per_token() -> None:
    figures = summarize(run_of(sample(0.0, 0.1, 0.4, 0.5, tokens=[1, 4, 5])))
    assert (figures.itl_chunk_ms.count, figures.itl_chunk_ms.mean) == (2, pytest.approx(200))
    assert figures.itl_token_ms is not None
    assert (figures.itl_token_ms.count, figures.itl_token_ms.median) == (4, pytest.approx(100))
    assert figures.tpot_ms.mean == pytest.approx(100)


def test_tokens_at_the_end_without_text_count_in_the_gaps_per_token() -> None:
    each = sample(0.0, 0.1, 0.2, tokens=[1, 2], end_s=0.5, num_output=4)
    assert token_gaps_s(each) == pytest.approx([0.1, 0.15, 0.15])


def test_a_chunk_without_a_new_token_is_no_gap_per_token() -> None:
    assert token_gaps_s(sample(0.0, 0.1, 0.2, 0.4, tokens=[1, 1, 2])) == pytest.approx([0.3])


def test_gaps_per_token_need_a_running_count_or_one_chunk_a_token() -> None:
    assert token_gaps_s(sample(0.0, 0.1, 0.3, tokens=[-1, -1], num_output=2)) == pytest.approx([0.2])
    assert token_gaps_s(sample(0.0, 0.1, 0.3, tokens=[-1, -1], num_output=5)) is None
    figures = summarize(run_of(sample(0.0, 0.1, 0.2), sample(0.0, 0.1, 0.3, tokens=[-1, -1], num_output=5)))
    assert figures.itl_token_ms is None
    assert figures.itl_chunk_ms.count == 2


def test_percentiles_are_interpolated() -> None:
    found = spread([0.001, 0.002, 0.003, 0.004])
    assert (found.mean, found.median, found.p90, found.p99) == pytest.approx((2.5, 2.5, 3.7, 3.97))
    assert spread([]).count == 0


def test_throughput_is_over_the_whole_run() -> None:
    figures = summarize(run_of(sample(0.0, 0.5, 1.0), sample(1.0, 1.5, 2.0, 2.5), end=4.0))
    assert figures.duration_s == 4.0
    assert figures.requests_per_s == 0.5
    assert figures.input_tokens_per_s == 5.0
    assert figures.output_tokens_per_s == 1.25
    assert figures.total_tokens_per_s == 6.25
    assert figures.client_cpu_share == 0.125


def test_cached_share_is_of_prompt_tokens_and_only_when_every_reply_tells() -> None:
    assert summarize(run_of(sample(0.0, 0.1), sample(0.0, 0.1, num_cached=10))).cached_share == pytest.approx(0.7)
    assert summarize(run_of(sample(0.0, 0.1), sample(0.0, 0.1, num_cached=-1))).cached_share is None


def test_failures_are_counted_by_kind_and_left_out_of_everything_else() -> None:
    failed = [sample(0.0, 0.1, 9.0, error=kind, end_s=9.0) for kind in ("http 429", "http 429", "connection")]
    figures = summarize(run_of(sample(0.0, 0.1, 0.2), *failed))
    assert figures.errors == {"http 429": 2, "connection": 1}
    assert (figures.num_requests, figures.num_ok, figures.num_output, figures.num_prompt) == (4, 1, 2, 10)
    assert figures.itl_chunk_ms.count == figures.e2el_ms.count == 1


def test_a_run_in_which_everything_failed_has_figures() -> None:
    figures = summarize(run_of(sample(0.0, error="connection", end_s=1.0)))
    assert (figures.num_ok, figures.output_tokens_per_s, figures.cached_share, figures.steady) == (0, 0.0, None, None)


def test_waiting_for_a_place_is_not_latency_but_is_told() -> None:
    figures = summarize(run_of(sample(2.0, 2.1, due_s=0.5)))
    assert figures.ttft_ms.mean == pytest.approx(100)
    assert figures.late_ms.mean == pytest.approx(1500)


def test_in_flight_counts_and_a_successor_is_not_together_with_its_predecessor() -> None:
    run = run_of(sample(0.0, 1.0), sample(1.0, 2.0), sample(0.5, 1.5))
    figures = summarize(run)
    assert figures.peak_in_flight == 2
    assert figures.mean_in_flight == pytest.approx(1.5)
    times, numbers = in_flight(run.samples)
    assert times.tolist() == [0.0, 0.5, 1.0, 1.0, 1.5, 2.0]
    assert numbers.tolist() == [1, 2, 1, 2, 1, 0]


def test_the_steady_state_leaves_out_ramp_and_tail() -> None:
    """Two requests at once from second 1 to 9; one alone before and after, with other rates."""
    ramp = sample(0.0, *np.arange(0.1, 9.01, 0.1))
    tail = sample(1.0, *np.arange(1.5, 12.01, 0.5))
    steady = steady_state(run_of(ramp, tail))
    assert steady is not None
    assert (steady.begin_s, steady.end_s) == pytest.approx((1.0, 9.0))
    assert steady.min_in_flight == 2
    assert steady.output_tokens_per_s == pytest.approx(12, rel=0.02)
    assert summarize(run_of(ramp, tail)).output_tokens_per_s == pytest.approx(112 / 12)


def test_the_steady_state_of_a_mostly_idle_run_is_where_something_runs() -> None:
    steady = steady_state(run_of(sample(1.0, 1.1, 1.2), sample(8.0, 8.1, 8.2), end=20.0))
    assert steady is not None
    assert (steady.begin_s, steady.end_s, steady.min_in_flight) == (pytest.approx(1.0), pytest.approx(8.2), 1)


def test_throughput_over_time_holds_every_token_once() -> None:
    untold = sample(0.0, 1.0, 3.0, tokens=[-1, -1], num_output=8)
    late = sample(0.0, 0.5, tokens=[1], end_s=3.5, num_output=3)
    edges, rates = throughput(run_of(untold, late, sample(0.0, 2.0, error="timeout"), end=4.0), 4)
    assert edges.tolist() == [0, 1, 2, 3, 4]
    assert rates.tolist() == [1, 4, 0, 6]


GOOD = sample(0.0, 0.1, 0.2, 0.3)
SLOW_START = sample(0.0, 0.5, 0.6)
SLOW_TOKENS = sample(0.0, 0.1, 0.6)


def test_a_request_must_meet_every_objective() -> None:
    run = run_of(GOOD, SLOW_START, SLOW_TOKENS, end=2.0)
    found = goodput(run, parse_objectives(["ttft:200", "tpot:150"]))
    assert (found.num_good, found.requests_per_s, found.attainment) == (1, 0.5, pytest.approx(1 / 3))
    assert found.attainment_of == pytest.approx({"ttft": 2 / 3, "tpot": 2 / 3})
    assert goodput(run, parse_objectives(["ttft:200"])).num_good == 2
    assert goodput(run, parse_objectives(["e2e:300"])).num_good == 1


def test_the_limit_itself_is_good() -> None:
    assert goodput(run_of(sample(0.0, 0.25, 0.5)), {"ttft": 250.0, "e2e": 500.0}).num_good == 1


def test_failures_and_replies_without_text_count_as_misses() -> None:
    run = run_of(GOOD, sample(0.0, 0.1, error="http 500"), sample(0.0, end_s=0.1))
    found = goodput(run, {"ttft": 1000.0})
    assert (found.num_good, found.attainment) == (1, pytest.approx(1 / 3))


def test_one_token_cannot_miss_the_time_between_tokens() -> None:
    assert goodput(run_of(sample(0.0, 0.1)), {"tpot": 1.0}).num_good == 1


@pytest.mark.parametrize("given", ["ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:-5", "ttft:nan", "itl:20", "200"])
def test_what_is_no_objective_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="no objective"):
        parse_objectives(["e2e:100", given])


ROUNDS = MultiturnOptions(num_clients=3, num_rounds=2, request_length=10, output_length=4, think_time=1.5)


def test_every_client_has_its_own_new_tokens_each_round() -> None:
    sessions, again = (
        conversations(count=3, lengths=[10, 10], output_length=4, think_s=1.5, vocab_size=1000, seed=42)
        for _ in range(2)
    )
    prompts = [tuple(np.asarray(turn.prompt).tolist()) for turns in sessions for turn in turns]
    assert len(set(prompts)) == 6
    assert {len(prompt) for prompt in prompts} == {10}
    assert [[turn.think_s for turn in turns] for turns in sessions] == [[0.0, 1.5]] * 3
    assert all(turn.extends and turn.max_tokens == 4 for turns in sessions for turn in turns)
    assert np.array_equal(np.asarray(again[2][1].prompt), np.asarray(sessions[2][1].prompt))


def test_all_chats_may_begin_alike() -> None:
    sessions = conversations(count=3, lengths=[10, 4], output_length=4, vocab_size=1000, seed=42, shared_length=6)
    first, second = ([np.asarray(turns[number].prompt).tolist() for turns in sessions] for number in range(2))
    assert {len(prompt) for prompt in first} == {16} and {len(prompt) for prompt in second} == {4}
    assert len({tuple(prompt[:6]) for prompt in first}) == 1 and len({tuple(prompt[6:]) for prompt in first}) == 3


def test_a_round_summarises_its_own_samples() -> None:
    run = run_of(
        sample(0.0, 0.1, turn=0, num_prompt=10, num_cached=0),
        sample(0.0, 0.3, turn=0, num_prompt=10, num_cached=2),
        sample(1.0, 1.05, turn=1, num_prompt=24, num_cached=12),
        sample(1.0, 9.0, turn=1, error="connection"),
    )
    first, second = by_round(run, ROUNDS, 4)
    assert (first.number, first.num_ok, first.ttft_ms.mean) == (1, 2, pytest.approx(200))
    assert (first.hit_rate, first.best_hit_rate) == (0.1, 0.0)
    assert (second.num_ok, second.ttft_ms.median) == (1, pytest.approx(50))
    assert (second.hit_rate, second.best_hit_rate) == (0.5, pytest.approx(12 / 24)), "whole pages of the 14 tokens"
    assert by_round(run, ROUNDS, 1)[1].best_hit_rate == pytest.approx(14 / 24)


def test_a_hit_rate_is_not_made_up() -> None:
    run = run_of(sample(0.0, 0.1, turn=0, num_cached=-1))
    first, second = by_round(run, ROUNDS, 1)
    assert first.hit_rate is None
    assert (second.num_ok, second.hit_rate) == (0, None)


def test_replies_without_ids_are_counted() -> None:
    run = run_of(sample(0.0, 0.1), sample(0.0, 0.1, output_ids=[1]), sample(0.0, error="timeout", num_output=1))
    assert num_without_ids(run) == 1
