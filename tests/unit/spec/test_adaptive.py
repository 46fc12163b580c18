"""The number of drafts follows what pays: simulated devices, against the best fixed number in hindsight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import product

import msgspec
import numpy as np
import pytest

from hiserve.core.startup_measurements import StepCosts
from hiserve.spec import adaptive
from hiserve.spec.acceptance import PRIOR, Acceptance
from hiserve.spec.adaptive import DWELL_STEPS, DraftController, Times
from tests.helpers.step_costs import step_costs
from tests.helpers.widening import in_turn, usual

ROWS = np.array([1, 2, 4, 8, 16, 32, 48, 64, 96, 128])
K = 5
CONTEXT = 1000.0
GOOD, FAIR, FIRST_ONLY = (0.85, 0.8, 0.78, 0.75, 0.7), (0.6, 0.5, 0.45, 0.4, 0.4), (0.9, 0.2, 0.1, 0.1, 0.1)
POOR, NEVER = (0.1,) * K, (0.0,) * K
BAR = 0.97


def device(max_draft: int = K) -> StepCosts:
    """A step takes 5 ms until 64 tokens fill the device; then every token costs."""
    tiers = np.arange(max_draft + 1)
    tokens = ROWS[:, None] * (tiers + 1.0)
    verify = 5e-3 + 2e-5 * tokens + 6e-5 * np.maximum(tokens - 64, 0)
    further = 3e-4 + 1e-6 * ROWS
    return step_costs(ROWS, tiers, verify, 4e-4 + 2e-6 * tokens, further, verify_token=1e-8, draft_token=5e-10)


def plain(*seconds: float) -> StepCosts:
    """A device whose steps take so long, by the number of drafts; to make them takes nothing."""
    tiers = np.arange(len(seconds))
    return step_costs(np.array([1]), tiers, np.array([seconds]), np.zeros((1, tiers.size)), np.zeros(1))


def wrong(factors: tuple[float, ...]) -> StepCosts:
    """What a bad measurement says of that device; a factor for each number of drafts."""
    costs = device()
    verify, follow = np.array(costs.verify) * factors, np.array(costs.follow) * factors
    return msgspec.structs.replace(costs, verify=verify.tolist(), follow=follow.tolist())


@dataclass
class Phase:
    """Work of one kind: steps, rows of each, chances of drafts if those before them were accepted."""

    steps: int
    rows: int | np.ndarray
    chances: tuple[float, ...]


@dataclass
class Outcome:
    """Of each of P phases: seconds it took, ``[P]``, and would have taken with any fixed number, ``[P, K + 1]``."""

    seconds: np.ndarray
    fixed: np.ndarray
    chosen: list[int]
    kept: list[int]

    @property
    def shares(self) -> np.ndarray:
        """Tokens per second of each phase, as a share of what its best fixed number gives."""
        return self.fixed.min(1) / self.seconds

    @property
    def share(self) -> float:
        """Of all phases, against one number for all of them."""
        return float(self.fixed.sum(0).min() / self.seconds.sum())

    @property
    def num_changes(self) -> int:
        return int(np.count_nonzero(np.diff(self.kept)))


def run(
    *phases: Phase,
    believed: StepCosts | None = None,
    depth: int = 1,
    noise: float = 0.03,
    stalls: float = 0.01,
    is_timed: bool = True,
    drafts_count_before: bool = False,
    seed: int = 0,
) -> Outcome:
    """Serves phases with a device that makes the drafts of a step behind the step before it.

    Args:
        believed: What the controller is told of the device; the truth if None.
        depth: Results that are still out when the next step is planned.
        noise: Of times, the deviation of their logarithm.
        stalls: How often a step takes 2 to 10 times as long.
        is_timed: The controller is told times.
        drafts_count_before: A step ends when what follows it is drafted.
        seed: Of everything that is random.
    """
    costs = device(len(phases[0].chances))
    controller = DraftController(believed or costs)
    rng = np.random.default_rng(seed)
    flying: deque[tuple[np.ndarray, np.ndarray, int, float | None]] = deque()
    seconds, fixed = np.zeros(len(phases)), np.zeros((len(phases), costs.max_chain + 1))
    chosen, kept, following = [], [], 0
    for number, phase in enumerate(phases):
        tokens = 1 + np.append(0.0, np.cumprod(phase.chances).cumsum())
        for rows in np.broadcast_to(phase.rows, phase.steps).tolist():
            num_draft, following = following, controller.choose(np.full(rows, costs.max_chain, np.int32), CONTEXT)
            chosen.append(following)
            kept.append(controller.num_draft)
            bucket = costs.bucket(rows)
            whole = costs.seconds(bucket, rows * CONTEXT)
            seconds[number] += whole[num_draft]
            fixed[number] += whole * tokens[num_draft] / tokens  # of the same work
            told, num_made = whole[num_draft], num_draft
            if drafts_count_before:
                extend_s = costs.extend_s(bucket, rows * CONTEXT)
                told, num_made = told + extend_s[following] - extend_s[num_draft], following
            told *= np.exp(noise * rng.standard_normal()) * (rng.uniform(2, 10) if rng.random() < stalls else 1.0)
            is_right = rng.random((rows, num_draft)) < phase.chances[:num_draft]
            counts = 1 + np.cumprod(is_right, 1).sum(1)
            verified = np.full(rows, num_draft, np.int32)
            flying.append((verified, counts.astype(np.int32), num_made, told if is_timed else None))
            if len(flying) > depth:
                verified, accepted, num_made, told_s = flying.popleft()
                controller.record(verified, accepted, num_made, CONTEXT, told_s)
    return Outcome(seconds, fixed, chosen, kept)


# --- goodput ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", usual(product((1, 4, 16, 64, 128), (GOOD, FAIR, FIRST_ONLY, POOR, NEVER))))
def test_work_of_one_kind_is_done_as_fast_as_with_the_best_fixed_number(case: tuple[int, tuple[float, ...]]) -> None:
    rows, chances = case
    assert run(Phase(1500, rows, chances)).share >= BAR


def test_the_best_fixed_numbers_of_these_devices_are_none_some_and_all() -> None:
    best = {
        int(run(Phase(20, rows, chances)).fixed.argmin()) for rows in (1, 16, 128) for chances in (GOOD, FAIR, POOR)
    }
    assert {0, 1, 2, 3, K} <= best


@pytest.mark.parametrize("fixed", [0, K])
def test_no_fixed_number_is_good_everywhere(fixed: int) -> None:
    shares = []
    for rows, chances in ((1, GOOD), (128, POOR)):
        out = run(Phase(1, rows, chances)).fixed[0]
        shares.append(out.min() / out[fixed])
    assert min(shares) < 0.4


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
def test_it_leaves_drafts_that_fail_and_comes_back_when_they_are_accepted(rows: int) -> None:
    out = run(Phase(1200, rows, GOOD), Phase(1200, rows, NEVER), Phase(1200, rows, GOOD))
    assert out.share >= BAR
    assert out.shares.min() >= 0.95, out.shares


def test_without_probes_it_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "PROBE_SHARE", 0.0)
    monkeypatch.setattr(adaptive, "MAX_CREDIT", 0.0)
    out = run(Phase(1000, 32, GOOD), Phase(1000, 32, NEVER), Phase(1000, 32, GOOD))
    assert out.shares[1] >= BAR
    assert out.shares[2] < 0.9


def test_a_place_that_was_given_up_is_found_again() -> None:
    out = run(Phase(1500, 1, FIRST_ONLY), Phase(1500, 1, GOOD))
    assert out.shares.min() >= BAR, out.shares


@pytest.mark.parametrize(("chances", "order"), in_turn([GOOD, FAIR, POOR], [1, -1]))
def test_a_batch_that_grows_or_shrinks_is_followed(chances: tuple[float, ...], order: int) -> None:
    rows = np.minimum(1 + np.arange(2560) // 20, 128)[::order]
    assert run(Phase(rows.size, rows, chances)).share >= BAR


@pytest.mark.parametrize("period", [30, 200])
def test_a_batch_that_jumps_is_followed(period: int) -> None:
    rows = np.where(np.arange(2400) // period % 2, 128, 1)
    assert run(Phase(rows.size, rows, FAIR)).share >= 1.0


@pytest.mark.parametrize(("depth", "drafts_count_before"), in_turn([0, 1, 2], [False, True]))
def test_a_choice_may_be_verified_any_number_of_steps_later(depth: int, drafts_count_before: bool) -> None:
    for rows, chances in ((1, POOR), (16, FAIR)):
        assert run(Phase(1200, rows, chances), depth=depth, drafts_count_before=drafts_count_before).share >= BAR


@pytest.mark.parametrize(("rows", "chances"), [(1, GOOD), (16, FAIR), (64, FAIR)])
def test_noisy_times_and_stalls_do_not_mislead_it(rows: int, chances: tuple[float, ...]) -> None:
    assert run(Phase(2000, rows, chances), noise=0.3, stalls=0.05).share >= BAR


def test_without_any_times_it_goes_by_the_table() -> None:
    assert run(Phase(1200, 16, FAIR), is_timed=False).share >= BAR


def test_seven_drafts_are_as_well() -> None:
    assert run(Phase(1200, 1, (0.9,) * 7)).share >= BAR
    assert run(Phase(1200, 32, (0.7,) * 7)).share >= BAR


# --- a wrong table ------------------------------------------------------------------------

WRONG = {
    "all too slow": (3.0,) * 6,
    "drafts too slow": (1.0, 3.0, 3.0, 3.0, 3.0, 3.0),
    "drafts too fast": (1.0, 0.3, 0.3, 0.3, 0.3, 0.3),
    "none too fast": (0.3, 1.0, 1.0, 1.0, 1.0, 1.0),
    "every other": (1.0, 2.0, 1.0, 2.0, 1.0, 2.0),
    "one too fast": (1.0, 1.0, 1.0, 0.3, 1.0, 1.0),
}


@pytest.mark.parametrize(("table", "work"), in_turn(WRONG, [(1, GOOD), (64, POOR)]))
def test_a_wrong_table_does_not_cost_for_ever(table: str, work: tuple[int, tuple[float, ...]]) -> None:
    (rows, chances), factors = work, WRONG[table]
    learning, after = Phase(1500, rows, chances), Phase(1000, rows, chances)
    assert run(learning, after, believed=wrong(factors)).shares[1] >= BAR


@pytest.mark.parametrize("factor", [0.1, 6.0])
@pytest.mark.parametrize(("rows", "chances"), [(1, GOOD), (16, FAIR)])
def test_drafts_that_take_less_or_more_than_measured_are_found_out(
    rows: int, chances: tuple[float, ...], factor: float
) -> None:
    """Where a step's time is told with that of the drafts behind it: no time is that of one number of drafts alone."""
    believed = msgspec.structs.replace(device(), draft=[seconds * factor for seconds in device().draft])
    learning, after = Phase(1500, rows, chances), Phase(1000, rows, chances)
    assert run(learning, after, believed=believed, depth=0, drafts_count_before=True).shares[1] >= BAR


