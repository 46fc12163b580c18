"""What a request takes along when its worker dies, and who is suspected of the death."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from hiserve.config.options import Scheduler
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.errors import UnavailableError
from hiserve.ipc.codec import MalformedError
from hiserve.ipc.lifecycle import ReplayStats
from hiserve.ipc.updates import RequestUpdates, TokenDelta
from tests.helpers.dispatch import ABORT, STOP, Desk, generate, prompt, ready

PROMPT = (1, 2, 3, 4, 5)


def restart(desk: Desk, replica: int = 0, *, rows: int = 8) -> list[int]:
    """A worker dies, and its successor comes; returns the requests that the dead one held."""
    held = desk.dispatcher.worker_lost(replica)
    desk.dispatcher.dispatch()
    desk.dispatcher.worker_ready(replica, ready(replica, rows=rows))
    desk.dispatcher.dispatch()
    return held


def tell(
    desk: Desk,
    uid: int,
    tokens: list[int],
    *,
    cached: CacheUse | None = None,
    drafts: DraftUse | None = None,
    words: int = 0,
) -> None:
    updates = RequestUpdates()
    updates.add(TokenDelta(tokens, scores=bytes(4 * words), uid=uid, cached=cached, drafts=drafts))
    desk.dispatcher.report(0, updates)


def test_a_request_goes_on_behind_what_the_client_has_with_its_seed_and_its_limits() -> None:
    desk = Desk()
    desk.submit(1, *PROMPT, max_tokens=9, temperature=0.7)
    first = desk.events.admits[1][0]
    desk.report((1, [7, 8, 9], 0))
    restart(desk)
    message, tokens = desk.events.admits[1]
    assert tokens == [*PROMPT, 7, 8, 9]
    assert message == first, "the worker is told the whole request again"
    assert message.num_prompt == len(PROMPT)
    desk.report((1, [10], 1))
    assert desk.events.sent[1] == [7, 8, 9, 10]
    assert desk.events.terminals[1] == [STOP]
    assert desk.is_empty()


def test_a_request_that_another_engine_began_goes_on_as_after_a_replay() -> None:
    """The cached tokens of its reply are no tokens of its prompt."""
    desk = Desk()
    begun = msgspec.structs.replace(generate(1, max_tokens=9), num_resumed=3)
    desk.dispatcher.submit(begun, prompt(*PROMPT, 7, 8, 9))
    desk.dispatcher.dispatch()
    message, tokens = desk.events.admits[1]
    assert (message.num_prompt, tokens) == (len(PROMPT), [*PROMPT, 7, 8, 9])
    tell(desk, 1, [10], cached=CacheUse(4, 2, 1, "new", 7))
    assert desk.events.sent[1] == [10]
    assert desk.events.news[-1].cached == [CacheUse(4, 1, 0)]
    restart(desk)
    assert desk.events.admits[1][1] == [*PROMPT, 7, 8, 9, 10]
    desk.report((1, [11], 1))
    assert desk.is_empty()


@pytest.mark.parametrize("num_resumed", [3, 4, -1])
def test_a_request_without_a_prompt_is_malformed(num_resumed: int) -> None:
    desk = Desk()
    with pytest.raises(MalformedError, match="resumes"):
        desk.dispatcher.submit(msgspec.structs.replace(generate(1), num_resumed=num_resumed), prompt(1, 2, 3))
    assert desk.is_empty()


def test_those_that_lost_their_worker_come_first_and_in_their_order() -> None:
    desk = Desk(rows=2)
    for uid in range(1, 7):
        desk.submit(uid)
    assert desk.admitted == [1, 2, 3]
    restart(desk, rows=4)
    assert desk.admitted[3:] == [1, 2, 3, 4, 5]


def test_they_may_go_to_another_worker_at_once_and_take_what_it_has_cached_into_account() -> None:
    desk = Desk(replicas=3, rows=8)
    desk.submit(1, *range(100, 104))
    (replica, _) = desk.events.admitted[0]
    desk.report((1, list(range(104, 120)), 0), replica=replica)
    others = [each for each in range(3) if each != replica]
    desk.cache(others[1], *range(100, 116))
    desk.dispatcher.worker_lost(replica)
    desk.dispatcher.dispatch()
    assert desk.events.admitted[1:] == [(others[1], 1)]


def test_what_of_the_prompt_was_cached_and_the_time_in_the_queue_are_told_once() -> None:
    desk = Desk()
    desk.submit(1, *PROMPT)
    tell(desk, 1, [6])
    tell(desk, 1, [7], cached=CacheUse(device=4))
    desk.now_s += 5
    restart(desk)
    tell(desk, 1, [8], cached=CacheUse(host=4, device=1))
    assert [news.cached for news in desk.events.news] == [[None], [CacheUse(device=4)], [None]]
    assert [news.queue_s for news in desk.events.news] == [[0.0], [-1], [-1]]
    assert desk.dispatcher.replays.stats() == ReplayStats(1, 7, {"device": 1, "host": 4, "store": 0})


def test_the_time_in_the_queue_is_until_the_first_worker_even_if_it_never_spoke() -> None:
    desk = Desk()
    desk.submit(1, *PROMPT)
    desk.now_s += 5
    restart(desk)
    tell(desk, 1, [8], cached=CacheUse())
    assert desk.events.news[0].queue_s == [0.0]


def test_drafts_of_all_workers_are_counted_together() -> None:
    desk = Desk()
    desk.submit(1, *PROMPT)
    for uses in ([DraftUse(1, 2, (1,)), DraftUse(3, 6, (2, 1))], [DraftUse(2, 4, (2,)), None], [DraftUse(1, 1, (1,))]):
        for use in uses:
            tell(desk, 1, [7], drafts=use)
        restart(desk)
    told = [news.drafts[0] for news in desk.events.news]
    assert told == [
        DraftUse(1, 2, (1,)),
        DraftUse(3, 6, (2, 1)),
        DraftUse(5, 10, (4, 1)),
        None,
        DraftUse(6, 11, (5, 1)),
    ]


@pytest.mark.parametrize(
    ("told", "expected"),
    [([], 0), ([(0, 2)], 2), ([(0, 2), (0, 1)], 3), ([(0, 2), (2, 4)], 4), ([(0, 4)], 4), ([(0, 4), (3, 3)], 4)],
)
def test_scores_of_the_prompt_are_asked_for_from_where_they_ended(told: list[tuple[int, int]], expected: int) -> None:
    """Pairs are (tokens, scores); a score with one alternative is three words."""
    desk = Desk()
    desk.submit(1, *PROMPT, prompt_logprobs=1, logprobs=1)
    for count, num_scores in told:
        tell(desk, 1, list(range(count)), words=3 * num_scores)
    restart(desk)
    assert desk.events.admits[1][0].num_scored == expected


def test_a_request_without_scores_of_its_prompt_asks_for_none() -> None:
    desk = Desk()
    desk.submit(1, *PROMPT, logprobs=1)
    tell(desk, 1, [5], words=3)
    restart(desk)
    assert desk.events.admits[1][0].num_scored == 0


def test_what_was_being_aborted_ends_with_its_worker() -> None:
    desk = Desk()
    desk.submit(1)
    desk.submit(2)
    desk.report((1, [5], 0))
    desk.dispatcher.abort([1])
    restart(desk)
    assert desk.events.terminals[1] == [ABORT]
    assert desk.events.news[-1].cached == [None], "told before"
    assert desk.admitted == [1, 2, 2]


def test_an_abort_while_no_worker_is_there_ends_at_once() -> None:
    desk = Desk()
    desk.submit(1)
    desk.submit(2)
    desk.dispatcher.worker_lost(0)
    desk.dispatcher.abort([1])
    assert desk.events.terminals[1] == [ABORT]
    assert desk.events.dropped == []
    desk.dispatcher.worker_ready(0, ready(0))
    desk.dispatcher.dispatch()
    assert desk.admitted == [1, 2, 2]


def test_the_deadline_of_the_queue_is_for_those_that_no_worker_ever_had() -> None:
    desk = Desk(rows=1, limits=Scheduler(queue_timeout_s=2.0, request_timeout_s=9.0))
    for uid in (1, 2, 3):
        desk.submit(uid)
    desk.report((1, [5], 0))
    desk.dispatcher.worker_lost(0)
    assert desk.dispatcher.seconds_to_deadline() == 2.0
    desk.expire_after(3)
    assert [desk.events.terminals[uid] for uid in (1, 2, 3)] == [[], [], ["queue_timeout"]]
    assert desk.dispatcher.seconds_to_deadline() == 6.0
    desk.expire_after(6)
    assert desk.events.terminals[1] == desk.events.terminals[2] == [ABORT]
    assert desk.events.sent[1] == [5]
    assert desk.is_empty()


# --- who killed the worker ------------------------------------------------------------------------


def test_the_requests_that_a_worker_held_are_named_when_it_dies() -> None:
    desk = Desk()
    assert restart(desk) == []
    desk.submit(1)
    desk.submit(2)
    assert restart(desk) == [1, 2]
    desk.report((1, [5], 1))
    assert restart(desk) == [2]


def crash_until_quiet(desk: Desk, is_deadly: set[int], *, max_crashes: int = 40) -> int:
    """Lets every request move that its worker has, in steps, unless a deadly one is among them; returns the deaths."""
    for num_crashes in range(max_crashes):
        while held := [entry.uid for entry in desk.dispatcher.ledger.running_on(0)]:
            if is_deadly & set(held):
                restart(desk)
                break
            desk.report(*((uid, [7], int(FinishReason.STOP) if len(desk.events.sent[uid]) == 3 else 0) for uid in held))
        else:
            return num_crashes
    raise AssertionError(f"{max_crashes} workers died; {len(desk.dispatcher.ledger)} requests are left")


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 9])
def test_the_one_request_that_kills_its_workers_fails_and_no_other(num_requests: int) -> None:
    for deadly in range(1, num_requests + 1):
        desk = Desk(rows=8)
        for uid in range(1, num_requests + 1):
            desk.submit(uid)
        num_crashes = crash_until_quiet(desk, {deadly})
        assert desk.events.terminals.pop(deadly) == ["engine_error"]
        assert all(end == [STOP] for end in desk.events.terminals.values())
        assert all(tokens == [7] * 4 for uid, tokens in desk.events.sent.items() if uid != deadly)
        assert num_crashes <= 4 + np.ceil(np.log2(num_requests))
        assert desk.is_empty()


def test_several_that_kill_their_workers_are_all_found() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(30):
        desk = Desk(rows=8)
        deadly = set(rng.sample(range(1, 10), rng.randint(1, 4)))
        for uid in range(1, 10):
            desk.submit(uid)
        crash_until_quiet(desk, deadly)
        assert {uid for uid, ends in desk.events.terminals.items() if ends == ["engine_error"]} == deadly
        assert desk.is_empty()


def test_one_crash_and_crashes_between_which_a_request_moved_make_no_suspect() -> None:
    desk = Desk()
    desk.submit(1)
    for _ in range(5):
        restart(desk)
        assert 0 not in desk.dispatcher.isolation
        desk.report((1, [5], 0))
    assert desk.events.sent[1] == [5] * 5


def test_a_request_is_given_up_when_it_had_its_worker_for_itself_and_not_before() -> None:
    desk = Desk(rows=8)
    for uid in (1, 2):
        desk.submit(uid)
    restart(desk)
    restart(desk)
    desk.dispatcher.dispatch()
    assert desk.admitted[-1] == 1, "the first half"
    desk.report((1, [5], 0))
    assert desk.admitted[-1] == 2, "the first is cleared"
    restart(desk)
    assert desk.events.terminals[2] == [], "the first was there too"
    assert desk.admitted[-1] == 2
    restart(desk)
    assert desk.events.terminals[2] == ["engine_error"]
    assert desk.admitted[-1] == 1


def test_suspects_have_their_worker_for_themselves_and_others_use_the_other_worker() -> None:
    desk = Desk(replicas=2, rows=1)
    for uid in (1, 2, 3, 4):
        desk.submit(uid)
    for uid in (2, 4):
        desk.report((uid, [5], 1), replica=1)
    for _ in range(2):
        desk.dispatcher.worker_lost(0)
        desk.dispatcher.worker_ready(0, ready(0, rows=8))  # before the other has taken them
        desk.dispatcher.placement.reserve(1)
        desk.dispatcher.dispatch()
        desk.dispatcher.placement.unreserve(1)
    assert desk.events.admitted[-1] == (0, 1)
    desk.submit(5)
    assert desk.events.admitted[-1] == (1, 5)
    desk.report((1, [5], 1))
    desk.report((3, [5], 1))
    desk.submit(6)
    assert desk.events.admitted[-1] == (0, 6)


def test_a_suspect_can_be_aborted_while_it_waits() -> None:
    desk = Desk(rows=8)
    for uid in (1, 2):
        desk.submit(uid)
    restart(desk)
    restart(desk)
    assert desk.admitted[-1] == 1
    desk.dispatcher.abort([2])
    assert desk.events.terminals[2] == [ABORT]
    desk.report((1, [5], 1))
    desk.submit(3)
    assert desk.admitted[-1] == 3
    desk.report((3, [5], 1))
    assert desk.is_empty()


def test_suspects_of_a_worker_that_never_comes_again_run_elsewhere_or_are_refused() -> None:
    desk = Desk(replicas=2, rows=8)
    desk.submit(1)
    entry = desk.dispatcher.ledger.get(1)
    assert entry is not None
    entry.num_crashes = 1
    desk.dispatcher.worker_lost(0)
    desk.dispatcher.dispatch()
    assert desk.admitted == [1]
    desk.dispatcher.worker_abandoned(0)
    desk.dispatcher.dispatch()
    assert desk.events.admitted[-1] == (1, 1)
    desk.dispatcher.worker_lost(1)
    desk.dispatcher.close(UnavailableError("no worker is left"))
    assert desk.events.terminals[1] == ["unavailable"]
    assert desk.is_empty()


def test_parameters_that_count_from_the_prompt_are_sent_as_they_were() -> None:
    desk = Desk()
    wanted = {"max_tokens": 9, "min_tokens": 4, "ignore_eos": True, "presence_penalty": 0.5, "seed": 5}
    desk.submit(1, *PROMPT, **wanted)
    desk.report((1, [5, 6], 0))
    restart(desk)
    assert desk.events.admits[1][0].sampling == SamplingParams(**wanted)  # type: ignore[arg-type]
