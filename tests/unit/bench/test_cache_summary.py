"""Figures of a cache from samples by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hiserve.bench.cache_summary import Held, Visit, endless_cache, kind_of, summarize_cache
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


PAGE = 4


def visit(prompt: list[int], output: list[int] | None = None, *, at: float, end: float, namespace: str = "") -> Visit:
    ids = [np.array(tokens, dtype=np.int32) for tokens in (prompt, output or [])]
    return Visit(prompt=ids[0], output=ids[1], begin_s=at, end_s=end, namespace=namespace)


def of_endless(*visits: Visit, page_size: int = PAGE) -> list[tuple[int, int]]:
    return [(each.most, each.least) for each in endless_cache(visits, page_size)]


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_only_whole_pages_are_found_and_never_the_last_token() -> None:
    first = visit(tokens(11), at=0, end=1)
    assert of_endless(first, visit(tokens(11), at=2, end=3)) == [(0, 0), (8, 8)]
    assert of_endless(first, visit(tokens(8), at=2, end=3)) == [(0, 0), (4, 4)]
    assert of_endless(first, visit(tokens(9), at=2, end=3)) == [(0, 0), (8, 8)]
    assert of_endless(first, visit(tokens(3), at=2, end=3)) == [(0, 0), (0, 0)]


def test_a_prefix_ends_where_the_tokens_differ() -> None:
    other = [*tokens(6), 99, *tokens(9, 7)]
    assert of_endless(visit(tokens(16), at=0, end=1), visit(other, at=2, end=3)) == [(0, 0), (4, 4)]
    same_page_elsewhere = [*tokens(4, 50), *tokens(4, 4), 1]
    assert of_endless(visit(tokens(16), at=0, end=1), visit(same_page_elsewhere, at=2, end=3)) == [(0, 0), (0, 0)]
    same_page_again = [*tokens(4), *tokens(4), 1]
    assert of_endless(visit(tokens(16), at=0, end=1), visit(same_page_again, at=2, end=3)) == [(0, 0), (4, 4)]


def test_what_is_still_being_computed_counts_as_the_most_and_not_as_the_least() -> None:
    slow = visit(tokens(12), at=0, end=10)
    assert of_endless(slow, visit(tokens(12), at=5, end=6)) == [(0, 0), (8, 0)]
    assert of_endless(slow, visit(tokens(12), at=10, end=11)) == [(0, 0), (8, 8)]
    quick = visit(tokens(6), at=1, end=2)
    assert of_endless(slow, quick, visit(tokens(12), at=5, end=6)) == [(0, 0), (4, 0), (8, 4)]


def test_the_order_is_that_of_sending_whatever_the_order_given() -> None:
    late, early = visit(tokens(9), at=5, end=6), visit(tokens(9), at=0, end=1)
    assert of_endless(late, early) == [(8, 8), (0, 0)]
    at_once = [visit(tokens(9), at=0, end=1) for _ in range(3)]
    assert of_endless(*at_once) == [(0, 0), (8, 0), (8, 0)]


def test_the_page_that_the_last_token_of_a_reply_fills_may_be_held_or_not() -> None:
    chat = visit(tokens(6), tokens(6, 6), at=0, end=1)
    assert of_endless(chat, visit([*tokens(12), 7], at=2, end=3)) == [(0, 0), (12, 8)]
    settled = visit([*tokens(12), 7], at=2, end=3)
    assert of_endless(chat, settled, visit([*tokens(12), 7], at=4, end=5)) == [(0, 0), (12, 8), (12, 12)]
    longer = visit(tokens(6), tokens(7, 6), at=0, end=1)
    assert of_endless(longer, visit([*tokens(13), 7], at=2, end=3)) == [(0, 0), (12, 12)]


def test_namespaces_share_nothing() -> None:
    visits = [visit(tokens(9), at=at, end=at + 0.5, namespace=name) for at, name in enumerate("abab")]
    assert of_endless(*visits) == [(0, 0), (0, 0), (8, 8), (8, 8)]


def test_a_request_that_never_ended_is_never_settled() -> None:
    assert of_endless(visit(tokens(9), at=0, end=math.inf), visit(tokens(9), at=9, end=10)) == [(0, 0), (8, 0)]


def brute_force(visits: list[Visit], page_size: int) -> list[Held]:
    """For each request, the longest common page-aligned prefix with any one before it."""

    def common(new: Visit, old: Visit, num_left_out: int) -> int:
        output = old.output.tolist()
        computed = [*old.prompt.tolist(), *output[: max(0, len(output) - num_left_out)]]
        end = 0
        while end + page_size < new.prompt.size and end + page_size <= len(computed):
            if new.prompt[end : end + page_size].tolist() != computed[end : end + page_size]:
                break
            end += page_size
        return end

    found = []
    for index, new in enumerate(visits):
        before = [
            old
            for at, old in enumerate(visits)
            if (old.begin_s, at) < (new.begin_s, index) and old.namespace == new.namespace
        ]
        most = max((common(new, old, 0) for old in before), default=0)
        least = max((common(new, old, 1) for old in before if old.end_s <= new.begin_s), default=0)
        found.append(Held(most=most, least=least))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_the_trie_says_what_comparing_every_pair_says(seed: int, page_size: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    visits: list[Visit] = []
    for _ in range(60):
        base: list[int] = []
        if visits and rng.random() < 0.8:
            old = visits[int(rng.integers(len(visits)))]
            base = [*old.prompt.tolist(), *old.output.tolist()][: int(rng.integers(0, 40))]
        prompt = [*base, *rng.integers(0, 2, int(rng.integers(1, 9))).tolist()]
        at = float(rng.integers(0, 30))
        end = at + float(rng.integers(0, 10))
        output = rng.integers(0, 2, int(rng.integers(0, 6))).tolist()
        visits.append(visit(prompt, output, at=at, end=end, namespace="ab"[int(rng.integers(2))]))
    found = endless_cache(visits, page_size)
    assert found == brute_force(visits, page_size)
    assert sum(each.most for each in found) > sum(each.least for each in found) > 0
