"""What a case says: accept length, acceptance, speed-up and cost of a cycle, and where speculation stops paying."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from hiserve.bench.equality import Equality
from hiserve.bench.spec_engine import BatchResult
from hiserve.core.startup_measurements import StepCosts
from hiserve.core.usage import DraftUse
from hiserve.errors import EngineError


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One proposer with one number of drafts on one kind of batch."""

    proposer: str  # as ``--spec`` names it
    steps: str  # drafts of each step; ``auto`` chooses them
    batch: int
    temperature: float
    source: str  # where their prompts were: ``cold``, ``device``, ``host``
    plain: list[BatchResult]  # runs without speculation, in the order in which they were made
    spec: list[BatchResult]  # runs with it, each right behind the plain one of its number
    equality: Equality  # of the tokens of both

    @property
    def drafts(self) -> DraftUse:
        return sum((run.drafts for run in self.spec), DraftUse())


class SpecFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one case; medians over its runs."""

    accept_length: float  # tokens of a step that verified drafts
    acceptance: list[float]  # share of those steps whose first draft was accepted, whose second one, and so on
    tokens_per_s: float  # with speculation
    plain_tokens_per_s: float  # without
    speedup: float  # one over the other, run by run
    step_s: float  # seconds of a step with speculation: verifying, and drafting behind it
    plain_step_s: float  # without
    cycle_cost: float  # one over the other


def drafts_of(cases: Sequence[Case]) -> DraftUse:
    return sum((case.drafts for case in cases), DraftUse())


def acceptance(drafts: DraftUse) -> list[float]:
    """Returns the share of verifying steps that accepted the draft at each position."""
    steps = max(1, drafts.verify_steps)
    return [accepted / steps for accepted in drafts.accepted_per_position]


def figures_of(case: Case) -> SpecFigures:
    pairs = list(zip(case.spec, case.plain, strict=True))
    return SpecFigures(
        accept_length=case.drafts.accept_length,
        acceptance=acceptance(case.drafts),
        tokens_per_s=statistics.median(run.tokens_per_s for run in case.spec),
        plain_tokens_per_s=statistics.median(run.tokens_per_s for run in case.plain),
        speedup=statistics.median(spec.tokens_per_s / plain.tokens_per_s for spec, plain in pairs),
        step_s=statistics.median(run.step_s for run in case.spec),
        plain_step_s=statistics.median(run.step_s for run in case.plain),
        cycle_cost=statistics.median(spec.step_s / plain.step_s for spec, plain in pairs),
    )


def crossover(speedups: dict[int, float]) -> int | None:
    """Returns the smallest batch from which on speculation loses; None where the largest one still gains."""
    losing = None
    for batch in sorted(speedups, reverse=True):
        if speedups[batch] >= 1:
            break
        losing = batch
    return losing


def check_accepted(cases: Sequence[Case]) -> None:
    """Refuses cases of one proposer with one number of drafts that accepted none of them: they would prove nothing.

    Raises EngineError.
    """
    drafts = drafts_of(cases)
    if drafts.accepted or (not drafts.proposed and cases[0].steps in ("0", "auto")):
        return
    raise EngineError(
        f"{cases[0].proposer} with {cases[0].steps} drafts had {drafts.proposed} verified, and none was accepted: equality "
        "with plain decoding proves nothing, and no figure means anything. Use a head that was trained for this model, text "
        "that it was trained on (--dataset), or longer replies (--output-length)."
    )


class CycleCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a plain step, and of verifying, extending (the first draft) and drafting (all further ones), as measured at start."""

    batch: int
    steps: int
    plain_s: float
    verify_s: float
    extend_s: float
    draft_s: float

    @property
    def cost(self) -> float:
        """Of the cycle, in steps of plain decoding."""
        return (self.verify_s + self.extend_s + self.draft_s) / self.plain_s


def cycle_costs(costs: StepCosts) -> list[CycleCost]:
    """Returns the costs of all batches and numbers of drafts that were measured."""
    found = []
    for bucket, batch in enumerate(costs.rows):
        for tier, steps in enumerate(costs.tiers):
            found.append(
                CycleCost(
                    batch=batch,
                    steps=steps,
                    plain_s=costs.verify[bucket][0],
                    verify_s=costs.verify[bucket][tier],
                    extend_s=costs.follow[bucket][tier],
                    draft_s=float(costs.extend_s(bucket, 0.0)[tier]),
                )
            )
    return found
