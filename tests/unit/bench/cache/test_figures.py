"""Figures of a cache from samples by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.bench.cache_summary import Held, kind_of, summarize_cache
from hiserve.bench.workload import Sample
from tests.helpers.samples import run_of, sample


def hit(begin: float, ttft: float, *, device: int = 0, host: int = 0, store: int = 0, **more: Any) -> Sample:
    tiers = {"device": device, "host": host, "store": store}
    fields = {"num_prompt": 100, "num_cached": device + host + store, "cached_by_tier": tiers, **more}
    return sample(begin, begin + ttft, **fields)


def held(*most: int, least: int = 0) -> list[Held]:
    return [Held(most=each, least=least) for each in most]


def test_hit_rates_by_tier_stand_beside_those_of_an_endless_cache() -> None:
    run = run_of(hit(0, 1, device=80), hit(0, 1, device=20, host=60), hit(0, 1, host=16, store=32))
    found = summarize_cache(run, held(80, 96, 64, least=16))
    assert found.num_cached == {"device": 100, "host": 76, "store": 32}
    assert found.hit_rate == pytest.approx(208 / 300)
    assert found.hit_rate_of == pytest.approx({"device": 100 / 300, "host": 76 / 300, "store": 32 / 300})
    assert (found.most_hit_rate, found.least_hit_rate) == (pytest.approx(240 / 300), pytest.approx(48 / 300))
    assert found.share_of_most == pytest.approx(208 / 240)
    assert (found.num_ok, found.num_prompt, found.tells_tiers, found.num_above_most) == (3, 300, True, 0)


def test_a_server_that_tells_no_tiers_has_all_on_the_device() -> None:
    found = summarize_cache(run_of(sample(0, 1, num_prompt=100, num_cached=64)), held(64))
    assert found.num_cached == {"device": 64, "host": 0, "store": 0}
    assert not found.tells_tiers


def test_a_server_that_tells_nothing_has_no_hit_rate() -> None:
    found = summarize_cache(run_of(sample(0, 1, num_cached=-1), sample(0, 1)), held(4, 4))
    assert (found.num_cached, found.hit_rate, found.hit_rate_of, found.share_of_most) == (None, None, {}, None)
    assert set(found.ttft_ms) == {"all"}
    assert found.most_hit_rate == pytest.approx(8 / 20)


def test_failures_count_nowhere() -> None:
    run = run_of(hit(0, 1, device=50), hit(0, 9, device=90, error="timeout"))
    found = summarize_cache(run, held(50, 1000))
    assert (found.num_ok, found.hit_rate, found.most_hit_rate, found.num_above_most) == (1, 0.5, 0.5, 0)
    assert found.ttft_ms["all"].count == 1


def test_more_than_an_endless_cache_is_told() -> None:
    found = summarize_cache(run_of(hit(0, 1, device=64), hit(0, 1, device=48)), held(48, 48))
    assert found.num_above_most == 1


@pytest.mark.parametrize(
    ("tiers", "kind"),
    [
        ({"device": 50}, "device"),
        ({"device": 49}, "miss"),
        ({"device": 90, "host": 1}, "host"),
        ({"device": 40, "host": 9}, "miss"),
        ({"device": 1, "host": 90, "store": 1}, "store"),
        ({}, "miss"),
    ],
)
def test_a_hit_is_of_the_slowest_tier_and_at_least_half_of_the_prompt(tiers: dict[str, int], kind: str) -> None:
    assert kind_of(hit(0, 1, **tiers)) == kind


def test_the_first_token_is_timed_by_kind_of_hit() -> None:
    run = run_of(hit(0, 0.1, device=90), hit(0, 0.2, host=90), hit(0, 0.4, host=90), hit(0, 0.8), hit(0, 1.0))
    found = summarize_cache(run, held(0, 0, 0, 0, 0)).ttft_ms
    assert {kind: spread.count for kind, spread in found.items()} == {
        "all": 5,
        "device": 1,
        "host": 2,
        "store": 0,
        "miss": 2,
    }
    assert (found["host"].median, found["miss"].median) == (pytest.approx(300), pytest.approx(900))


def test_reasons_of_misses_are_counted_the_most_frequent_first() -> None:
    run = run_of(*(hit(0, 1, miss=reason) for reason in ("cold", "evicted", "", "evicted")))
    assert list(summarize_cache(run, held(0, 0, 0, 0)).misses.items()) == [("evicted", 2), ("cold", 1)]


def test_later_requests_have_a_throughput_of_their_own() -> None:
    run = run_of(hit(0, 2, turn=0), hit(2, 1, turn=1), hit(3, 1, turn=2))
    found = summarize_cache(run, held(0, 0, 0))
    assert found.input_tokens_per_s == pytest.approx(300 / 4)
    assert found.later_input_tokens_per_s == pytest.approx(200 / 2)
    assert summarize_cache(run_of(hit(0, 2)), held(0)).later_input_tokens_per_s is None
