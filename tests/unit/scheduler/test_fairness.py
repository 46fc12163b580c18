"""Callers take turns, none starves, and who is refused is told when the queue will have emptied."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hiserve.config.options import Scheduler
from hiserve.core.request import FinishReason
from hiserve.scheduler.queue import (
    MAX_OVERTAKEN,
    MAX_RETRY_S,
    MIN_RETRY_S,
    POLICIES,
    RATE_MEMORY_S,
    DrainRate,
    Fcfs,
    Priority,
)
from tests.helpers.dispatch import Desk

STOP = int(FinishReason.STOP)
GREEDY, MODEST = 1, 2
SEED = 7


def finish_first(desk: Desk, tokens: int = 1) -> int:
    """Ends the oldest running request; returns the request that got its place."""
    running = [uid for uid in desk.admitted if not desk.events.terminals[uid]]
    desk.report((running[0], [5] * tokens, STOP))
    return desk.admitted[-1]


def test_a_flood_of_one_caller_does_not_hold_another_up() -> None:
    desk = Desk(rows=1)
    for uid in range(1, 103):
        desk.submit(uid, caller=GREEDY)
    desk.submit(200, caller=MODEST)
    desk.submit(201, caller=MODEST)
    order = [finish_first(desk) for _ in range(5)]
    assert order.index(200) <= 1
    assert order.index(201) <= 3
    assert desk.admitted[:2] == [1, 2]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_callers_are_served_as_many_tokens_each_whatever_they_ask_for(policy: str) -> None:
    """One asks for long prompts and says they are urgent, one for long replies, one for little."""
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    desk = Desk(POLICIES[policy](), rows=1, limits=Scheduler(max_queued_requests=10_000))
    asked = {1: (60, 2, 9), 2: (3, 40, 0), 3: (5, 5, -3)}
    of: dict[int, int] = {}
    for uid in range(1, 1801):
        caller = of[uid] = draw.choice([1, 2, 3])
        desk.submit(uid, *range(asked[caller][0]), caller=caller, priority=asked[caller][2])
    served: Counter[int] = Counter()
    ended = 0
    while min(served[caller] for caller in asked) < 1500:
        uid = desk.admitted[ended]
        caller = of[uid]
        prompt, reply, _ = asked[caller]
        desk.report((uid, [5] * reply, STOP))
        served[caller] += prompt + reply
        ended += 1
    assert max(served.values()) - min(served.values()) <= 3 * (60 + 40), served


def test_one_caller_alone_is_served_in_the_order_of_the_policy() -> None:
    desk = Desk(rows=1)
    for uid in range(1, 8):
        desk.submit(uid, caller=MODEST)
    for _ in range(5):
        finish_first(desk)
    assert desk.admitted == [1, 2, 3, 4, 5, 6, 7]


def test_who_was_away_saves_up_no_turns() -> None:
    desk = Desk(rows=1, limits=Scheduler(max_queued_requests=10_000))
    for uid in range(1, 400):
        desk.submit(uid, caller=GREEDY)
    for _ in range(200):
        finish_first(desk)
    for uid in range(1000, 1100):
        desk.submit(uid, caller=MODEST)
    turns = Counter(finish_first(desk) >= 1000 for _ in range(40))
    assert 18 <= turns[True] <= 22, turns


def test_what_was_cached_is_not_charged() -> None:
    desk = Desk(rows=1)
    desk.submit(1)
    desk.submit(2)
    desk.cache(0, *range(40))
    for uid in range(10, 60):
        desk.submit(uid, *range(41), caller=GREEDY)
        desk.submit(100 + uid, *range(700, 741), caller=MODEST)
    turns = Counter(finish_first(desk) >= 100 for _ in range(42))
    assert turns[False] > 10 * turns[True], turns


def test_a_full_queue_makes_room_for_who_has_less_than_a_share() -> None:
    desk = Desk(rows=1, limits=Scheduler(max_queued_requests=6))
    for uid in range(1, 10):  # two are admitted, six wait, one is refused
        desk.submit(uid, caller=GREEDY)
    assert [uid for uid in range(1, 10) if desk.events.terminals[uid]] == [9]
    for uid in range(20, 25):
        desk.submit(uid, caller=MODEST)
    assert list(desk.events.errors) == [9, 8, 7, 6, 23, 24]  # half of the queue each, and no more
    assert {error.code for error in desk.events.errors.values()} == {"overloaded"}
    assert len(desk.dispatcher.queue) == 6


def test_room_is_made_by_whoever_has_most_of_what_there_is_too_little_of() -> None:
    desk = Desk(rows=1, limits=Scheduler(max_queued_requests=12, max_queued_tokens=200))
    desk.submit(1)
    desk.submit(2)
    for uid in range(3, 9):
        desk.submit(uid, 1, caller=GREEDY)
    for uid in (10, 11):
        desk.submit(uid, *range(90), caller=MODEST)
    desk.submit(20, *range(60), caller=3)
    assert [uid for uid in (*range(3, 9), 10, 11, 20) if desk.events.terminals[uid]] == [11]


def test_nobody_is_pushed_out_for_a_request_that_finds_no_room_anyway() -> None:
    desk = Desk(rows=1, limits=Scheduler(max_queued_tokens=100))
    desk.submit(1)
    desk.submit(2)
    for uid in range(3, 13):
        desk.submit(uid, *range(10), caller=GREEDY)
    desk.submit(20, *range(60), caller=MODEST)
    assert [uid for uid in (*range(3, 13), 20) if desk.events.terminals[uid]] == [20]


def test_who_was_answered_in_part_is_not_pushed_out() -> None:
    desk = Desk(rows=1, limits=Scheduler(max_queued_requests=2))
    for uid in (1, 2, 3, 4):
        desk.submit(uid, caller=GREEDY)
    entry = desk.dispatcher.ledger.get(4)
    assert entry is not None
    entry.num_admissions = 1  # as when its worker has died
    desk.submit(5, caller=MODEST)
    assert desk.events.terminals[4] == []
    assert desk.events.terminals[5] == ["overloaded"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_lost_a_worker_goes_first_of_the_caller_whatever_the_policy(policy: str) -> None:
    desk = Desk(POLICIES[policy](), rows=1)
    desk.cache(0, *range(16))
    desk.submit(1)
    desk.submit(2)
    for uid, caller in ((3, GREEDY), (4, GREEDY), (5, MODEST), (6, GREEDY), (7, GREEDY)):
        desk.submit(uid, *range(17 if uid > 5 else 3), caller=caller, priority=uid)
    queue = desk.dispatcher.queue
    queue.requeue([queue.remove(uid) for uid in (3, 4, 5)])
    assert [uid in queue for uid in (1, 3, 4, 5)] == [False, True, True, True]
    for _ in range(5):
        finish_first(desk)
    assert [uid for uid in desk.admitted if uid in (3, 4, 6, 7)][:2] == [3, 4]
    assert queue.num_tokens == len(queue) == 0


def test_who_goes_back_to_the_front_moves_nobody_else() -> None:
    """A worker that dies gives back hundreds of requests, before hundreds that wait: each costs the same."""
    desk = Desk(rows=1)
    for uid in range(1, 8):
        desk.submit(uid)
    queue = desk.dispatcher.queue
    (line,) = queue._queues.values()
    in_order, of_rank = line._in_order, line._by_rank[0]
    queue.requeue([queue.remove(uid) for uid in (5, 6)])
    assert line._in_order is in_order and line._by_rank[0] is of_rank, "all that waits was written anew"
    assert list(in_order) == list(of_rank) == [5, 6, 3, 4, 7], "the first two run, or are next"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_lets_a_request_starve(policy: str) -> None:
    desk = Desk(POLICIES[policy](), rows=1)
    desk.cache(0, *range(16))
    for uid in (1, 2):
        desk.submit(uid, *range(17), priority=1)
    for uid in (3, 4):
        desk.submit(uid, 500, 501)
    for uid in range(5, MAX_OVERTAKEN + 9):
        desk.submit(uid, *range(17), priority=1)
        finish_first(desk)
    assert desk.admitted.index(3) <= MAX_OVERTAKEN + 2
    assert desk.admitted.index(4) <= MAX_OVERTAKEN + 3


def test_urgency_goes_first_within_a_caller_and_not_before_another() -> None:
    desk = Desk(Priority(), rows=1)
    desk.submit(1)
    desk.submit(2)
    for uid in range(3, 9):
        desk.submit(uid, caller=GREEDY, priority=uid)
    desk.submit(20, caller=MODEST, priority=-5)
    order = [finish_first(desk) for _ in range(3)]
    assert order.index(20) <= 1
    assert [uid for uid in order if uid != 20] == [8, 7]


# --- when to come back ----------------------------------------------------------------------------


def drained(*, every_s: float, tokens: int, seconds: float) -> DrainRate:
    rate, now_s = DrainRate(), 0.0
    rate.observe(now_s, 0, 0, is_busy=True)
    while now_s < seconds:
        now_s += every_s
        rate.observe(now_s, 1, tokens, is_busy=True)
    return rate


@pytest.mark.parametrize("every_s", [0.01, 0.1, 0.5])
def test_the_wait_is_what_the_queue_takes_to_empty(every_s: float) -> None:
    rate = drained(every_s=every_s, tokens=100, seconds=200)
    for queued in (40, 80):
        assert rate.retry_after_s(queued, 100 * queued) == pytest.approx(queued * every_s, rel=0.05, abs=1)
    assert rate.retry_after_s(10, 100 * 80) == pytest.approx(80 * every_s, rel=0.05, abs=1)  # few, but long ones


def test_a_slower_drain_is_a_longer_wait_soon() -> None:
    rate = drained(every_s=0.1, tokens=10, seconds=100)
    before = rate.retry_after_s(100, 1000)
    now_s = 100.1
    for _ in range(int(4 * RATE_MEMORY_S)):
        now_s += 1.0
        rate.observe(now_s, 1, 10, is_busy=True)
    assert rate.retry_after_s(20, 200) > 1.5 * before


def test_the_wait_is_bounded_and_never_nothing() -> None:
    assert DrainRate().retry_after_s(1000, 10**6) == MIN_RETRY_S == 1
    assert drained(every_s=0.001, tokens=1, seconds=1).retry_after_s(1, 1) == 1
    stuck = DrainRate()
    stuck.observe(0.0, 5, 50, is_busy=True)
    for now_s in range(1, 100):
        stuck.observe(float(now_s), 0, 0, is_busy=True)
    assert stuck.retry_after_s(8, 80) == MAX_RETRY_S


def test_an_empty_queue_does_not_count_as_one_that_does_not_move() -> None:
    rate = drained(every_s=0.1, tokens=10, seconds=100)
    rate.observe(100.1, 1, 10, is_busy=False)
    rate.observe(5000.0, 0, 0, is_busy=True)
    rate.observe(5000.1, 1, 10, is_busy=True)
    assert rate.retry_after_s(100, 1000) in (10, 11)


def test_who_is_refused_or_waited_too_long_is_told_when_to_come_back() -> None:
    desk = Desk(Fcfs(), rows=1, limits=Scheduler(max_queued_requests=4, queue_timeout_s=60.0))
    for uid in range(1, 7):
        desk.submit(uid)
    for uid in range(7, 40):  # one leaves every three seconds
        desk.now_s += 3
        finish_first(desk)
        desk.submit(uid)
    desk.submit(100)
    assert 9 <= (desk.events.errors[100].retry_after_s or 0) <= 15
    desk.expire_after(61.0)
    late = [error for error in desk.events.errors.values() if error.code == "queue_timeout"]
    assert late
    assert all(error.retry_after_s and error.retry_after_s > 9 for error in late)
