"""Steps in two halves: what happens between them changes no reply, and the draw reads the masks of its own step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.plan import BatchPlan
from hiserve.core.request import FinishReason
from hiserve.engine.loop import Engine
from hiserve.ipc.messages import Admit
from hiserve.runners import graph
from hiserve.runners.device_rows import MaskBuffers
from hiserve.runners.dispatch import Dispatch
from tests.helpers.cache_paths import SMALL_MODEL
from tests.helpers.grammars import GRAMMARS, compile_first
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.tiered import engine_of
from tests.helpers.widening import some

TEXT = "I would like a large latte with oat milk, and"
MAX_TOKENS = 45  # of the reply that is cut: 15 steps or more with two drafts, whatever the model accepts
GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=MAX_TOKENS)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=MAX_TOKENS)
NAMES = ("json", "regex", "object", None)
ASKED = {
    uid: msgspec.structs.replace(how, grammar=name and GRAMMARS[name])
    for uid, (name, how) in enumerate([(name, how) for name in NAMES for how in (GREEDY, DRAWN)], start=1)
}
CHOSEN = 3  # a request under a regex, greedy
AT = (1, 5, 11)  # of the steps in halves: after its forward, and before its masks
HIT = dict(zip(AT, (CHOSEN, 1, 2), strict=True))  # by step, a request that runs longer; the others are under a schema
# The steps in which memory runs out or a worker dies: of prompts alone, of rows that decode, and a later one.
FATAL = pytest.mark.parametrize("at", some(AT, AT[1]))
AHEAD: dict[str, Any] = {"overlap": 1, "spec": "off"}
DRAFTS: dict[str, Any] = {"overlap": 1, "spec": "eagle3", "spec_steps": 2}
WIDE = pytest.mark.wide
HOW = pytest.mark.parametrize("how", [AHEAD, DRAFTS], ids=["ahead", "drafts"])
DRAFTING = pytest.mark.parametrize(
    "how", [pytest.param(AHEAD, id="ahead", marks=WIDE), pytest.param(DRAFTS, id="drafts")]
)
Replies = dict[int, tuple[list[int], FinishReason]]


class KilledError(Exception):
    """Stands for the end of a process."""


class Run:
    """An engine and what it told of each request.

    Args:
        llm: Whose engine it is.
        known: Tokens that requests had before, by uid, as after the death of a worker.
    """

    def __init__(self, llm: LLM, known: dict[int, list[int]] | None = None) -> None:
        self.engine: Engine = engine_of(llm)
        self.tokens = {uid: list((known or {}).get(uid, [])) for uid in ASKED}
        self.ends: dict[int, FinishReason] = {}
        self.plans: list[BatchPlan] = []  # in halves
        self._prompt = llm.encode(TEXT)

    def __call__(self, uids: list[int] | None = None) -> Replies:
        asked = list(ASKED) if uids is None else uids
        compile_first(self.engine._planner.grammars, [ASKED[uid] for uid in asked])
        for uid in asked:
            tokens = np.array([*self._prompt, *self.tokens[uid]], dtype=np.int32)
            self.engine.add(Admit(uid, len(self._prompt), ASKED[uid], b"", 0), tokens)
        while self.engine.has_work:
            updates = self.engine.step()
            for delta in updates or ():
                self.tokens[delta.uid] += delta.tokens
                if delta.finish is not FinishReason.RUNNING:
                    assert delta.uid not in self.ends
                    self.ends[delta.uid] = delta.finish
        return {uid: (self.tokens[uid], end) for uid, end in self.ends.items()}

    def between(self, act: Callable[[BatchPlan, int], None], *, late: bool = False) -> None:
        """Calls with each plan in halves, and its number from 1, after its forward and before or after its masks are started."""
        grammars = self.engine._planner.grammars
        inner = grammars.masks

        def masks(plan: BatchPlan, *more: Any) -> Any:
            assert plan.awaits_masks
            self.plans.append(plan)
            waiting = inner(plan, *more) if late else None
            act(plan, len(self.plans))
            return waiting or inner(plan, *more)

        grammars.masks = masks  # type: ignore[method-assign]

    def row_of(self, uid: int) -> int | None:
        rows = self.engine._planner._rows
        return next((row for row in rows.active.tolist() if rows.uid[row] == uid), None)


LATE = pytest.mark.parametrize(
    ("late", "how"),
    [
        pytest.param(False, AHEAD, id="before-ahead", marks=WIDE),
        pytest.param(False, DRAFTS, id="before-drafts"),
        pytest.param(True, AHEAD, id="while masks are computed-ahead"),
        pytest.param(True, DRAFTS, id="while masks are computed-drafts", marks=WIDE),
    ],
)


@contextmanager
def running(**settings: Any) -> Iterator[Run]:
    with LLM(**SMALL_MODEL | {"max_running_requests": len(ASKED)} | settings) as llm:
        yield Run(llm)


@pytest.fixture(scope="module")
def alone() -> Replies:
    """Each request alone, the halves of a step called in a row, without drafts."""
    with running(overlap=0, spec="off") as run:
        for uid in ASKED:
            run([uid])
        found = {uid: (run.tokens[uid], run.ends[uid]) for uid in ASKED}
    assert len(found[CHOSEN][0]) > max(AT)
    assert {end for _, end in found.values()} > {FinishReason.LENGTH}
    return found


@HOW
def test_a_forward_is_launched_before_the_step_before_it_is_known_and_its_draw_after_that(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    with running(**how) as run:
        executor, planner = run.engine._executor, run.engine._planner

        def watch(owner: Any, name: str) -> None:
            inner = getattr(owner, name)

            def watched(*what: Any) -> Any:
                events.append((name, what[0].step_id if what and what[0] is not None else 0))
                return inner(*what)

            monkeypatch.setattr(owner, name, watched)

        for owner, name in ((executor, "submit"), (executor, "draw"), (planner, "commit"), (planner, "plan")):
            watch(owner, name)
        run.between(lambda plan, number: None)
        run()
        halves = [plan.step_id for plan in run.plans]
    num_early = num_hidden = 0
    for step in halves:
        submitted = events.index(("submit", step))
        drawn = next(index for index in range(submitted, len(events)) if events[index][0] == "draw")
        assert events[drawn][1] in (0, step)
        assert {name for name, _ in events[submitted + 1 : drawn]} <= {"commit", "plan"}
        num_early += ("commit", step - 1) in events[submitted:drawn]
        num_hidden += events[drawn - 1] == ("plan", 0)  # the next one, while masks are computed
    # The first has no step before it; the last ones wait for lengths that drafts leave open.
    assert num_early > 0.75 * len(halves) > 10
    assert num_hidden == len(halves)


@LATE
def test_an_abort_between_the_halves_ends_one_request_alone(alone: Replies, how: dict[str, Any], late: bool) -> None:
    with running(**how) as run:
        run.between(lambda plan, number: run.engine.abort([HIT[number]]) if number in HIT else None, late=late)
        found = run()
    for uid in HIT.values():
        tokens, end = found.pop(uid)
        assert end is FinishReason.ABORT and tokens == alone[uid][0][: len(tokens)]
    assert found == {uid: reply for uid, reply in alone.items() if uid not in HIT.values()}


@LATE
def test_a_preemption_between_the_halves_changes_no_reply(alone: Replies, how: dict[str, Any], late: bool) -> None:
    with running(**how) as run:

        def preempt(plan: BatchPlan, number: int) -> None:
            row = run.row_of(HIT.get(number, 0))
            if row is not None:
                run.engine._planner._ends.preempt(row)

        run.between(preempt, late=late)
        assert run() == alone
        assert run.engine.stats().preemptions == len(HIT)


@DRAFTING
def test_a_matcher_that_fails_between_the_halves_fails_its_request_alone(alone: Replies, how: dict[str, Any]) -> None:
    with running(**how) as run:

        def spoil(plan: BatchPlan, number: int) -> None:
            row = run.row_of(HIT.get(number, 0))
            if row is not None:
                run.engine._planner.grammars._matchers[row].advance([0, 0])

        failed: list[tuple[int, str, str]] = []
        step = run.engine.step

        def watched() -> Any:
            updates = step()
            failed.extend([] if updates is None else updates.failed)
            return updates

        run.engine.step = watched  # type: ignore[method-assign]
        run.between(spoil)
        assert run() == {uid: reply for uid, reply in alone.items() if uid not in HIT.values()}
        run.engine._planner._rows.check()
    assert [(uid, code) for uid, code, _ in failed] == [(uid, "grammar_limit") for uid in HIT.values()]


FAULTS: dict[str, tuple[type, str]] = {
    "forward": (Dispatch, "forward"),
    "masks": (MaskBuffers, "send"),
    "draw": (Dispatch, "propose"),
}


@pytest.mark.parametrize(
    ("half", "how"),
    [
        pytest.param(half, how, id=f"{half}-{name}", marks=[] if (turn + place) % 2 else [WIDE])
        for turn, half in enumerate(FAULTS)
        for place, (name, how) in enumerate({"ahead": AHEAD, "drafts": DRAFTS}.items())
    ],
)
@FATAL
def test_memory_that_runs_out_in_either_half_changes_no_reply(
    alone: Replies, how: dict[str, Any], half: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = FAULTS[half]
    inner, left = getattr(owner, name), at + 2

    def starved(*of_step: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return inner(*of_step)

    with running(**how) as run:
        monkeypatch.setattr(owner, name, starved)
        assert run() == alone
        assert run.engine.stats().step_faults["out_of_memory"] == 1
        run.engine._planner._rows.check()
    assert left < 0


@DRAFTING
@FATAL
def test_a_worker_killed_between_the_halves_is_followed_by_one_that_goes_on(
    alone: Replies, how: dict[str, Any], at: int
) -> None:
    def die(plan: BatchPlan, number: int) -> None:
        if number == at:
            raise KilledError

    with running(**how) as first:
        first.between(die)
        with pytest.raises(KilledError):
            first()
    left = [uid for uid in ASKED if uid not in first.ends]
    with LLM(**SMALL_MODEL | {"max_running_requests": len(ASKED)} | how) as llm:
        second = Run(llm, first.tokens)
        second(left)
    found = {uid: (second.tokens[uid], (first.ends | second.ends)[uid]) for uid in ASKED}
    assert found == alone


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(AHEAD, id="ahead"),
        pytest.param(DRAFTS, id="drafts"),
        pytest.param(DRAFTS | {"overlap": 0}, id="drafts at depth 0", marks=WIDE),
    ],
)
def test_draws_under_grammars_are_replayed(
    alone: Replies, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are greedy or draw from all tokens, so that whole steps are graphs: none of them is drawn eagerly."""
    eager: list[int] = []
    inner, send, sent = graph.finish_step, MaskBuffers.send, list[int]()
    monkeypatch.setattr(graph, "finish_step", lambda *given, **more: eager.append(1) or inner(*given, **more))  # type: ignore[func-returns-value]
    monkeypatch.setattr(MaskBuffers, "send", lambda *given: sent.append(1) or send(*given))  # type: ignore[func-returns-value]
    (executors := allow_recording(monkeypatch)).clear()
    with running(graphs="all", kv_canary=False, **how) as run:
        assert run() == alone
        masks = run.engine.stats().grammars.masks
    (executor,) = executors
    replays = executor.gate_counts()["replay"]
    assert not eager and len(sent) > 12 and masks > 100
    assert replays["verify" if how["spec"] != "off" else "decode"] > 10, replays


def test_nothing_is_submitted_between_the_halves() -> None:
    with running(overlap=0, spec="off") as run:

        def intrude(plan: BatchPlan, number: int) -> None:
            run.engine._executor.submit(plan)
            raise KilledError  # not refused

        run.between(intrude)
        with pytest.raises(AssertionError, match="before the draw"):
            run([CHOSEN])


def test_masks_of_another_step_are_refused() -> None:
    with running(overlap=0, spec="off") as run:
        inner = run.engine._planner.grammars.masks

        def stale(plan: BatchPlan, *more: Any) -> Any:
            made, failed = inner(plan, *more)()
            assert made is not None
            return lambda: (type(made)(made.step_id - 1, made.entries, made.masks), failed)

        run.engine._planner.grammars.masks = stale  # type: ignore[method-assign, assignment]
        with pytest.raises(AssertionError, match="masks of another step"):
            run([CHOSEN])
