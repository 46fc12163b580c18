"""What the planner does with two tiers, case by case."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import HostAdmission
from hiserve.core.plan import BatchPlan
from hiserve.core.request import SamplingParams
from hiserve.core.transfers import CopyAck, CopyKind
from hiserve.core.usage import CacheUse
from hiserve.engine import host_loads
from hiserve.engine.host_loads import LoadCostModel
from hiserve.engine.loop import Engine
from hiserve.engine.oom_recovery import LOAD_FAILED
from hiserve.ipc.messages import Admit
from hiserve.scheduler.placement import PrefixIndex
from tests.helpers.echo import oracle
from tests.helpers.engines import echo_engine

PAGE = 4


class NeverWorth(LoadCostModel):
    """Finds no load worth it; counts the requests that computed what the host had."""

    num_skipped = 0

    def skip_load(self) -> None:
        self.num_skipped += 1

    def is_worth_loading(self, num_tokens: int, num_before: int, num_copied: int | None = None) -> bool:
        return not num_tokens


def prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)


def add(engine: Engine, uid: int, tokens: np.ndarray, max_tokens: int) -> None:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    engine.add(Admit(uid, tokens.size, sampling, b"", 0), tokens)


def run(engine: Engine) -> tuple[dict[int, list[int]], dict[int, CacheUse]]:
    """Steps until nothing is left; returns what each request was told: its tokens, and what the cache gave it."""
    said: dict[int, list[int]] = {}
    used: dict[int, CacheUse] = {}
    while engine.has_work:
        updates = engine.step()
        if updates is None:
            continue
        at = 0
        for uid, count, cached in zip(updates.uids, updates.counts, updates.cached, strict=True):
            said.setdefault(uid, []).extend(updates.tokens[at : at + count].tolist())
            at += count
            if cached is not None:
                used[uid] = cached
    return said, used


def test_what_a_preempted_row_computed_is_kept_on_the_host_though_nobody_used_it_twice() -> None:
    """Retract and restore: it comes back by a load, and goes on with the same tokens."""
    engine, *_ = echo_engine(
        num_pages=9,
        page_size=PAGE,
        max_rows=2,
        max_len=32,
        eos=(),
        num_host_pages=60,
        host_admission=HostAdmission.SELECTIVE,
    )
    prompts = {uid: prompt(9, seed=uid) for uid in (1, 2)}
    for uid, tokens in prompts.items():
        add(engine, uid, tokens, 18)
    said, _ = run(engine)
    stats = engine.stats()
    assert said == {uid: oracle(tokens, 18) for uid, tokens in prompts.items()}
    assert stats.preemptions > 0
    assert stats.cache.loads.num_fulfilled > 0


def test_a_row_that_loses_its_place_has_its_pages_stored_at_once() -> None:
    engine, planner, _, cache = echo_engine(
        num_pages=30, page_size=PAGE, max_len=32, eos=(), num_host_pages=60, host_admission=HostAdmission.SELECTIVE
    )
    add(engine, 1, prompt(9, seed=1), 18)
    for _ in range(4):
        engine.step()
    assert not cache.has_offloads  # nobody used them twice
    planner._ends.preempt(int(planner._rows.active[0]))
    assert cache.has_offloads
    said, _ = run(engine)
    assert oracle(prompt(9, seed=1), 18)[-len(said[1]) :] == said[1]


def test_a_prefix_that_is_not_worth_loading_is_computed_and_said_to_be_left() -> None:
    costs = NeverWorth(16)
    engine, *_ = echo_engine(num_pages=9, page_size=PAGE, max_len=32, eos=(), num_host_pages=60, costs=costs)
    first, others = prompt(21, seed=1), [prompt(21, seed=seed) for seed in (2, 3)]
    for uid, tokens in enumerate([first, *others]):
        add(engine, uid, tokens, 1)
        run(engine)
    add(engine, 9, first, 1)
    said, used = run(engine)
    assert said == {9: oracle(first, 1)}
    assert used == {9: CacheUse(miss="not_worth_loading", miss_at=0)}
    assert engine.stats().cache.loads.unfulfilled == {"not_worth_loading": 5}
    assert costs.num_skipped == 1


def test_a_row_that_waits_for_its_load_starts_when_nobody_else_runs_and_only_where_that_is_wanted() -> None:
    for overlaps in (False, True):
        engine, planner, executor, _ = echo_engine(
            num_pages=9, page_size=PAGE, max_len=32, eos=(), num_host_pages=60, overlaps_loads=overlaps
        )
        for uid, seed in enumerate((1, 2, 3)):
            add(engine, uid, prompt(21, seed), 1)
            run(engine)
        assert executor.host is not None
        add(engine, 9, prompt(21, seed=1), 1)
        plan = planner.plan()
        assert plan is not None
        (load,) = [copy for copy in plan.copies if copy.kind is CopyKind.LOAD]
        assert (plan.rows.size, plan.waits) == ((1, (load.op,)) if overlaps else (0, ()))
        engine._in_flight.append((plan, executor.submit(plan)))
        engine._timer.begin(plan)
        said, used = run(engine)
        assert said == {9: oracle(prompt(21, seed=1), 1)}
        assert (used[9].host, executor.host.num_waits) == (20, int(overlaps))


def test_what_a_failed_load_gave_to_a_step_that_waited_for_it_is_not_told() -> None:
    engine, _, executor, _ = echo_engine(
        num_pages=9, page_size=PAGE, max_len=32, eos=(), num_host_pages=60, overlaps_loads=True
    )
    for uid, seed in enumerate((1, 2, 3)):
        add(engine, uid, prompt(21, seed), 1)
        run(engine)
    assert executor.host is not None
    add(engine, 9, prompt(21, seed=1), 1)
    executor.host.fail_rate = 1.0
    updates = engine.step()  # begins the load, waits for it on the device, and is committed
    assert updates is None or not updates.uids
    executor.host.fail_rate = 0.0
    said, _ = run(engine)
    assert (executor.host.num_waits, executor.host.num_failed[CopyKind.LOAD]) == (1, 1)
    assert engine.stats().step_faults == {LOAD_FAILED: 1}
    assert said == {9: oracle(prompt(21, seed=1), 1)}


def test_a_row_starts_behind_its_load_only_with_pages_for_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, planner, executor, _ = echo_engine(
        num_pages=9, page_size=PAGE, max_len=32, eos=(), num_host_pages=60, overlaps_loads=True
    )
    for uid, seed in enumerate((1, 2, 3)):
        add(engine, uid, prompt(21, seed), 1)
        run(engine)
    add(engine, 9, prompt(21, seed=1), 1)
    with monkeypatch.context() as others_hold_them:
        others_hold_them.setattr(planner._rows, "grow", lambda rows, num_new: not rows.size)
        plan = planner.plan()
    assert plan is not None
    assert (plan.rows.size, plan.waits) == (0, ())
    engine._in_flight.append((plan, executor.submit(plan)))
    engine._timer.begin(plan)
    said, _ = run(engine)
    assert said == {9: oracle(prompt(21, seed=1), 1)}


def test_rows_start_in_the_order_of_their_loads_not_with_the_last_of_them() -> None:
    """What is computed for the first fits in the time that the link takes for the second."""
    engine, planner, executor, _ = echo_engine(
        num_pages=15, page_size=PAGE, max_len=32, eos=(), num_host_pages=60, overlaps_loads=True, depth=1
    )
    for uid, seed in enumerate((1, 2, 3, 4, 5)):
        add(engine, uid, prompt(21, seed), 1)
        run(engine)
    for uid in (8, 9):
        add(engine, uid, prompt(21, seed=uid - 7), 1)
    for started in (1, 2):
        plan = planner.plan()
        assert plan is not None
        if started == 1:
            first, second = [copy.op for copy in plan.copies if copy.kind is CopyKind.LOAD]
        assert (plan.rows.size, plan.waits) == (1, (first if started == 1 else second,))
        engine._in_flight.append((plan, executor.submit(plan)))
        engine._timer.begin(plan)
    said, used = run(engine)
    assert said == {uid: oracle(prompt(21, seed=uid - 7), 1) for uid in (8, 9)}
    assert [used[uid].host for uid in (8, 9)] == [20, 20]


def test_a_row_whose_load_has_ended_decodes_while_another_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both were admitted with one plan; the second joins the first step that is planned after the end of its own load."""
    engine, _, executor, _ = echo_engine(
        num_pages=20, page_size=PAGE, max_len=48, eos=(), num_host_pages=60, overlaps_loads=True, depth=1
    )
    for uid, seed in enumerate((1, 2, 3, 4, 5)):
        add(engine, uid, prompt(21, seed), 1)
        run(engine)
    plans: list[BatchPlan] = []
    held: list[CopyAck] = []
    submit, take_acks = executor.submit, executor.take_acks

    def late_acks(wait_s: float = 0.0) -> list[CopyAck]:
        loads = [copy.op for copy in plans[0].copies if copy.kind is CopyKind.LOAD] if plans else []
        acks = [*held, *take_acks(wait_s)]
        held[:] = [ack for ack in acks if ack.op in loads[1:] and len(plans) < 6]
        return [ack for ack in acks if ack not in held]

    monkeypatch.setattr(executor, "submit", lambda plan: plans.append(plan) or submit(plan))  # type: ignore[func-returns-value]
    monkeypatch.setattr(executor, "take_acks", late_acks)
    for uid in (8, 9):
        add(engine, uid, prompt(21, seed=uid - 7), 12)
    said, used = run(engine)
    assert said == {uid: oracle(prompt(21, seed=uid - 7), 12) for uid in (8, 9)}
    assert [used[uid].host for uid in (8, 9)] == [20, 20]
    (first, _) = [copy.op for copy in plans[0].copies if copy.kind is CopyKind.LOAD]
    assert [(plan.rows.size, plan.waits) for plan in plans[:8]] == [(1, (first,)), *[(1, ())] * 5, *[(2, ())] * 2]


