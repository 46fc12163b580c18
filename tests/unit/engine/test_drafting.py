"""The number of drafts after a step, by request and by controller, and the counts of what became of them."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.core.plan import BatchPlan, Int32Array
from hiserve.core.request import SamplingParams, SpecParams
from hiserve.core.usage import SOURCES, CacheUse, DraftStats, DraftUse
from hiserve.engine.drafting import Drafting
from hiserve.engine.loop import Engine
from hiserve.engine.rows import RowState
from hiserve.ipc.messages import Admit
from hiserve.spec.adaptive import DraftController
from tests.helpers.echo import oracle
from tests.helpers.engines import echo_engine
from tests.helpers.step_costs import step_costs
from tests.helpers.steps import Steps

PAGE = 4
NUM_DRAFT = 3


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 200, length).astype(np.int32)


class Scripted(DraftController):
    """Chooses what it is told to; notes what it is asked and told."""

    def __init__(self, chosen: list[int], *, times_own_drafts: bool = False) -> None:
        tiers, each = np.arange(4), np.ones((1, 4))
        super().__init__(step_costs(np.ones(1), tiers, each, each, np.ones(1), times_own_drafts=times_own_drafts))
        self._chosen = chosen
        self.allowed: list[list[int]] = []
        self.told: list[tuple[list[int], list[int], int, bool]] = []

    def choose(self, allowed: Int32Array, mean_context: float) -> int:
        assert mean_context > 0
        self.allowed.append(allowed.tolist())
        return self._chosen.pop(0)

    def record(
        self, num_draft: Int32Array, counts: Int32Array, num_made: int, mean_context: float, seconds: float | None
    ) -> None:
        self.told.append((num_draft.tolist(), counts.tolist(), num_made, seconds is None))


def plans(steps: Steps, emitted: list[list[int]]) -> list[BatchPlan]:
    """Plans and commits one step for each list of emitted tokens."""
    made = []
    for tokens in emitted:
        plan = steps.planner.plan()
        assert plan is not None
        made.append(plan)
        steps.emit(plan, tokens)
    return made


@pytest.mark.parametrize("times_own_drafts", [False, True])
def test_each_step_proposes_what_is_chosen_for_it_and_verifies_what_was_chosen_before(times_own_drafts: bool) -> None:
    controller = Scripted([2, 0, 3, 1], times_own_drafts=times_own_drafts)
    steps = Steps(num_pages=30, num_draft=3, controller=controller)
    steps.add(1, prompt(5), max_tokens=20)
    made = plans(steps, [[11], [12, 13], [14], [15, 16, 17, 18]])
    assert [plan.num_propose for plan in made] == [2, 0, 3, 1]
    assert [plan.num_draft.tolist() for plan in made] == [[0], [2], [0], [3]]
    assert controller.allowed == [[3]] * 4
    num_made = [2, 0, 3, 1] if times_own_drafts else [0, 2, 0, 3]
    has_prompt = [True, False, False, False]
    assert controller.told == [
        ([0], [1], num_made[0], has_prompt[0]),
        ([2], [2], num_made[1], has_prompt[1]),
        ([0], [1], num_made[2], has_prompt[2]),
        ([3], [4], num_made[3], has_prompt[3]),
    ]


class Cold(Scripted):
    """Goes cold with its third step; what stands behind the rows then is still verified."""

    num_steps = 0

    @property
    def is_cold(self) -> bool:
        return self.num_steps > 2

    def stays_cold(self, allowed: Int32Array) -> bool:
        self.num_steps += 1
        return self.is_cold


def test_a_cold_step_proposes_nothing_and_tells_of_drafts_alone() -> None:
    controller = Cold([2, 2])
    steps = Steps(num_pages=30, num_draft=3, controller=controller)
    steps.add(1, prompt(5), max_tokens=20)
    made = plans(steps, [[11], [12, 13], [14, 15, 16], [17], [18]])
    assert [plan.num_propose for plan in made] == [2, 2, 0, 0, 0]
    assert [plan.num_draft.tolist() for plan in made] == [[0], [2], [2], [0], [0]]
    assert [plan.is_cold for plan in made] == [False, False, True, True, True]
    # A step that the head takes no part in costs what a step with it does not: it tells nothing of that.
    assert [num_draft for num_draft, *_ in controller.told] == [[0], [2], [2]]


def test_a_row_has_no_more_drafts_than_it_wants() -> None:
    steps = Steps(num_pages=30, num_draft=3, controller=Scripted([3, 3, 3]))
    steps.add(1, prompt(5, seed=1), max_tokens=20, spec=SpecParams(num_steps=1))
    steps.add(2, prompt(5, seed=2), max_tokens=20)
    first = steps.planner.plan()
    assert first is not None and first.num_propose == 3
    steps.emit(first, [11], [21])
    second = steps.planner.plan()
    assert second is not None
    assert dict(zip(second.rows.tolist(), second.num_draft.tolist(), strict=True)) == {1: 1, 2: 3}


def test_nothing_is_chosen_for_a_step_that_draws_nothing() -> None:
    controller = Scripted([1])
    steps = Steps(num_pages=30, budget=4, num_draft=3, controller=controller)
    steps.add(1, prompt(7), max_tokens=4)
    first = steps.planner.plan()
    assert first is not None and (first.num_propose, controller.allowed) == (0, [])


def with_drafts(drafted: list[int], most: list[int]) -> list[int]:
    """What rows verify behind which so many drafts stand, of at most so many."""
    steps = Steps(num_pages=60, num_draft=5)
    for uid in range(len(drafted)):
        steps.add(uid + 1, prompt(5, uid), max_tokens=20)
    steps.planner.plan()
    state, choice = steps.planner._rows, steps.planner._drafting
    rows = state.active
    state.drafted[rows], state.max_draft[rows] = drafted, most
    return choice.to_verify(rows).tolist()


def test_rows_that_a_choice_left_with_different_drafts_verify_the_least_of_them() -> None:
    """Rows of one width are one graph."""
    assert with_drafts([3, 1, 5], [5, 5, 5]) == [1, 1, 1]
    assert with_drafts([3, 3, 3], [5, 5, 5]) == [3, 3, 3]
    assert with_drafts([3, 0, 5], [5, 5, 5]) == [3, 0, 5]  # a graph is not to be had
    assert with_drafts([3, 1, 5], [5, 1, 5]) == [3, 1, 5]  # nor for requests that want different numbers
    assert with_drafts([], []) == []


def run(engine: Engine, uid: int, tokens: np.ndarray, max_tokens: int, **spec: object) -> DraftUse | None:
    """Runs one request to its end, and checks what it says; returns what is told of its drafts at last."""
    asked = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True, spec=SpecParams(**spec) if spec else None)
    engine.add(Admit(uid, tokens.size, asked, b"", 0), tokens)
    said: list[int] = []
    told = None
    while engine.has_work:
        updates = engine.step()
        if updates is not None:
            said += updates.tokens.tolist()
            told = [told, *updates.drafts][-1] or told
    assert said == oracle(tokens, max_tokens)
    return told


def rows_of(max_rows: int) -> RowState:
    cache = PrefixCache(num_pages=20, page_size=PAGE, namespace=b"")
    return RowState(cache, max_rows, max_len=16, num_ahead=NUM_DRAFT)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_verifying_step_adds_its_drafts_and_what_it_appended_beyond_one_token() -> None:
    state = rows_of(3)
    counts, rows = Drafting(state), np.array([1, 3, 2])
    state.source[[1, 2, 3]] = [SOURCES.index(source) for source in ("cold", "host", "cold")]
    counts.verified(rows, ints(3, 2, 0), ints(4, 1, 1))
    assert counts.take(rows) == [DraftUse(1, 3, (1, 1, 1)), DraftUse(1, 2, (0, 0, 0)), None]
    counts.verified(rows, ints(3, 0, 3), ints(2, 1, 3))
    assert counts.take(rows) == [DraftUse(2, 6, (2, 1, 1)), None, DraftUse(1, 3, (1, 1, 0))]
    assert counts.take(rows) == [None, None, None]
    by_source = counts.stats().by_source
    assert by_source["cold"] == DraftUse(3, 8, (2, 1, 1))
    assert by_source["host"] == DraftUse(1, 3, (1, 1, 0))
    assert by_source["device"] == by_source["store"] == DraftUse(0, 0, (0, 0, 0))


def test_steps_count_by_how_many_drafts_follow_them() -> None:
    steps = Steps(num_pages=30, num_draft=3, controller=Scripted([3, 0, 3]))
    steps.add(1, prompt(5), max_tokens=20)
    plans(steps, [[11], [12], [13]])
    assert steps.planner.stats().drafts.chosen_steps == {"0": 1, "3": 2}


def test_without_speculation_nothing_is_told() -> None:
    engine, *_ = echo_engine(num_pages=20, page_size=PAGE)
    assert run(engine, 1, prompt(5, 1), 4) is None
    assert engine.stats().drafts == DraftStats()


def test_drafts_count_for_the_tier_that_gave_most_of_the_prompt() -> None:
    engine, planner, *_ = echo_engine(num_pages=12, page_size=PAGE, eos=(), num_draft=NUM_DRAFT, num_host_pages=60)
    told = []
    for uid, source in enumerate(("cold", "device", "host")):
        if source == "host":
            planner.flush(("device",))
        told.append(run(engine, uid, prompt(17, seed=1), 6))
        assert engine.stats().drafts.by_source[source] == told[-1], source
    assert all(use is not None and use.accepted > 0 for use in told)


@pytest.mark.parametrize(
    ("use", "source"),
    [
        (CacheUse(), "cold"),
        (CacheUse(16, 0, 0), "device"),
        (CacheUse(16, 32, 0), "host"),
        (CacheUse(16, 32, 48), "store"),
        (CacheUse(16, 16, 16), "device"),
        (CacheUse(0, 16, 16), "host"),
    ],
)
def test_the_source_of_a_prompt_is_the_tier_that_gave_most_and_the_nearest_of_several(
    use: CacheUse, source: str
) -> None:
    assert use.source == source


def test_a_request_verifies_no_more_drafts_than_it_asks_for() -> None:
    engine, *_ = echo_engine(num_pages=20, page_size=PAGE, eos=(), num_draft=NUM_DRAFT)
    tokens = prompt(9, seed=1)
    whole = run(engine, 1, tokens, 16)
    two = run(engine, 2, tokens, 16, num_steps=2)
    assert whole is not None
    assert two is not None
    assert whole.proposed == NUM_DRAFT * whole.verify_steps
    assert two.proposed == 2 * two.verify_steps > 0
    assert two.accepted_per_position[2] == 0
    chosen = engine.stats().drafts.chosen_steps
    for uid, spec in ((3, {"enabled": False}), (4, {"num_steps": 0}), (5, {"enabled": False, "num_steps": 2})):
        assert run(engine, uid, tokens, 16, **spec) == DraftUse(0, 0, (0, 0, 0))
    now = engine.stats().drafts.chosen_steps
    assert (now["3"], now["0"]) == (chosen["3"], 3 * 16), "steps in which nobody wants drafts propose none"


def test_the_sum_of_two_uses_has_the_positions_of_the_longer() -> None:
    both = DraftUse(2, 4, (2, 1)) + DraftUse(1, 3, (1, 1, 1))
    assert both == DraftUse(3, 7, (3, 2, 1))
    assert both.shown() == {
        "accept_length": 3.0,
        "proposed": 7,
        "accepted": 6,
        "verify_steps": 3,
        "accepted_per_position": (3, 2, 1),
    }
    assert DraftUse().accept_length == 1.0
