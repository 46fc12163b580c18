"""Continuations of plans: each row's own, from replies to its tenant that have ended."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hiserve.core.plan import BatchPlan
from hiserve.spec.history import LONGEST, ReplyHistory
from tests.helpers.echo import oracle
from tests.helpers.steps import Steps

NUM_NEW, NUM_DRAFT = 20, 3


def prompts(num: int = 1) -> list[np.ndarray]:
    return list(np.random.default_rng(3).integers(3, 200, (num, LONGEST + 3)).astype(np.int32))


def steps(**sizes: object) -> tuple[Steps, ReplyHistory]:
    history = ReplyHistory(1000)
    return Steps(num_draft=NUM_DRAFT, history=history, **{"num_pages": 60, **sizes}), history


def plans(driven: Steps, depth: int = 0) -> Iterator[BatchPlan]:
    """Runs until nothing is left, some steps ahead."""
    in_flight = 0
    while driven.planner.has_work:
        plan = driven.planner.plan()
        if plan is not None:
            yield plan
            driven._in_flight.append(driven.executor.submit(plan))
            in_flight += 1
        if in_flight > (depth if plan is not None else 0):
            driven.commit()
            in_flight -= 1
        elif plan is None:
            driven.take_report()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_reply_that_comes_again_is_foreseen_from_its_first_token(depth: int) -> None:
    driven, _ = steps()
    asked = prompts(2)
    for uid, prompt in enumerate(asked):
        driven.add(uid, prompt, NUM_NEW)
    assert all(plan.continuations is None for plan in plans(driven, depth))
    for uid, prompt in enumerate(asked):
        driven.add(10 + uid, prompt, NUM_NEW)
    num_seen = 0
    for plan in plans(driven, depth):
        if not plan.num_propose:
            continue
        assert plan.continuations is not None
        assert (
            plan.continuations.shape[1] - 2 > plan.num_propose
        )  # those that steps in flight append come before the drafts
        uids = driven.rows.uid[plan.rows[plan.samples]].tolist()
        for uid, (begin, agreed, *following) in zip(uids, plan.continuations.tolist(), strict=True):
            reply = [*asked[uid % 10].tolist(), *oracle(asked[uid % 10], NUM_NEW)]
            assert agreed == LONGEST
            assert following[: len(reply) - begin] == reply[begin : begin + len(following)]
            num_seen += 1
    assert num_seen > 8
    searches = driven.planner.stats().drafts
    assert searches.reply_searches == {"found": num_seen, "none": 0}
    assert searches.kept_reply_tokens == 4 * (LONGEST + NUM_NEW)


def test_a_tenant_gets_no_continuation_from_replies_to_another() -> None:
    driven, _ = steps()
    (prompt,) = prompts()
    for uid, (tenant, is_found) in enumerate([(b"a", False), (b"b", False), (b"a", True)]):
        driven.add(uid, prompt, NUM_NEW, tenant=tenant)
        found = [plan.continuations[:, 1:] for plan in plans(driven) if plan.continuations is not None]
        assert len(found) > 2 or not uid
        assert all(each.any() == is_found for each in found)


def test_the_reply_of_a_preempted_request_is_kept_once() -> None:
    driven, history = steps(num_pages=16)
    for uid, prompt in enumerate(prompts(3)):
        driven.add(uid, prompt, NUM_NEW)
    driven.finish()
    assert driven.planner.stats().preemptions > 0
    assert history.num_tokens == 3 * (LONGEST + NUM_NEW)


def test_an_aborted_reply_is_kept_as_far_as_it_went() -> None:
    driven, history = steps()
    driven.add(1, prompts()[0], NUM_NEW)
    for _ in range(4):
        driven.step()
    num_said = len(driven.said[1])
    driven.planner.abort([1])
    assert history.num_tokens == LONGEST + num_said > LONGEST


def test_a_flush_of_the_device_forgets_replies() -> None:
    driven, history = steps()
    driven.add(1, prompts()[0], NUM_NEW)
    driven.finish()
    driven.planner.flush(("host",))
    assert not history.is_empty
    driven.planner.flush()
    assert history.is_empty


def test_a_row_of_few_tokens_is_not_searched_with_those_of_the_request_before_it() -> None:
    """A request that had the row filled it to its end."""
    driven, history = steps(max_len=24)
    told = np.arange(10, 10 + LONGEST + 8, dtype=np.int32)
    history.add(b"", told, LONGEST)
    driven.rows.tokens[:, -LONGEST:] = told[:LONGEST]
    driven.add(1, told[LONGEST : LONGEST + 1], 4)
    plan = driven.step()
    assert plan.continuations is not None
    assert plan.continuations[0, 1] <= 1
