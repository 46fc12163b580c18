"""The sweep of speculation: proposers by drafts, batches, temperatures and sources of prompts, in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import msgspec

from hiserve.bench.equality import Equality, EqualityChecker
from hiserve.bench.load import Begin
from hiserve.bench.options import SweepOptions
from hiserve.bench.spec_engine import BatchResult, SpecEngine, Tokens, check_source, prepare, read_prompts, run_batch
from hiserve.config.options import MAX_SPEC_STEPS, Options, flat
from hiserve.config.settings import TreeShape
from hiserve.core.request import SamplingParams
from hiserve.core.startup_measurements import StepCosts
from hiserve.core.step_memory import DEFAULT_PAGE_SIZE
from hiserve.core.usage import DraftUse
from hiserve.errors import ConfigError, EngineError

# Makes an engine of settings, in this process.
Open = Callable[[Mapping[str, Any]], AbstractContextManager[Any]]
TREES = "trees"  # steps: a choice for each step among chains and trees
SLACK = 2 * MAX_SPEC_STEPS + 4  # tokens of a request beyond its reply: drafts after its end, a step that measures


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One proposer with one number of drafts on one kind of batch."""

    proposer: str  # as ``--spec`` names it
    steps: str  # drafts of each step; ``auto`` chooses them
    batch: int
    temperature: float
    source: str  # where their prompts were: ``cold``, ``device``, ``host``
    plain: list[BatchResult]  # runs without speculation, in the order in which they were made
    spec: list[BatchResult]  # runs with it, each right after the plain one of its number
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
    step_s: float  # seconds of a step with speculation: verifying, then drafting
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
    if drafts.accepted or (not drafts.proposed and cases[0].steps in ("0", "auto", TREES)):
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


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a sweep.

    Attributes:
        costs: Of a cycle, by proposer; of those whose number of drafts was also chosen step by step.
    """

    config: Options  # the plain engine's, resolved
    cases: list[Case]  # in the order in which they were measured
    costs: dict[str, list[CycleCost]]
    is_partial: bool = False  # ctrl-C came before the last case


def sweep_engines(config: Options, sweep: SweepOptions, open_engine: Open, begin: Begin) -> Found:
    """Measures everything; two engines are open at a time. After Ctrl-C returns the cases that were measured.

    Raises HiserveError where the options, the data or an engine do not do, or nothing was accepted.
    """
    check_sweep(config, sweep)
    prompts = read_prompts(config, sweep)
    settings = engine_settings(config, sweep)
    proposers = sweep.proposers or (config.spec.spec,)
    cases: list[Case] = []
    costs: dict[str, list[CycleCost]] = {}
    advance = begin(len(proposers) * len(sweep.steps) * len(list(conditions(sweep))))
    is_partial = False
    with open_engine(settings | {"spec": "off"}) as plain:
        judge = EqualityChecker(plain)
        try:
            for proposer, steps in product(proposers, sweep.steps):
                with open_engine(settings | {"spec": proposer} | settings_of_drafts(steps)) as engine:
                    name = name_of(engine, proposer)
                    first = len(cases)
                    for case in _measured((plain, engine), judge, prompts, sweep, name, steps):
                        cases.append(case)
                        advance(f"{name} {steps}: {figures_of(case).speedup:.2f} x")
                    if engine.draft_costs is not None:
                        costs[name] = cycle_costs(engine.draft_costs)
                check_accepted(cases[first:])
        except KeyboardInterrupt:
            if not cases:
                raise
            is_partial = True
        return Found(config=plain.settings, cases=cases, costs=costs, is_partial=is_partial)


def check_sweep(config: Options, sweep: SweepOptions) -> None:
    """Refuses what cannot be swept. Raises ConfigError."""
    for steps in sweep.steps:
        if "x" in steps:
            TreeShape.read(steps)
        elif steps not in ("auto", TREES) and not (steps.isdecimal() and int(steps) <= MAX_SPEC_STEPS):
            raise ConfigError(
                f"--steps has {steps!r}. Use auto, trees, numbers from 0 to {MAX_SPEC_STEPS}, or a shape as of --spec-tree, such as 3x6:16.",
                param="steps",
            )
    if config.spec.spec_tree != "off":
        raise ConfigError("bench spec sets --spec-tree itself. Leave it out, and use --steps.", param="spec_tree")
    if config.spec.spec_steps != "auto":
        raise ConfigError("bench spec sets --spec-steps itself. Leave it out, and use --steps.", param="spec_steps")
    if config.spec.spec != "auto" and sweep.proposers:
        raise ConfigError("--spec and --proposers name the same thing. Leave one out.", param="proposers")
    if config.cache.disable_prefix_cache and set(sweep.sources) != {"cold"}:
        raise ConfigError("--sources need the prefix cache. Leave --disable-prefix-cache out.", param="sources")


def settings_of_drafts(steps: str) -> dict[str, Any]:
    """Returns the settings of a number of drafts, of ``auto``, of a tree, or of a choice among chains and trees."""
    if "x" in steps or steps == TREES:
        return {"spec_tree": "auto" if steps == TREES else steps, "spec_steps": "auto"}
    return {"spec_steps": "auto" if steps == "auto" else int(steps)}


def engine_settings(config: Options, sweep: SweepOptions) -> dict[str, Any]:
    """Returns the settings of all engines; sizes that the user left open are those that the sweep needs."""
    settings, rows = flat(config), max(sweep.batches)
    length = sweep.prompt_length + sweep.output_length + SLACK
    page_size = DEFAULT_PAGE_SIZE if config.cache.page_size == "auto" else config.cache.page_size
    pages = rows * -(-length // page_size) + 1  # enough for pages of more tokens too
    wanted = {"max_running_requests": rows, "max_model_len": length, "kv_pages": pages}
    return settings | {name: value for name, value in wanted.items() if settings[name] == "auto"}


def conditions(sweep: SweepOptions) -> Iterator[tuple[int, float, str]]:
    """Yields batch, temperature and source of every case of a proposer with a number of drafts."""
    return product(sweep.batches, sweep.temperatures, sweep.sources)


def name_of(engine: SpecEngine, proposer: str) -> str:
    """Returns the name of a proposer; for ``auto``, of the chosen one. Raises ConfigError."""
    name = engine.settings.spec.spec if proposer == "auto" else proposer
    if name == "off":
        raise ConfigError(
            "no draft head came with the model. Name who proposes: --proposers ngram, eagle3:PATH, mtp:PATH or draft:PATH.",
            param="proposers",
        )
    return name


def _measured(
    engines: tuple[SpecEngine, SpecEngine],
    judge: EqualityChecker,
    prompts: list[Tokens],
    sweep: SweepOptions,
    proposer: str,
    steps: str,
) -> Iterator[Case]:
    """Yields all cases of one engine, each run right after a plain one; both run once before that counts."""
    for each in engines:
        run_batch(each, prompts, sampling(len(prompts), sweep.temperatures[0], sweep.output_length))
    for batch, temperature, source in conditions(sweep):
        params = sampling(batch, temperature, sweep.output_length)
        runs, equality = interleave(engines, judge, prompts[:batch], params, source, sweep.repeats)
        ours, theirs = ([pair[side] for pair in runs] for side in (0, 1))
        yield Case(
            proposer=proposer,
            steps=steps,
            batch=batch,
            temperature=temperature,
            source=source,
            plain=ours,
            spec=theirs,
            equality=equality,
        )


def sampling(batch: int, temperature: float, max_tokens: int) -> list[SamplingParams]:
    """Returns the parameters of a batch: whole replies, each with noise of its own."""
    return [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed)
        for seed in range(batch)
    ]


def interleave(
    engines: tuple[SpecEngine, SpecEngine],
    judge: EqualityChecker,
    prompts: list[Tokens],
    params: list[SamplingParams],
    source: str,
    repeats: int,
) -> tuple[list[tuple[BatchResult, BatchResult]], Equality]:
    """Runs a batch on the plain engine and on the other in turn, ``repeats`` times; returns both runs and the worst verdict.

    Raises ConfigError.
    """
    runs: list[tuple[BatchResult, BatchResult]] = []
    replies: list[tuple[list[Tokens], list[Tokens]]] = []
    for _ in range(repeats):
        (plain, expected), (spec, drafted) = (_found_at(source, engine, prompts, params) for engine in engines)
        runs.append((plain, spec))
        replies.append((expected, drafted))
    check_source([batch for both in runs for batch in both], source)
    found = [judge.compare(prompts, *both, params[0].temperature) for both in replies]
    return runs, max(found, key=lambda each: (not each.is_kept, each.num_differing))


def _found_at(
    source: str, engine: SpecEngine, prompts: list[Tokens], params: list[SamplingParams]
) -> tuple[BatchResult, list[Tokens]]:
    prepare(engine, prompts, source)
    return run_batch(engine, prompts, params)
