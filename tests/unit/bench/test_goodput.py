"""Goodput: every objective must be met, failures never are."""

from __future__ import annotations

import pytest

from hiserve.bench.summary import goodput, parse_objectives
from hiserve.errors import ConfigError
from tests.helpers.samples import run_of, sample

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
