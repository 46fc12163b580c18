"""Who is admitted when and where, and what ends how."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.config.options import Scheduler
from hiserve.errors import InvariantError, UnavailableError
from hiserve.ipc.codec import MalformedError
from hiserve.scheduler.ledger import Ledger
from hiserve.scheduler.queue import MAX_OVERTAKEN, Fcfs, LongestPrefix, Policy, Priority
from tests.helpers.dispatch import (
    ABORT,
    STOP,
    Desk,
    generate,
    prompt,
    ready,
)


def test_fcfs_admits_in_order_of_arrival_as_credits_come_back() -> None:
    desk = Desk(rows=2)
    for uid in range(1, 8):
        desk.submit(uid)
    assert desk.admitted == [1, 2, 3]
    desk.report((2, [5], 1))
    desk.report((1, [5], 1), (3, [5], 2))
    assert desk.admitted == [1, 2, 3, 4, 5, 6]


def test_longest_prefix_admits_the_best_match_first_and_the_oldest_among_equals() -> None:
    desk = Desk(LongestPrefix(), rows=1)
    desk.submit(1)
    desk.submit(2)
    desk.cache(0, *range(16))
    for uid, length in ((3, 2), (4, 10), (5, 15), (6, 10)):
        desk.submit(uid, *range(length), 99)
    for uid in (1, 2, 5, 4, 6):
        desk.report((uid, [5], 1))
    assert desk.admitted == [1, 2, 5, 4, 6, 3]


def test_longest_prefix_starves_nobody() -> None:
    desk = Desk(LongestPrefix(), rows=1)
    desk.cache(0, *range(16))
    desk.submit(1, *range(17))
    desk.submit(2, *range(17))
    desk.submit(3, 500, 501)
    running = [1, 2]
    for uid in range(4, MAX_OVERTAKEN + 8):
        desk.submit(uid, *range(17))
        desk.report((running.pop(0), [5], 1))
        running.append(desk.admitted[-1])
    assert desk.admitted.index(3) == MAX_OVERTAKEN + 2


def test_a_request_goes_to_the_worker_that_holds_its_prefix() -> None:
    desk = Desk(replicas=2, rows=8)
    desk.cache(1, *range(32))
    desk.submit(1, *range(33))
    desk.submit(2, *range(500, 533))
    desk.submit(3, *range(33))
    assert desk.events.admitted == [(1, 1), (0, 2), (1, 3)]


def test_cold_requests_of_a_session_stay_together_until_their_worker_dies() -> None:
    desk = Desk(replicas=2, rows=64)
    sessions = [b"%d" % number for number in range(16)]
    for uid in range(64):
        desk.submit(uid, *range(1000 * uid, 1000 * uid + 9), session=sessions[uid // 4])
    homes = {uid // 4: replica for replica, uid in desk.events.admitted}
    assert desk.events.admitted == [(homes[uid // 4], uid) for uid in range(64)]
    assert set(homes.values()) == {0, 1}
    for replica, uid in tuple(desk.events.admitted):
        desk.report((uid, [5], 1), replica=replica)
    first = next(number for number, replica in homes.items() if replica == 0)
    desk.cache(1, *range(32))
    desk.submit(100, *range(33), session=sessions[first])
    assert desk.events.admitted[-1] == (1, 100), "the known prefix wins"
    desk.dispatcher.worker_lost(0)
    desk.submit(101, 7, 8, 9, session=sessions[first])
    assert desk.events.admitted[-1] == (1, 101)


def test_what_is_retained_travels_to_each_worker_of_a_request() -> None:
    desk = Desk(replicas=2)
    desk.submit(1, *range(9), retain=((8, 300),))
    replica, _ = desk.events.admitted[0]
    assert desk.events.admits.pop(1)[0].retain == ((8, 300),)
    desk.report((1, [5], 0), replica=replica)
    desk.dispatcher.worker_lost(replica)
    desk.dispatcher.dispatch()
    assert desk.events.admits[1][0].retain == ((8, 300),)


def test_the_seed_is_drawn_once_and_a_given_one_is_kept() -> None:
    desk = Desk()
    desk.submit(1)
    desk.submit(2, seed=7)
    desk.submit(3)
    seeds = [desk.events.admits[uid][0].sampling.seed for uid in (1, 2, 3)]
    assert seeds[1] == 7
    assert isinstance(seeds[0], int)
    assert isinstance(seeds[2], int)
    assert seeds[0] != seeds[2]


def test_an_admit_carries_prompt_then_generated() -> None:
    desk = Desk()
    desk.submit(1, 4, 5, 6)
    desk.report((1, [7, 8], 0))
    entry = desk.dispatcher.ledger.get(1)
    assert entry is not None
    message, tokens = entry.to_admit()
    assert (message.num_prompt, tokens.tolist()) == (3, [4, 5, 6, 7, 8])


def test_an_abort_while_queued_ends_at_once() -> None:
    desk = Desk(rows=1)
    for uid in (1, 2, 3, 4):
        desk.submit(uid)
    desk.dispatcher.abort([3, 4, 3])
    assert desk.events.terminals[3] == desk.events.terminals[4] == [ABORT]
    assert desk.events.news[-1].cached == [None, None], "nobody looked: that is no miss"
    assert desk.events.dropped == []
    desk.report((1, [5], 1), (2, [5], 1))
    assert desk.is_empty()


def test_an_abort_while_running_ends_when_the_worker_answers() -> None:
    desk = Desk()
    desk.submit(1)
    desk.submit(2)
    desk.dispatcher.abort([2])
    desk.dispatcher.abort([2])
    assert desk.events.dropped == [(0, [2])]
    assert desk.events.terminals[2] == []
    desk.report((1, [5], 0), (2, [], 3))
    assert desk.events.terminals[2] == [ABORT]
    assert desk.dispatcher.placement.num_held(0) == 1


def test_an_abort_that_crosses_the_natural_end_adds_no_second_one() -> None:
    desk = Desk()
    desk.submit(1)
    desk.dispatcher.abort([1])
    desk.report((1, [5], 1))
    desk.dispatcher.abort([1])
    assert desk.events.terminals[1] == [STOP]
    assert desk.is_empty()


def test_a_lost_worker_gets_nothing_until_its_successor_is_there() -> None:
    desk = Desk(replicas=2, rows=2)
    for uid in range(1, 5):
        desk.submit(uid)
    desk.dispatcher.worker_lost(0)
    desk.submit(9)
    assert desk.events.admitted[4:] == [(1, 1)]  # the first of those that lost it; the next has to wait
    desk.dispatcher.worker_ready(0, ready(0, rows=2))
    desk.dispatcher.dispatch()
    assert desk.events.admitted[5:] == [(0, 3), (0, 9)]
    assert not any(desk.events.terminals.values())


def test_without_any_worker_left_everything_is_refused() -> None:
    desk = Desk(rows=1)
    for uid in (1, 2, 3):
        desk.submit(uid)
    desk.dispatcher.worker_lost(0)
    desk.dispatcher.close(UnavailableError("no worker is left"))
    desk.submit(4)
    assert [desk.events.terminals[uid] for uid in (1, 2, 3, 4)] == [["unavailable"]] * 4
    assert desk.is_empty()


@pytest.mark.parametrize(
    ("length", "code"), [(256, "context_length_exceeded"), (900, "context_length_exceeded"), (0, "invalid_request")]
)
def test_a_request_that_cannot_run_is_refused_and_not_accepted(length: int, code: str) -> None:
    desk = Desk()
    desk.submit(1)
    desk.dispatcher.submit(generate(2), np.zeros(length, dtype=np.int32))
    assert desk.events.terminals[2] == [code]
    assert desk.dispatcher.ledger.num_accepted == 1


def test_the_longest_request_that_fits_is_accepted() -> None:
    desk = Desk()
    desk.dispatcher.submit(generate(1, max_tokens=90), np.zeros(250, dtype=np.int32))
    desk.dispatcher.submit(generate(2), np.zeros(255, dtype=np.int32))
    assert desk.dispatcher.ledger.num_accepted == 2


def test_a_negative_token_id_never_reaches_a_worker() -> None:
    desk = Desk()
    desk.submit(1, 5, -1, 5)
    assert desk.events.terminals[1] == ["invalid_request"]


def test_a_request_the_engine_fails_ends_with_its_error_after_its_tokens() -> None:
    desk = Desk()
    desk.submit(1)
    desk.report((1, [5], 0), failed=(1,))
    assert desk.events.sent[1] == [5]
    assert desk.events.terminals[1] == ["engine_error"]
    assert desk.is_empty()


def test_a_report_on_what_the_worker_does_not_hold_changes_nothing() -> None:
    desk = Desk(replicas=2)
    desk.submit(1)
    desk.submit(2)
    for rows in ([(1, [5], 0), (7, [5], 0)], [(1, [5], 0), (2, [5], 1)]):
        with pytest.raises(MalformedError, match="does not hold"):
            desk.report(*rows)
    with pytest.raises(MalformedError, match="does not hold"):
        desk.report((1, [5], 0), failed=(2,))
    assert desk.events.sent[1] == []
    assert len(desk.dispatcher.ledger) == 2


def test_a_uid_in_use_is_malformed() -> None:
    desk = Desk()
    desk.submit(1)
    with pytest.raises(MalformedError, match="twice"):
        desk.submit(1)


def test_ending_a_request_twice_is_an_invariant_error() -> None:
    ledger = Ledger()
    entry = ledger.accept(generate(1), prompt(1), now_s=0.0)
    ledger.end(entry)
    with pytest.raises(InvariantError, match="ended twice"):
        ledger.end(entry)


# --- bounds, deadlines, priorities ----------------------------------------------------------------


def test_a_full_queue_refuses_and_loses_nothing_it_accepted() -> None:
    desk = Desk(rows=1, limits=Scheduler(max_queued_requests=2))
    for uid in range(1, 7):  # two are admitted, two wait
        desk.submit(uid)
    assert {uid: desk.events.terminals[uid] for uid in (5, 6)} == {5: ["overloaded"], 6: ["overloaded"]}
    for uid in (1, 2, 3, 4):
        desk.report((uid, [5], 1))
    assert desk.admitted == [1, 2, 3, 4]
    assert desk.is_empty()


def test_the_queue_is_bounded_by_tokens_too_but_takes_any_single_request() -> None:
    desk = Desk(rows=1, limits=Scheduler(max_queued_tokens=10))
    desk.submit(1)
    desk.submit(2)
    desk.submit(3, *range(50))
    desk.submit(4, 1)
    assert desk.events.terminals[3] == []
    assert desk.events.terminals[4] == ["overloaded"]
    desk.report((1, [5], 1))
    desk.submit(5, *range(6))
    desk.submit(6, *range(5))
    desk.submit(7, *range(4))
    assert [desk.events.terminals[uid] for uid in (5, 6, 7)] == [[], ["overloaded"], []]
    assert desk.dispatcher.queue.num_tokens == 10


def test_a_burst_fills_free_rows_before_it_is_refused() -> None:
    desk = Desk(rows=7, limits=Scheduler(max_queued_requests=1))
    for uid in range(1, 11):  # one batch of messages: nothing is dispatched in between
        desk.dispatcher.submit(generate(uid), prompt(1, 2))
    desk.dispatcher.dispatch()
    assert desk.admitted == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [uid for uid in range(1, 11) if desk.events.terminals[uid]] == [10]


def test_a_wrong_prompt_is_wrong_even_when_the_queue_is_full() -> None:
    desk = Desk(rows=1, limits=Scheduler(max_queued_requests=1))
    for uid in range(1, 4):
        desk.submit(uid)
    desk.submit(4, -1)
    assert desk.events.terminals[4] == ["invalid_request"]


def test_a_request_that_waited_too_long_ends_with_an_error_and_a_running_one_goes_on() -> None:
    desk = Desk(rows=1, limits=Scheduler(queue_timeout_s=2.0))
    for uid in (1, 2, 3):
        desk.submit(uid)
    desk.now_s += 1
    desk.submit(4)
    assert desk.dispatcher.seconds_to_deadline() == 1.0
    desk.expire_after(0.99)
    assert desk.events.terminals[3] == []
    desk.expire_after(0.01)
    assert desk.events.terminals[3] == ["queue_timeout"]
    assert desk.dispatcher.seconds_to_deadline() == 1.0
    desk.report((1, [5], 1))
    desk.expire_after(50)
    assert desk.admitted == [1, 2, 4]
    assert desk.dispatcher.seconds_to_deadline() is None
    assert desk.events.terminals[4] == []
    assert desk.events.dropped == []


def test_a_request_that_takes_too_long_in_all_is_aborted_wherever_it_is() -> None:
    desk = Desk(rows=1, limits=Scheduler(request_timeout_s=3.0))
    for uid in (1, 2, 3):
        desk.submit(uid)
    desk.report((1, [7, 8], 0))
    desk.expire_after(2.5)
    assert desk.events.dropped == []
    assert desk.dispatcher.seconds_to_deadline() == 0.5
    desk.expire_after(0.5)
    assert desk.events.dropped == [(0, [1, 2])]
    assert desk.events.terminals[3] == [ABORT]
    assert desk.dispatcher.seconds_to_deadline() is None  # nothing is asked twice
    desk.expire_after(0.5)
    assert desk.events.dropped == [(0, [1, 2])]
    desk.report((1, [], 3), (2, [], 3))
    assert desk.events.sent[1] == [7, 8]
    assert desk.is_empty()


def test_without_timeouts_there_is_no_deadline() -> None:
    desk = Desk(rows=1)
    for uid in (1, 2, 3):
        desk.submit(uid)
    assert desk.dispatcher.seconds_to_deadline() is None
    desk.expire_after(10**6)
    assert not any(desk.events.terminals.values())


def test_the_largest_priority_goes_first_and_the_oldest_among_equals() -> None:
    desk = Desk(Priority(), rows=1)
    desk.submit(1)
    desk.submit(2)
    for uid, priority in ((3, 0), (4, 5), (5, -1), (6, 5), (7, 9)):
        desk.submit(uid, priority=priority)
    for uid in (1, 2, 7, 4, 6, 3):
        desk.report((uid, [5], 1))
    assert desk.admitted == [1, 2, 7, 4, 6, 3, 5]


@pytest.mark.parametrize("policy", [Fcfs(), LongestPrefix()])
def test_other_policies_do_not_look_at_priorities(policy: Policy) -> None:
    desk = Desk(policy, rows=1)
    for uid in range(1, 6):
        desk.submit(uid, priority=uid)
    for uid in range(1, 4):
        desk.report((uid, [5], 1))
    assert desk.admitted == [1, 2, 3, 4, 5]
