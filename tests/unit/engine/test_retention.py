"""Prefixes that requests retain are found after a flood of others, on one tier and on two, until their time."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.core.request import Retain, SamplingParams
from hiserve.engine.loop import Engine
from hiserve.ipc.messages import Admit
from tests.helpers.clock import Clock
from tests.helpers.copying import copying_engine, run
from tests.helpers.engines import echo_engine

PAGE = 4
LENGTH = 17  # four pages, and the token that is always computed
TTL_S = 300


def prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)


def serve(engine: Engine, uid: int, tokens: np.ndarray, retain: Retain = (), caller: int = 0) -> int:
    """Runs a request; returns how many of its tokens were cached."""
    sampling = SamplingParams(seed=1, max_tokens=1, ignore_eos=True)
    namespace = b"%d" % caller if caller else b""
    engine.add(Admit(uid, tokens.size, sampling, namespace, 0, caller=caller, retain=retain), tokens)
    return run(engine)[uid].num_tokens


def flood(engine: Engine, caller: int = 0, first: int = 1000) -> None:
    """Serves more than both tiers hold."""
    for uid in range(first, first + 40):
        serve(engine, uid, prompt(LENGTH, seed=uid), caller=caller)


def made(num_host_pages: int, clock: Clock) -> Engine:
    engine, *_ = echo_engine(
        num_pages=33, page_size=PAGE, max_rows=2, max_len=32, eos=(), num_host_pages=num_host_pages, clock=clock
    )
    return engine


@pytest.mark.parametrize("num_host_pages", [0, 41])
def test_a_retained_prefix_outlives_a_flood_until_its_time(num_host_pages: int) -> None:
    clock, tokens = Clock(), prompt(LENGTH, seed=1)
    engine = made(num_host_pages, clock)
    serve(engine, 1, tokens)
    flood(engine)
    assert serve(engine, 2, tokens, ((LENGTH, TTL_S),)) == 0, "the flood leaves what nobody retains"
    flood(engine)
    clock.now_s += TTL_S - 1
    flood(engine)
    assert serve(engine, 3, tokens) == 16
    assert engine.stats().cache.num_retained == 4
    clock.now_s += 2
    flood(engine)
    assert serve(engine, 4, tokens) == 0
    assert engine.stats().cache.num_retained == 0


def test_a_use_renews_the_time_and_only_the_marked_tokens_are_retained() -> None:
    clock, tokens = Clock(), prompt(LENGTH, seed=1)
    engine = made(41, clock)
    serve(engine, 1, tokens, ((11, TTL_S), (5, 3600)))
    clock.now_s += TTL_S - 1
    assert serve(engine, 2, tokens, ((11, TTL_S),)) == 16
    clock.now_s += TTL_S - 1
    flood(engine)
    assert serve(engine, 3, tokens) == 8, "two pages of eleven tokens"
    clock.now_s += 2
    flood(engine)
    assert serve(engine, 4, tokens) == 4


def test_a_caller_retains_a_quarter_of_the_host_and_no_more() -> None:
    engine = made(41, Clock())
    prompts = [prompt(LENGTH, seed=seed) for seed in range(5)]
    for uid, tokens in enumerate(prompts):
        serve(engine, uid, tokens, ((LENGTH, TTL_S),), caller=1)
    counts = engine.stats().cache
    assert (counts.num_retained, counts.num_not_retained) == (10, 10)
    serve(engine, 9, prompts[0], ((LENGTH, TTL_S),), caller=2)
    assert engine.stats().cache.num_retained == 14, "one caller's quota is not another's"
    flood(engine, caller=1)
    found = [serve(engine, 100 + uid, tokens, caller=1) for uid, tokens in enumerate(prompts)]
    assert found == [16, 16, 8, 0, 0]


def test_retained_prefixes_are_no_obstacle_and_go_in_the_order_of_their_times() -> None:
    engine, *_ = echo_engine(num_pages=33, page_size=PAGE, max_rows=2, max_len=128, eos=())
    for uid in (3, 1, 4, 2):
        serve(engine, uid, prompt(LENGTH, seed=uid), ((LENGTH, TTL_S * uid),), caller=uid)
    assert engine.stats().cache.num_retained == 16
    assert serve(engine, 10, prompt(95, seed=10)) == 0, "24 of 32 pages: half of the retained ones go"
    assert engine.stats().cache.num_retained == 8
    assert [serve(engine, 20 + uid, prompt(LENGTH, seed=uid), caller=uid) for uid in (3, 4)] == [16, 16]


def test_requests_that_share_nothing_retain_nothing() -> None:
    engine = made(41, Clock())
    engine._shares_prefixes = False
    serve(engine, 1, prompt(LENGTH, seed=1), ((LENGTH, TTL_S),))
    assert engine.stats().cache.num_retained == 0


def test_a_time_is_never_shorter_than_asked() -> None:
    clock = Clock(100.5)
    engine = made(41, clock)
    serve(engine, 1, prompt(LENGTH, seed=1), ((LENGTH, TTL_S),))
    clock.now_s += TTL_S - 0.125
    flood(engine)
    assert engine.stats().cache.num_retained == 4


def test_an_idle_engine_tells_the_host_until_when_its_pages_are_retained() -> None:
    engine, executor, cache = copying_engine(num_pages=33, num_host_pages=41)
    tokens = prompt(LENGTH, seed=1)
    serve(engine, 1, tokens)
    num_plans = len(executor.plans)
    serve(engine, 2, tokens, ((LENGTH, TTL_S),))
    last = executor.plans[-1]
    assert len(executor.plans) > num_plans + 1 and not last.rows.size and not last.copies
    assert last.host_retained.size == 4 and np.ptp(last.host_retained_until_s) == 0
    assert not engine.has_work and cache.host_times.is_empty
