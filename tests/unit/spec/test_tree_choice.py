"""A choice among chains and trees step by step: a simulated device, against the best fixed number in hindsight."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from hiserve.core.startup_measurements import StepCosts
from hiserve.spec.acceptance import Acceptance, TierAcceptance
from hiserve.spec.adaptive import DraftController
from tests.helpers.step_costs import step_costs

TIERS, DEPTHS = (0, 1, 2, 3, 5, 7, 15), (4, 6)
ROWS = np.array([1, 8, 64])
CONTEXT, BAR = 1000.0, 0.97


def device() -> StepCosts:
    """A step takes 5 ms until 64 tokens fill the device; then every token costs."""
    tokens = ROWS[:, None] * (1.0 + np.array(TIERS))
    verify = 5e-3 + 1e-5 * tokens + 6e-5 * np.maximum(tokens - 64, 0)
    grow = 4e-4 * (np.array(DEPTHS) - 1.0) + 1e-6 * ROWS[:, None]
    further = 3e-4 + 1e-6 * ROWS
    others = {"verify_token": 1e-8, "draft_token": 5e-10, "tree_depths": list(DEPTHS), "grow": grow.tolist()}
    return step_costs(ROWS, TIERS, verify, 4e-4 + 2e-6 * tokens, further, **others)


@dataclass
class Phase:
    """Steps of so many rows; chances that a draft, or some candidate of a tree's level, is accepted after those before it."""

    steps: int
    rows: int
    chain: float
    trees: tuple[float, float]

    def tokens(self) -> np.ndarray:
        """Returns the expected tokens of a row with each tier."""
        chances = [self.chain] * (len(TIERS) - 2) + list(self.trees)
        depths = [*TIERS[:-2], *DEPTHS]
        return np.array([sum(p**d for d in range(1 + depth)) for p, depth in zip(chances, depths, strict=True)])


