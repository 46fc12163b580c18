"""The sweep of speculation: proposers by drafts, batches, temperatures and sources of prompts, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import msgspec

from hiserve.bench.equality import Equality, EqualityChecker
from hiserve.bench.load import Begin
from hiserve.bench.options import SweepOptions
from hiserve.bench.spec_engine import BatchResult, SpecEngine, Tokens, check_source, prepare, read_prompts, run_batch
from hiserve.bench.spec_summary import Case, CycleCost, check_accepted, cycle_costs, figures_of
from hiserve.config.options import MAX_SPEC_STEPS, Options, flat
from hiserve.core.request import SamplingParams
from hiserve.errors import ConfigError

# Makes an engine of settings, in this process.
Open = Callable[[Mapping[str, Any]], AbstractContextManager[Any]]
SLACK = 2 * MAX_SPEC_STEPS + 4  # tokens of a request beyond its reply: drafts after its end, a step that measures


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep found.

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
                number = "auto" if steps == "auto" else int(steps)
                with open_engine(settings | {"spec": proposer, "spec_steps": number}) as engine:
                    name = _name(engine, proposer)
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
        if steps != "auto" and not (steps.isdecimal() and int(steps) <= MAX_SPEC_STEPS):
            raise ConfigError(f"--steps has {steps!r}. Use auto, or numbers from 0 to {MAX_SPEC_STEPS}.", param="steps")
    if config.spec.spec_steps != "auto":
        raise ConfigError("bench spec sets --spec-steps itself. Leave it out, and use --steps.", param="spec_steps")
    if config.spec.spec != "auto" and sweep.proposers:
        raise ConfigError("--spec and --proposers name the same thing. Leave one out.", param="proposers")
    if config.cache.disable_prefix_cache and set(sweep.sources) != {"cold"}:
        raise ConfigError("--sources need the prefix cache. Leave --disable-prefix-cache out.", param="sources")


def engine_settings(config: Options, sweep: SweepOptions) -> dict[str, Any]:
    """Returns what all engines are made with: as large as the sweep needs, where the user did not say."""
    settings, rows = flat(config), max(sweep.batches)
    length = sweep.prompt_length + sweep.output_length + SLACK
    pages = rows * -(-length // config.cache.page_size) + 1
    wanted = {"max_running_requests": rows, "max_model_len": length, "kv_pages": pages}
    return settings | {name: value for name, value in wanted.items() if settings[name] == "auto"}


def conditions(sweep: SweepOptions) -> Iterator[tuple[int, float, str]]:
    """Yields batch, temperature and source of every case of a proposer with a number of drafts."""
    return product(sweep.batches, sweep.temperatures, sweep.sources)


def _name(engine: SpecEngine, proposer: str) -> str:
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