def test_without_times_a_wrong_table_costs_for_ever() -> None:
    for rows, chances, factors in ((1, FAIR, "drafts too slow"), (64, POOR, "drafts too fast")):
        out = run(Phase(300, rows, chances), Phase(700, rows, chances), believed=wrong(WRONG[factors]), is_timed=False)
        assert out.shares[1] < 0.8


# --- changes and probes -------------------------------------------------------------------


def test_changes_keep_their_distance() -> None:
    rows = np.where(np.arange(1500) // 7 % 2, 128, 1)
    out = run(Phase(rows.size, rows, GOOD), Phase(1500, 1, FAIR), noise=0.3)
    assert np.count_nonzero(np.diff(out.kept[:1500])) > 50  # from batch to batch
    for num_rows in (1, 128):
        changes = np.flatnonzero(np.diff(np.array(out.kept[:1500])[rows == num_rows]))
        assert changes.size and (np.diff(changes) >= DWELL_STEPS).all()


def test_what_one_batch_keeps_holds_no_other_back() -> None:
    """Where another number gains too little for a change, but is better."""
    two = step_costs(
        rows=np.array([1, 8]),
        tiers=np.array([0, 1]),
        verify=np.array([[1.0, 1.6], [1.0, 1.6]]),
        follow=np.zeros((2, 2)),
        draft=np.zeros(2),
    )
    controller, one, many = DraftController(two), np.array([1], np.int32), np.ones(8, np.int32)
    controller._acceptance._kinds[0].after[0] = 0.7
    assert controller.choose(one, 0.0) == controller.num_draft == 1
    controller._acceptance._kinds[0].after[0] = 0.58
    for _ in range(DWELL_STEPS):
        controller.choose(one, 0.0)
        assert controller.num_draft == 1
        controller.choose(many, 0.0)
        assert controller.num_draft == 0


def test_a_small_gain_changes_nothing_soon_and_something_late() -> None:
    controller = DraftController(plain(1.0, 1.6))
    allowed, one = np.array([1], np.int32), np.array([1], np.int32)
    for _ in range(100):  # accepted seven times in ten: 1.7 tokens in 1.6 s, 6 % more
        controller.record(one, one + 1, 1, 0.0, None)
    controller._acceptance._kinds[0].after[0] = 0.7
    controller._age[0] = 0
    steps = [controller.choose(allowed, 0.0) and controller.num_draft for _ in range(40)]
    assert steps.index(1) == DWELL_STEPS - 1
    controller._acceptance._kinds[0].after[0] = 0.55  # 1.55 tokens: with no drafts 3 % more
    kept = []
    for _ in range(400):
        controller.choose(allowed, 0.0)
        kept.append(controller.num_draft)
    assert 100 < kept.index(0) < 250


@pytest.mark.parametrize(("rows", "chances"), [(32, NEVER), (128, POOR)])
def test_probes_where_no_drafts_are_best_cost_what_they_may(rows: int, chances: tuple[float, ...]) -> None:
    out = run(Phase(500, rows, chances), Phase(2000, rows, chances))
    assert out.kept[-1] == 0
    assert np.count_nonzero(out.chosen[500:]) > 5
    assert out.shares[1] >= 0.985


def test_tiers_that_are_as_good_are_probed_now_and_then() -> None:
    controller = DraftController(plain(1.0, 1.0 + PRIOR))
    chosen = [controller.choose(np.array([1], np.int32), 0.0) for _ in range(1000)]
    assert 90 <= sum(chosen) <= 101


def test_a_probe_that_goes_well_is_followed_by_others() -> None:
    """What was gained over what was expected pays for them at once; a probe that fails is followed by none."""
    one = np.array([1], np.int32)
    for count in (1, 2):
        controller = DraftController(plain(1.0, 1.2))
        for _ in range(200):
            controller.record(one, one, 1, 0.0, None)  # none was ever accepted: a probe costs a fifth of a step
        controller._credit[:] = 0.0
        steps = 0
        while not controller.choose(one, 0.0):
            steps += 1
        assert 15 <= steps <= 25
        controller.record(one, np.array([count], np.int32), 1, 0.0, None)
        more = [controller.choose(one, 0.0) for _ in range(8)]
        assert sum(more) == 0 if count == 1 else sum(more) >= 3


def test_a_stall_in_a_probe_does_not_end_probes() -> None:
    controller = DraftController(device())
    for _ in range(100):
        controller.record(np.array([1], np.int32), np.array([1], np.int32), 1, CONTEXT, 100.0)
    assert controller._credit.min() >= -adaptive.MAX_CREDIT


def test_what_was_saved_for_probes_is_bounded() -> None:
    controller = DraftController(device())
    for _ in range(100):
        controller.record(np.full(4, K, np.int32), np.full(4, K + 1, np.int32), K, CONTEXT, 1e-4)
    assert controller._credit.max() <= adaptive.MAX_CREDIT


def test_no_number_is_above_what_a_request_allows() -> None:
    controller = DraftController(device())
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(3000):
        allowed = rng.integers(0, rng.integers(1, K + 3), int(rng.integers(0, 6))).astype(np.int32)
        num_draft = controller.choose(allowed, CONTEXT)
        assert 0 <= num_draft <= min(allowed.max(initial=0), K)
        seen.add(num_draft)
        verified = np.minimum(allowed, num_draft)
        controller.record(verified, verified + 1, num_draft, CONTEXT, None)
    assert seen == set(range(K + 1))


def test_only_tiers_are_chosen() -> None:
    """The best of them where all have room for it, and the best that fits where the kept one does not."""
    every = device(7)
    tiers = [0, 1, 3, 7]
    verify, follow = np.array(every.verify)[:, tiers], np.array(every.follow)[:, tiers]
    costs = step_costs(every.rows, tiers, verify, follow, every.draft, verify_token=1e-8, draft_token=5e-10)
    controller = DraftController(costs)
    seen: dict[int, list[int]] = {2: [], 7: []}
    for step in range(2000):
        most = 2 if step % 4 == 3 else 7
        seen[most].append(controller.choose(np.array([most], np.int32), CONTEXT))
        verified = np.array([min(seen[most][-1], most)], np.int32)
        num_draft = int(verified[0])
        controller.record(verified, verified + 1, num_draft, CONTEXT, float(every.seconds(0, CONTEXT)[num_draft]))
    assert set(seen[2]) == {0, 1}
    assert set(seen[7]) <= {0, 1, 3, 7}
    assert seen[2][-50:].count(1) > 45
    assert seen[7][-50:].count(7) > 45


def test_rows_that_may_have_no_drafts_weigh_against_them() -> None:
    """Verifying is paid for by all rows of a batch that is full, and gains for some."""
    few, all_rows = np.array([1, 1, 0, 0, 0, 0, 0, 0], np.int32), np.ones(8, np.int32)
    for allowed, best in ((all_rows, 1), (few, 0)):
        controller = DraftController(plain(1.0, 1.5))
        for _ in range(200):
            verified = np.minimum(allowed, controller.choose(allowed, 0.0))
            controller.record(verified, verified + 1, 1, 0.0, None)
        assert controller.num_draft == best


def test_steps_of_nobody_and_of_rows_without_drafts_are_taken_in() -> None:
    controller = DraftController(device())
    nothing = np.zeros(0, np.int32)
    assert controller.choose(nothing, 0.0) == 0
    controller.record(nothing, nothing, 0, 0.0, 1.0)
    controller.record(np.zeros(2, np.int32), np.ones(2, np.int32), 0, 10.0, 5e-3)
    assert controller.choose(np.zeros(3, np.int32), 10.0) == 0


# --- what it knows ------------------------------------------------------------------------


def test_chances_are_those_of_the_drafts() -> None:
    rng = np.random.default_rng(3)
    acceptance = Acceptance(K)
    means = []
    for step in range(2000):
        num_draft = rng.integers(0, K + 1, 4).astype(np.int32)
        right = np.cumprod(rng.random((4, K)) < FAIR, 1)
        acceptance.add(num_draft, (1 + np.minimum(right.sum(1), num_draft)).astype(np.int32))
        if step > 200:
            means.append(acceptance.chances.copy())
    np.testing.assert_allclose(np.mean(means, 0), np.cumprod(FAIR), atol=0.03)


def test_a_place_that_nobody_reached_has_the_chance_of_the_one_before() -> None:
    acceptance = Acceptance(3)
    two, four = np.full(8, 1, np.int32), np.array([2] * 6 + [1] * 2, np.int32)
    for _ in range(200):
        acceptance.add(two, four)  # six of eight
    np.testing.assert_allclose(acceptance.chances, [0.75, 0.75**2, 0.75**3], rtol=0.01)


def test_a_place_that_nobody_reaches_any_more_keeps_what_it_had_after_the_one_before() -> None:
    acceptance = Acceptance(2)
    for _ in range(200):
        acceptance.add(np.full(4, 2, np.int32), np.array([3, 2, 2, 2], np.int32))  # the second: one of four
    np.testing.assert_allclose(acceptance.chances, [1.0, 0.25], atol=0.02)
    for _ in range(200):
        acceptance.add(np.full(4, 1, np.int32), np.array([2, 2, 1, 1], np.int32))
    np.testing.assert_allclose(acceptance.chances, [0.5, 0.125], atol=0.02)


def test_the_past_is_forgotten() -> None:
    for rows, steps in ((1, 250), (128, 30)):
        acceptance = Acceptance(1)
        drafts = np.ones(rows, np.int32)
        for _ in range(400):
            acceptance.add(drafts, drafts + 1)
        assert acceptance.chances[0] > 0.98
        for _ in range(steps):
            acceptance.add(drafts, drafts)
        assert acceptance.chances[0] < 0.06


def test_a_batch_costs_what_the_next_larger_one_that_was_measured_does() -> None:
    costs = device()
    assert [costs.bucket(rows) for rows in (1, 2, 3, 5, 33, 128, 500)] == [0, 1, 2, 3, 6, 9, 9]


def test_making_drafts_costs_a_forward_behind_the_step_and_one_for_each_further_draft() -> None:
    tiers, verify, follow = np.array([0, 1, 3]), np.array([[10.0, 11.0, 12.0]]), np.array([[1.0, 1.5, 2.0]])
    costs = step_costs(np.array([4]), tiers, verify, follow, np.array([0.5]), verify_token=1e-2, draft_token=1e-3)
    expected = [10 + 1 + 1 + 0.1, 11 + 1 + 1.5 + 0.1, 12 + 1 + 2 + 2 * 0.5 + 3 * 0.1]
    np.testing.assert_allclose(costs.seconds(0, 100.0), expected)
    assert [costs.tier(num_draft) for num_draft in (0, 1, 2, 3)] == [0, 1, 2, 2]


def test_times_are_refined_by_what_steps_took() -> None:
    times = Times(device())
    before = times.expect(16, CONTEXT)
    rng = np.random.default_rng(0)
    for _ in range(300):
        times.add(16, CONTEXT, 2, 3 * before[2] * np.exp(0.1 * rng.standard_normal()))
    after = times.expect(16, CONTEXT)
    np.testing.assert_allclose(after / before, 3.0, rtol=0.1)  # the others are taken to be as wrong
    times.add(16, CONTEXT, 3, before[3])
    assert times.expect(16, CONTEXT)[3] < 0.7 * after[3]
    np.testing.assert_allclose(times.expect(16, CONTEXT)[2], after[2])
    np.testing.assert_allclose(times.expect(1, CONTEXT), Times(device()).expect(1, CONTEXT))


def test_a_stall_is_not_believed() -> None:
    times = Times(device())
    before = times.expect(16, CONTEXT)[2]
    for _ in range(50):
        times.add(16, CONTEXT, 2, before)
    times.add(16, CONTEXT, 2, 1000 * before)
    assert times.expect(16, CONTEXT)[2] < 1.02 * before
    times.add(16, CONTEXT, 2, 0.0)  # nor a clock that stood still
    assert times.expect(16, CONTEXT)[2] > 0.98 * before


def test_a_step_is_told_from_the_drafts_made_behind_it() -> None:
    """Steps that verified one draft and then made five say of one draft what they say where one was made."""
    costs = device()
    whole, extend_s = costs.seconds(0, CONTEXT), costs.extend_s(0, CONTEXT)
    one = np.array([1], np.int32)
    for num_made in (0, 1, K):
        controller = DraftController(costs)
        for _ in range(200):
            controller.record(one, one, num_made, CONTEXT, float(whole[1] + extend_s[num_made]))
        np.testing.assert_allclose(controller._times.expect(1, CONTEXT), whole)