def run(*phases: Phase, believed: StepCosts | None = None, seed: int = 5) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Returns for each phase the tokens per second as shares of the best fixed tier's and of no drafts', and the choices."""
    costs, rng = device(), np.random.default_rng(seed)
    controller = DraftController(believed or costs)
    shares, over_plain, chosen, num_draft = [], [], [], 0
    for phase in phases:
        seconds, expected, whole = 0.0, 0.0, costs.seconds(costs.bucket(phase.rows), phase.rows * CONTEXT)
        for _ in range(phase.steps):
            tier = TIERS.index(num_draft)
            seconds, expected = seconds + whole[tier], expected + phase.tokens()[tier]
            is_tree = tier >= len(TIERS) - 2
            depth = DEPTHS[tier - len(TIERS) + 2] if is_tree else num_draft
            chance = phase.trees[tier - len(TIERS) + 2] if is_tree else phase.chain
            accepted = np.cumprod(rng.random((phase.rows, depth)) < chance, 1).sum(1)
            verified, counts = np.full(phase.rows, num_draft, np.int32), (1 + accepted).astype(np.int32)
            controller.record(verified, counts, num_draft, CONTEXT, float(whole[tier]))
            num_draft = controller.choose(np.full(phase.rows, 15, np.int32), CONTEXT)
            chosen.append(num_draft)
        rates = phase.tokens() / whole
        shares.append(expected / seconds / rates.max())
        over_plain.append(expected / seconds / rates[0])
    return np.array(shares), np.array(over_plain), chosen


PAYING, NEVER_PAYING, USELESS = (0.6, (0.78, 0.82)), (0.6, (0.6, 0.6)), (0.0, (0.0, 0.0))


@pytest.mark.parametrize(
    ("rows", "work", "best"),
    [(1, PAYING, (15,)), (8, PAYING, (7,)), (64, PAYING, (0,)), (8, NEVER_PAYING, (2, 3, 5)), (8, USELESS, (0, 1))],
    ids=str,
)
def test_each_work_is_done_as_fast_as_with_the_best_fixed_tier(
    rows: int, work: tuple[float, tuple[float, float]], best: tuple[int, ...]
) -> None:
    shares, over_plain, chosen = run(Phase(1500, rows, *work))
    assert shares[0] >= BAR and over_plain[0] >= BAR, (shares, over_plain)
    assert np.isin(chosen[500:], best).mean() > 0.7, Counter(chosen)


def test_trees_are_left_where_they_fail_and_found_again() -> None:
    shares, over_plain, _ = run(Phase(1500, 1, *PAYING), Phase(1500, 1, *USELESS), Phase(1500, 1, *PAYING))
    assert shares.min() >= 0.95 and over_plain.min() >= 0.95, (shares, over_plain)


def test_trees_that_cost_more_than_measured_are_found_out() -> None:
    costs = device()
    cheap = StepCosts(
        **{name: getattr(costs, name) for name in costs.__struct_fields__}
        | {"verify": [[*each[:-2], each[0], each[0]] for each in costs.verify], "grow": [[0.0, 0.0]] * len(ROWS)}
    )
    shares, _, _ = run(Phase(800, 64, *NEVER_PAYING), Phase(400, 64, *NEVER_PAYING), believed=cheap)
    assert shares[1] >= BAR, shares


def test_rows_with_few_drafts_get_chains_and_beside_others_count_as_chains() -> None:
    controller, acceptance = DraftController(device()), TierAcceptance(device())
    few = np.full(4, 6, np.int32)
    assert {controller.choose(few, CONTEXT) for _ in range(300)} <= {0, 1, 2, 3, 5}
    counts, beside = np.full(4, 4, np.int32), TierAcceptance(device())
    for _ in range(100):
        acceptance.add(6, np.full(4, 15, np.int32), counts)  # three levels of six
        beside.add(6, np.repeat([15, 5], 4).astype(np.int32), np.repeat([4, 1], 4).astype(np.int32))
    everywhere = np.array([15, 5, 2], np.int32)
    assert beside.tokens(everywhere).tolist() == acceptance.tokens(everywhere).tolist(), "parts of trees tell nothing"
    tokens = acceptance.tokens(np.array([15, 5], np.int32))
    alone = acceptance.tokens(np.array([15], np.int32)), acceptance.tokens(np.array([5], np.int32))
    np.testing.assert_allclose(tokens, alone[0] + alone[1])
    assert alone[0][-1] == pytest.approx(4.0, rel=0.05) and alone[1][-1] == alone[1][4]


def test_a_tree_is_expected_to_do_what_is_known_of_chains_and_of_smaller_trees() -> None:
    """Until it was verified; and afterwards no worse than chains."""
    acceptance, all_rows = TierAcceptance(device()), np.full(8, 15, np.int32)

    def tokens() -> list[float]:
        found: list[float] = (acceptance.tokens(all_rows) / all_rows.size).tolist()
        return found

    def add(tier: int, counts: int) -> None:
        """Until only the last steps count."""
        for _ in range(300):
            acceptance.add(tier, np.full(8, TIERS[tier], np.int32), np.array([counts] * 4 + [1] * 4, np.int32))

    add(4, 6)  # the first draft of a chain: one of two, and all that follow
    assert tokens()[1] == pytest.approx(1.5, abs=0.01)
    lifted = 1 - 0.5**1.2
    assert tokens()[5:] == pytest.approx([1 + 4 * lifted, 1 + 6 * lifted], rel=0.02)
    add(5, 3)  # two levels of the smaller tree
    assert tokens()[5:] == pytest.approx([2.0, 2.0], abs=0.1)
    assert tokens()[4] == pytest.approx(2.0, abs=0.05), "a chain is accepted no further than a tree"
    add(4, 6)
    assert tokens()[4:] == pytest.approx([3.5, 3.0, 4.0], rel=0.03), "a tree is accepted as far as a chain"


def test_nothing_was_seen_of_other_kinds_where_nothing_was_verified() -> None:
    chains = Acceptance(2)
    chains.add(np.zeros(4, np.int32), np.ones(4, np.int32))
    assert chains.chances.tolist() == pytest.approx([0.6, 0.36])
    assert Acceptance(3, chains).chances.tolist() == pytest.approx([0.6, 0.36, 0.216])