def test_a_row_that_waits_for_its_load_stays_out_of_the_step_of_others() -> None:
    engine, planner, _, _ = echo_engine(
        num_pages=15, page_size=PAGE, max_len=32, eos=(), num_host_pages=60, overlaps_loads=True
    )
    for uid, seed in enumerate((1, 2, 3)):
        add(engine, uid, prompt(21, seed), 1)
        run(engine)
    add(engine, 8, prompt(5, seed=8), 8)
    engine.step()
    add(engine, 9, prompt(21, seed=1), 1)
    plan = planner.plan()
    assert plan is not None
    assert len([copy for copy in plan.copies if copy.kind is CopyKind.LOAD]) == 1
    assert (plan.rows.size, plan.waits) == (1, ())


def test_the_scheduler_hears_of_a_page_until_no_tier_has_it() -> None:
    engine, _, _, cache = echo_engine(num_pages=9, page_size=PAGE, max_len=32, eos=(), num_host_pages=60)
    index = PrefixIndex(PAGE)
    index.attach(0, cache.namespace)
    for uid, seed in enumerate((1, 2, 3)):
        add(engine, uid, prompt(21, seed), 1)
        while engine.has_work:
            if (updates := engine.step()) is not None:
                index.update(0, updates.published, updates.removed)
    asked = index.prefix(prompt(21, seed=1), b"")
    assert cache.match(b"", prompt(21, seed=1).tobytes()).num_tokens == 0
    assert index.match(asked, 0) == 20
    engine.flush()
    updates = engine.step()
    assert updates is not None
    index.update(0, updates.published, updates.removed)
    assert (index.match(asked, 0), len(index._pages[0])) == (0, 0)


def test_a_request_with_more_to_load_waits_while_too_many_loads_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_loads, "MAX_LOADS", 1)
    engine, planner, _, _ = echo_engine(num_pages=20, page_size=PAGE, max_len=32, eos=(), num_host_pages=60)
    for uid, seed in enumerate((1, 2, 3, 4, 5)):
        add(engine, uid, prompt(21, seed), 1)
        run(engine)
    for uid, seed in ((8, 1), (9, 2)):
        add(engine, uid, prompt(21, seed), 1)
    plan = planner.plan()
    assert plan is not None
    assert [copy.kind for copy in plan.copies] == [CopyKind.LOAD]
    assert len(plan.admit) == 1
    engine._in_flight.append((plan, engine._executor.submit(plan)))
    engine._timer.begin(plan)
    said, used = run(engine)
    assert said == {uid: oracle(prompt(21, seed), 1) for uid, seed in ((8, 1), (9, 2))}
    assert {use.host for use in used.values()} == {20}
