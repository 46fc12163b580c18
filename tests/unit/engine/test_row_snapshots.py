"""Boundaries whose snapshots rows store, and the prompts that resume behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import MissReason, PrefixCache, TailSizes, Tier
from hiserve.core.plan import NO_SNAPSHOTS, BatchPlan
from hiserve.core.request import SamplingParams
from hiserve.core.transfers import CopyKind
from hiserve.core.usage import CacheUse
from hiserve.core.window_pool import WindowLimits
from hiserve.engine.loop import Engine
from hiserve.ipc.messages import Admit
from tests.helpers.copying import FILLER, add, copying_engine, run
from tests.helpers.echo import EchoExecutor, oracle
from tests.helpers.engines import echo_engine
from tests.helpers.widening import in_turn

PAGE = 16


class Served:
    """An engine of a model with recurrent states, and what its requests found."""

    def __init__(self, **options: Any) -> None:
        settings = {"page_size": PAGE, "num_pages": 200, "max_len": 400, "budget": 64, "num_snapshot_slots": 60}
        made: tuple[Engine, Any, EchoExecutor, PrefixCache] = echo_engine(**settings | {"eos": ()} | options)
        self.engine, self.planner, self.executor, self.cache = made
        self.plans: list[BatchPlan] = []
        self.found: dict[int, CacheUse] = {}
        submit = self.executor.submit

        def watched(plan: BatchPlan) -> Any:
            self.plans.append(plan)
            return submit(plan)

        self.executor.submit = watched  # type: ignore[method-assign]

    def add(self, uid: int, prompt: np.ndarray, max_tokens: int = 1) -> None:
        sampling = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add(Admit(uid, prompt.size, sampling, b"", 0), prompt.astype(np.int32))

    def step(self) -> None:
        updates = self.engine.step()
        if updates is not None:
            uses = zip(updates.uids, updates.cached, strict=True)
            self.found |= {uid: use for uid, use in uses if use is not None}

    def run(self, stops: Callable[[], bool] = lambda: False) -> None:
        while self.engine.has_work and not stops():
            self.step()

    def ask(self, uid: int, prompt: np.ndarray, max_tokens: int = 1) -> CacheUse:
        self.add(uid, prompt, max_tokens)
        self.run()
        return self.found[uid]


def drawn(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)


@pytest.mark.parametrize(("num_draft", "depth"), in_turn([0, 1, 3, 6], [0, 1]))
def test_neither_drafts_nor_steps_ahead_cost_a_next_turn_more_than_a_page(num_draft: int, depth: int) -> None:
    """H9: of prompt and reply all is cached but the last token, in whole pages; with snapshots a page less at most."""
    served = Served(depth=depth, num_draft=num_draft)
    lost = []
    for seed in range(30):
        prompt, num_new = drawn(seed, 17 + 5 * seed), 1 + 7 * seed
        served.ask(seed, prompt, num_new)
        reply = oracle(prompt, num_new)
        turn = np.concatenate((prompt, reply, drawn(seed + 1000, 3)))
        num_cached = served.ask(1000 + seed, turn).num_tokens
        whole = (prompt.size + num_new - 1) // PAGE * PAGE
        assert whole - PAGE <= num_cached <= whole, (prompt.size, num_new)
        lost.append(whole - num_cached)
    assert num_draft or not any(lost)


def test_a_repeated_prompt_computes_its_last_page_alone() -> None:
    """H9, of every length."""
    served = Served()
    for length in range(1, 3 * PAGE + 2):
        prompt = drawn(length, length)
        assert served.ask(length, prompt, 2).num_tokens == 0
        assert served.ask(1000 + length, prompt).num_tokens == (length - 1) // PAGE * PAGE


def test_a_prompt_leaves_the_tail_that_another_request_waits_for() -> None:
    """Both arrive together: the first would pass the end of what they share and its own last boundary in one step."""
    served = Served(budget=400)
    common = drawn(1, 3 * PAGE)
    for uid in (1, 2):
        served.add(uid, np.concatenate((common, drawn(10 + uid, 4 * PAGE))))
    served.run()
    assert served.found[2].num_tokens == common.size
    assert served.plans[0].num_new.tolist() == [common.size + 3 * PAGE - PAGE], "it ends before its second boundary"
    assert not served.plans[0].samples.any()


def test_a_request_waits_for_a_boundary_that_a_step_in_flight_passes() -> None:
    served = Served(depth=1, budget=400)
    prompt = drawn(1, 4 * PAGE + 3)
    served.add(1, prompt, 9)
    served.step()
    served.add(2, prompt)
    served.run()
    assert served.found[2].num_tokens == 4 * PAGE


def test_a_boundary_that_a_request_has_waited_for_keeps_its_tail_until_the_request_gets_a_row() -> None:
    """A third request takes the last row meanwhile, and the first goes on to its next boundary."""
    served = Served(depth=1, max_rows=2)
    prompt = drawn(1, 5 * PAGE + 4)
    served.add(1, prompt, 20)
    served.step()  # 64 tokens, whose end nobody wanted
    served.add(2, np.concatenate((prompt[: 4 * PAGE], drawn(2, 9))))
    served.add(3, drawn(3, 9), 20)
    served.run()
    assert served.found[2].num_tokens == 4 * PAGE


def test_of_two_boundaries_that_steps_in_flight_pass_the_later_has_its_tail_at_once() -> None:
    """H9: the reply ends before another page is published."""
    served = Served(depth=1, num_draft=3, page_size=4)
    prompt = drawn(9, 9)
    served.ask(1, prompt, 9)
    assert served.ask(2, np.concatenate((prompt, oracle(prompt, 9), drawn(1, 3)))).num_tokens == 16


def test_nobody_waits_for_a_boundary_that_was_passed_without_a_slot() -> None:
    served = Served()
    prompt = drawn(1, 9 * PAGE)
    served.add(1, prompt, 5)
    for _ in range(2):  # 64 tokens each, without a wanted boundary
        served.step()
    served.add(2, np.concatenate((prompt[: 2 * PAGE], drawn(3, 4 * PAGE))))
    served.step()
    assert served.planner._rows.active.size == 2
    served.run()
    assert served.found[2].num_tokens == 0


def test_a_boundary_with_history_and_no_snapshot_is_no_resume_point_and_says_so() -> None:
    served = Served()
    prompt = drawn(1, 8 * PAGE)
    served.ask(1, prompt, 1)
    use = served.ask(2, np.concatenate((prompt[: 5 * PAGE], drawn(2, PAGE))))
    assert (use.num_tokens, use.miss) == (0, MissReason.NO_TAIL), "the end of the first chunk was replaced"


def test_a_long_prompt_is_resumed_at_the_ends_of_intervals() -> None:
    served = Served(tail_every=2 * PAGE)
    prompt = drawn(1, 10 * PAGE)
    served.ask(1, prompt, 1)
    for num_pages in range(2, 9):
        use = served.ask(num_pages, np.concatenate((prompt[: num_pages * PAGE], drawn(num_pages, 9))))
        assert use.num_tokens == num_pages // 2 * 2 * PAGE


def test_without_a_slot_there_is_no_tail_and_nobody_is_preempted() -> None:
    served = Served(num_snapshot_slots=2)
    for uid in range(4):
        served.add(uid, drawn(uid, 40), 40)
    served.run()
    assert served.engine.stats().preemptions == 0
    assert served.cache.snapshots is not None
    served.cache.snapshots.check()


def test_a_preempted_row_resumes_where_its_state_has_passed_a_boundary() -> None:
    served = Served(num_pages=1 + 12, num_host_pages=100)
    for uid in (1, 2):
        served.add(uid, drawn(uid, 5 * PAGE), 80)
    served.run(lambda: served.engine.stats().preemptions > 0)
    admitted = len(served.plans)
    served.run()
    again = [admit for plan in served.plans[admitted:] for admit in plan.admit]
    assert again and all(admit.num_computed >= (admit.tokens.size - 1) // PAGE * PAGE - PAGE for admit in again)


def test_a_row_holds_the_slot_that_it_starts_from_until_its_first_step_is_done() -> None:
    """Other rows take every slot meanwhile; the device reads it when the step begins."""
    served = Served(num_snapshot_slots=3, depth=1)
    prompt = drawn(1, 3 * PAGE)
    served.ask(1, prompt, 1)
    served.add(2, prompt, 1)
    served.step()
    snapshots = served.cache.snapshots
    assert snapshots is not None
    (admit,) = served.plans[-1].admit
    assert admit.restore_slot and snapshots.num_refs[admit.restore_slot] == 2
    served.run()
    assert snapshots.num_refs[admit.restore_slot] == 1


def test_only_the_newest_snapshot_of_a_reply_goes_to_the_host() -> None:
    served = Served(num_host_pages=400)
    prompt = drawn(1, 20)
    served.ask(1, prompt, 108)  # its history is on the host long before it ends
    assert served.cache.tails is not None and served.cache.snapshots is not None
    tails = [tail for node in served.cache.tree.nodes() for tail in (node.tails or {}).values() if tail.is_open]
    ends = sorted(sum(1 for _ in tail.node.digests[: tail.at]) for tail in tails if tail.frames is not None)
    assert len(ends) == len(tails) == 2, "the ends of prompt and reply"
    served.cache.flush(Tier.DEVICE)
    turn = np.concatenate((prompt, oracle(prompt, 108), [5]))
    use = served.ask(2, turn)
    assert (use.host, use.num_tokens) == (112, 112)


def test_a_boundary_that_the_host_has_stays_on_the_device_when_a_row_has_passed_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(num_host_pages=400)
    prompt = drawn(1, 20)
    served.ask(1, prompt, 100)
    served.cache.flush(Tier.DEVICE)
    monkeypatch.setattr(served.planner._costs, "is_worth_loading", lambda *measures: False)
    served.ask(2, prompt, 140)
    use = served.ask(3, np.concatenate((prompt, oracle(prompt, 100), [5])))
    assert (use.device, use.host) == (112, 0)


def test_a_model_without_snapshots_gets_plans_without_columns_for_them() -> None:
    served = Served(num_snapshot_slots=0)
    served.ask(1, drawn(1, 40), 20)
    assert all(plan.snapshots is NO_SNAPSHOTS for plan in served.plans)
    assert all(admit.restore_slot == 0 for plan in served.plans for admit in plan.admit)


def test_a_prompt_whose_snapshot_finds_no_slot_waits_for_one() -> None:
    """Loads under way hold all of them; a transfer and a step later the first is free."""
    limits = WindowLimits(window=0, page_size=4, num_draft=0, depth=0, max_batched_tokens=64)
    engine, executor, cache = copying_engine(
        num_pages=400, num_host_pages=400, page_size=4, windows=limits, tails=TailSizes(snapshot_slots=3)
    )
    prompts = [np.arange(100 * first, 100 * first + 20) for first in (1, 2, 3)]
    for uid, prompt in enumerate(prompts):
        add(engine, uid, prompt)
        run(engine)
    cache.flush(Tier.DEVICE)
    executor.holds = True
    for uid, prompt in enumerate(prompts, 10):
        add(engine, uid, prompt)
    for _ in range(5):
        engine.step()
    assert engine._planner._rows.active.size == 2
    executor.holds = False
    found = run(engine)
    assert engine.stats().preemptions == 0
    loads = [copy for copy in executor.copies if copy.kind is CopyKind.LOAD]
    assert [copy.slots.size for copy in loads] == [1, 1, 1] and loads[0].slots[0] != loads[1].slots[0]
    assert [found[uid].host for uid in (10, 11, 12)] == [16, 16, 16]


@pytest.mark.parametrize("num_steps", [4, 6])  # an offload has the slot then, a row that passes a boundary
def test_a_prompt_gets_a_slot_before_the_rows_that_run(num_steps: int) -> None:
    """All pass a boundary in every other step, and there is one slot; whoever waits for it is next."""
    limits = WindowLimits(window=0, page_size=2, num_draft=0, depth=1, max_batched_tokens=64)
    engine, executor, cache = copying_engine(
        num_pages=400, num_host_pages=400, page_size=2, windows=limits, tails=TailSizes(snapshot_slots=2), depth=1
    )
    prompt = np.arange(100, 120)
    add(engine, 1, prompt)
    run(engine)
    cache.flush(Tier.DEVICE)
    assert cache.snapshots is not None
    for uid in range(10, 13):
        add(engine, uid, np.arange(200 + 5 * uid, 205 + 5 * uid), max_tokens=60)
    for _ in range(num_steps):
        engine.step()
    assert engine._planner._rows.active.size == 3
    assert not cache.snapshots.has_page
    add(engine, 20, prompt)
    for _ in range(2):
        engine.step()
    assert [copy.slots.size for copy in executor.copies if copy.kind is CopyKind.LOAD] == [1]
    run(engine)


@pytest.mark.parametrize(("num_new", "is_cold"), [(2, False), (40, True)])
def test_the_end_of_a_prompt_goes_first_unless_its_reply_ends_within_the_same_page(num_new: int, is_cold: bool) -> None:
    served = Served()
    served.ask(1, drawn(1, 20), num_new)
    tails = [tail for node in served.cache.tree.nodes() for tail in (node.tails or {}).values() if tail.is_open]
    assert (min(tail.last_used for tail in tails) == 0) == is_cold and len(tails) == 1 + is_cold


def test_a_row_that_goes_on_keeps_the_tail_that_another_row_has_at_the_same_boundary() -> None:
    """H9: the other, a step behind it, has the same tokens and ends before the next boundary."""
    served = Served()
    prompt = drawn(1, 20)
    served.add(1, prompt, 80)
    served.add(2, prompt, 44)
    served.run()
    turn = np.concatenate((prompt, oracle(prompt, 44), drawn(2, 3)))
    assert served.ask(3, turn).num_tokens == 3 * PAGE


@pytest.mark.parametrize(
    ("num_pages", "num_host_pages", "num_frames", "every", "num_slots", "seed"),
    [(75, 81, 29, 20, 18, 185000568), (127, 49, 19, 24, 29, 1047628539), (107, 131, 5, 20, 13, 705273312)],
)
def test_copies_to_a_host_with_less_room_than_the_device_end(
    num_pages: int, num_host_pages: int, num_frames: int, every: int, num_slots: int, seed: int
) -> None:
    """Pages and tails do not take each other's room in turns; one in twenty sizes drawn at random did so without an end."""
    limits = WindowLimits(
        window=0, page_size=4, num_draft=0, depth=0, max_batched_tokens=64, tail_every=every, has_snapshots=True
    )
    tails = TailSizes(snapshot_slots=num_slots, frames_per_snapshot=num_frames)
    engine, *_ = copying_engine(
        num_pages=num_pages, num_host_pages=num_host_pages, max_rows=1, windows=limits, tails=tails
    )
    rng = np.random.default_rng(seed)
    histories = [rng.integers(2, 1 << 30, 100) for _ in range(3)]
    for uid in range(14):
        chat = int(rng.integers(3))
        add(engine, uid, histories[chat], 3)
        run(engine, max_turns=300)
        kept = histories[chat][: int(rng.integers(60, 200))]
        histories[chat] = np.concatenate((kept, (FILLER, FILLER, FILLER), rng.integers(2, 1 << 30, 9)))
