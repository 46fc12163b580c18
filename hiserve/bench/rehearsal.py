"""Speculation by concurrency and acceptance: rehearsed drafts, a fixed number of them or chosen step by step, against none."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape

from hiserve.bench.load import Begin
from hiserve.bench.options import RehearsalOptions, SweepOptions
from hiserve.bench.plot import COLOURS, GREY, Plotter
from hiserve.bench.report import BAD, GOOD, columns
from hiserve.bench.spec_engine import BatchResult, SpecEngine, Tokens, prepare, run_batch
from hiserve.bench.spec_run import TREES, Open, check_sweep, engine_settings, name_of, sampling
from hiserve.config.options import Options
from hiserve.core.machine import probe
from hiserve.core.usage import COLD, DraftUse
from hiserve.errors import ConfigError
from hiserve.models.builtin_shapes import read_model

AUTO = "auto"
BAR, FAST_BAR = 0.97, 1.3  # of ``auto`` over no drafts: everywhere, and alone with many accepted
FAST_ACCEPTANCE = 0.7
CONCURRENCIES = {"cuda": (1, 4, 8, 16, 32), "cpu": (1, 4)}
SEED = 7  # of the prompts
_UNUSED = ("batches", "temperatures", "sources", "dataset", "path")  # options of other sweeps
EXPLAINED = (
    "Tokens per second over those without drafts. A draft is right with the probability asked for, and costs the time of the "
    "head; accepted: those that were, of a fixed number, while all before them were."
)


class RehearsedEngine(SpecEngine, Protocol):
    """The offline API, in process, with a rehearsed proposer."""

    def rehearse(self, texts: Mapping[int, Sequence[int]], acceptance: float) -> None:
        """Sets the drafts of requests, by seed."""


class RehearsedCase(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts of one kind at one acceptance, on one number of requests at once."""

    steps: str  # drafts of each step; ``auto`` chooses them
    acceptance: float  # the probability that a draft is right
    concurrency: int
    plain: list[BatchResult]  # runs without drafts, in the order in which they were made
    spec: list[BatchResult]  # runs with them, each right after the plain one of its number
    num_differing: int  # replies of the last run that are not those of plain decoding

    @property
    def drafts(self) -> DraftUse:
        return sum((run.drafts for run in self.spec), DraftUse())

    @property
    def speedup(self) -> float:
        """Tokens per second over those without drafts: the median of the runs' ratios."""
        pairs = zip(self.spec, self.plain, strict=True)
        return statistics.median(spec.tokens_per_s / plain.tokens_per_s for spec, plain in pairs)

    @property
    def accepted(self) -> float | None:
        """The share of accepted drafts among those whose predecessors were accepted; None where their number varies."""
        use = self.drafts
        if self.steps == AUTO or not use.verify_steps:
            return None
        num_refused = use.verify_steps - use.accepted_per_position[int(self.steps) - 1]
        return use.accepted / (use.accepted + num_refused)

    @property
    def bar(self) -> float | None:
        """The least speed-up asked for; None for a fixed number of drafts."""
        if self.steps != AUTO:
            return None
        return FAST_BAR if self.concurrency == 1 and self.acceptance >= FAST_ACCEPTANCE else BAR


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a sweep."""

    config: Options  # of the engine without drafts, resolved
    proposer: str  # whose cost is paid
    cases: list[RehearsedCase]  # in the order in which they were measured
    is_partial: bool = False  # ctrl-C came before the last case

    @property
    def is_same(self) -> bool:
        """Whether no reply differs that may not: the rounding of small types depends on the shape of a step."""
        return self.config.model.dtype in ("bfloat16", "float16") or not any(each.num_differing for each in self.cases)


def rehearse_engines(
    config: Options,
    sweep: SweepOptions,
    rehearsal: RehearsalOptions,
    open_plain: Open,
    open_rehearsed: Open,
    begin: Begin,
) -> Rehearsed:
    """Measures everything; two engines are open at a time. After Ctrl-C returns the cases that were measured.

    Raises HiserveError where the options or an engine do not do.
    """
    sweep = fitted(config, sweep, rehearsal)
    steps = [each for each in sweep.steps if each != "0"]
    cases: list[RehearsedCase] = []
    name, is_partial = sweep.proposers[0], False
    advance = begin(len(steps) * len(sweep.batches) * len(rehearsal.acceptances))
    prompts = random_tokens(config, sweep)
    settings = engine_settings(config, sweep)
    with open_plain(settings | {"spec": "off"}) as plain:
        try:
            for number in steps:
                how = {"spec": sweep.proposers[0], "spec_steps": number if number == AUTO else int(number)}
                with open_rehearsed(settings | how) as engine:
                    name = name_of(engine, sweep.proposers[0])
                    for concurrency in sweep.batches:
                        pair = RehearsedPair(plain, engine, prompts[:concurrency], sweep)
                        for acceptance in rehearsal.acceptances:
                            case = pair.measure(number, acceptance)
                            cases.append(case)
                            progress = f"{number} drafts, {concurrency} at once, {acceptance:g} right"
                            advance(f"{progress}: {case.speedup:.2f} x")
        except KeyboardInterrupt:
            if not cases:
                raise
            is_partial = True
        return Rehearsed(config=plain.settings, proposer=name, cases=cases, is_partial=is_partial)


def fitted(config: Options, sweep: SweepOptions, rehearsal: RehearsalOptions) -> SweepOptions:
    """Returns the options with numbers of requests that fit the device, and one proposer. Raises ConfigError."""
    unused = {name for name in _UNUSED if getattr(sweep, name) != getattr(SweepOptions(), name)}
    if unused:
        named = ", ".join("--" + name for name in sorted(unused))
        raise ConfigError(
            f"--sweep has greedy requests of random tokens, --concurrency at once, and takes no {named}. Leave them out.",
            param=min(unused),
        )
    check_sweep(config, sweep)
    if len(sweep.proposers) > 1:
        raise ConfigError("--sweep measures one proposer. Name one, and run it again for another.", param="proposers")
    if trees := [each for each in sweep.steps if "x" in each or each == TREES]:
        raise ConfigError(f"--steps has {trees[0]!r}, but drafts are rehearsed as chains. Leave it out.", param="steps")
    if not any(each != "0" for each in sweep.steps):
        raise ConfigError(
            "--sweep compares drafts with none, and --steps has none. Add auto or a number.", param="steps"
        )
    has_device = config.model.device != "cpu" and bool(probe().cuda_memory_bytes)
    concurrency = rehearsal.concurrency or CONCURRENCIES["cuda" if has_device else "cpu"]
    proposers = sweep.proposers or (config.spec.spec,)
    return msgspec.structs.replace(sweep, batches=concurrency, proposers=proposers)


def random_tokens(config: Options, sweep: SweepOptions) -> list[Tokens]:
    """Returns prompts of random tokens: what is rehearsed is accepted whatever they say."""
    vocab_size = read_model(config.model)[1].vocab_size
    size = (max(sweep.batches), sweep.prompt_length)
    prompts: list[Tokens] = np.random.default_rng(SEED).integers(vocab_size, size=size).tolist()
    return prompts


class RehearsedPair:
    """An engine without drafts and one with rehearsed ones, and the same requests for both.

    The recording is what the second engine says with all drafts right: rounding may make it another reply than that
    of the first, after which nothing would be accepted. Prompts are found on the device where there is a prefix cache: all
    requests begin in one step, whatever becomes of drafts, so that steps have the shapes of the recording.
    """

    def __init__(self, plain: SpecEngine, engine: RehearsedEngine, prompts: list[Tokens], sweep: SweepOptions) -> None:
        self._plain = plain
        self._engine = engine
        self._prompts = prompts
        self._params = sampling(len(prompts), 0.0, sweep.output_length)
        self._repeats = sweep.repeats
        _, self._replies = self._run(plain)
        self._rehearse(1.0)
        _, self._replies = self._run(engine)

    def measure(self, steps: str, acceptance: float) -> RehearsedCase:
        """Runs both in turn, after a run with drafts that does not count: their number is chosen by what was accepted."""
        self._rehearse(acceptance)
        self._run(self._engine)
        runs: list[tuple[BatchResult, BatchResult]] = []
        expected, replies = list[Tokens](), list[Tokens]()
        for _ in range(self._repeats):
            without, expected = self._run(self._plain)
            with_drafts, replies = self._run(self._engine)
            runs.append((without, with_drafts))
        return RehearsedCase(
            steps=steps,
            acceptance=acceptance,
            concurrency=len(self._prompts),
            plain=[without for without, _ in runs],
            spec=[with_drafts for _, with_drafts in runs],
            num_differing=sum(ours != theirs for ours, theirs in zip(expected, replies, strict=True)),
        )

    def _run(self, engine: SpecEngine) -> tuple[BatchResult, list[Tokens]]:
        prepare(engine, self._prompts, COLD if engine.settings.cache.disable_prefix_cache else "device")
        return run_batch(engine, self._prompts, self._params)

    def _rehearse(self, acceptance: float) -> None:
        pairs = enumerate(zip(self._prompts, self._replies, strict=True))
        self._engine.rehearse({seed: prompt + reply for seed, (prompt, reply) in pairs}, acceptance)


def figures_of(case: RehearsedCase) -> dict[str, Any]:
    """Returns the figures of a case, for its record."""
    return {
        "speedup": case.speedup,
        "tokens_per_s": statistics.median(run.tokens_per_s for run in case.spec),
        "plain_tokens_per_s": statistics.median(run.tokens_per_s for run in case.plain),
        "accepted": case.accepted,
        "accept_length": case.drafts.accept_length,
        "bar": case.bar,
    }


def show_rehearsed(console: Console, found: Rehearsed) -> None:
    """Shows the gains by acceptance and concurrency, whether they reach their bars, and whether tokens differ."""
    cases, at = found.cases, concurrencies(found.cases)
    table = columns(
        f"Drafts at the cost of {found.proposer}",
        "right",
        "drafts",
        "accepted",
        *(f"{number} at once" for number in at),
    )
    table.add_row("tokens/s", "off", "", *(f"{_plain_rate(cases, number):,.0f}" for number in at))
    table.add_section()
    for acceptance in acceptances(cases):
        for steps in dict.fromkeys(case.steps for case in cases):
            own = {case.concurrency: case for case in cases if (case.steps, case.acceptance) == (steps, acceptance)}
            shares = [case.accepted for case in own.values() if case.accepted is not None]
            accepted = f"{statistics.fmean(shares):.2f}" if shares else "-"
            cells = (_cell(own[number]) if number in own else "" for number in at)
            if own:
                table.add_row(f"{acceptance:g}", steps, accepted, *cells)
        table.add_section()
    console.print(table)
    console.print(f"[dim]{EXPLAINED}[/dim]")
    barred = [case for case in cases if case.bar is not None]
    for bar in sorted({case.bar for case in barred if case.bar is not None}):
        own_bar = [case for case in barred if case.bar == bar]
        worst = min(own_bar, key=lambda case: case.speedup)
        is_met, where = worst.speedup >= bar, f"{worst.concurrency} at once, {worst.acceptance:g} right"
        text = f"auto against off, at least {bar:g}: {sum(case.speedup >= bar for case in own_bar)} of {len(own_bar)}"
        console.print(f"[{GOOD if is_met else BAD}]{text}; the least is {worst.speedup:.2f}, {where}[/]")
    _show_differences(console, found)


def concurrencies(cases: Sequence[RehearsedCase]) -> list[int]:
    return sorted({case.concurrency for case in cases})


def acceptances(cases: Sequence[RehearsedCase]) -> list[float]:
    return sorted({case.acceptance for case in cases})


def _show_differences(console: Console, found: Rehearsed) -> None:
    num_replies, dtype = sum(case.concurrency for case in found.cases), found.config.model.dtype
    num_differing = sum(case.num_differing for case in found.cases)
    if not num_differing:
        console.print(f"[{GOOD}]tokens as without drafts: all {num_replies} replies[/]")
        return
    text = f"{num_differing} of {num_replies} replies are others than without drafts"
    if found.is_same:
        console.print(f"{text}, as rounding in {escape(dtype)} allows; bench spec without --sweep judges them")
    else:
        console.print(f"[{BAD}]{text}, and {escape(dtype)} allows none[/]")


def _plain_rate(cases: Sequence[RehearsedCase], concurrency: int) -> float:
    runs = [run.tokens_per_s for case in cases if case.concurrency == concurrency for run in case.plain]
    return statistics.median(runs)


def _cell(case: RehearsedCase) -> str:
    text = f"{case.speedup:.2f}"
    return text if case.bar is None else f"[{GOOD if case.speedup >= case.bar else BAD}]{text}[/]"


def draw_rehearsed(plotter: Plotter, title: str, found: Rehearsed) -> None:
    """Draws gains, and tokens per second, by concurrency."""
    plotter.draw(title, partial(_gains, cases=found.cases), partial(_rates, cases=found.cases))


def _gains(panel: Any, cases: Sequence[RehearsedCase]) -> None:
    """Draws the gain by concurrency: a colour for each acceptance, solid where drafts are chosen."""
    panel.set(title="Against no drafts", xlabel="requests at once", ylabel="times the tokens per second")
    for i, acceptance in enumerate(acceptances(cases)):
        for j, steps in enumerate(sorted({case.steps for case in cases}, key=lambda each: (each != AUTO, each))):
            chosen = [case for case in cases if (case.acceptance, case.steps) == (acceptance, steps)]
            points = sorted((case.concurrency, case.speedup) for case in chosen)
            if points:
                style = {"color": COLOURS[i % len(COLOURS)], "linestyle": ("-", "--", ":", "-.")[j % 4]}
                label = f"{acceptance:g} right, {steps} drafts"
                panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, **style)
    panel.axhline(BAR, color=GREY, linestyle=":", linewidth=1.4, label=f"least of auto, {BAR:g}")
    panel.set_ylim(bottom=0)
    _by_concurrency(panel, cases)


def _rates(panel: Any, cases: Sequence[RehearsedCase]) -> None:
    """Draws tokens per second by concurrency: without drafts, and where they are chosen."""
    panel.set(title="Output", xlabel="requests at once", ylabel="tokens/s")
    at = concurrencies(cases)
    panel.plot(at, [_plain_rate(cases, each) for each in at], color="black", linewidth=2.2, marker="o", label="off")
    for i, acceptance in enumerate(acceptances(cases)):
        chosen = [case for case in cases if (case.acceptance, case.steps) == (acceptance, AUTO)]
        points = sorted((case.concurrency, statistics.median(run.tokens_per_s for run in case.spec)) for case in chosen)
        if points:
            style = {"color": COLOURS[i % len(COLOURS)], "marker": "o", "markersize": 4}
            panel.plot(*zip(*points, strict=True), label=f"auto, {acceptance:g} right", **style)
    panel.set_ylim(bottom=0)
    _by_concurrency(panel, cases)


def _by_concurrency(panel: Any, cases: Sequence[RehearsedCase]) -> None:
    at = concurrencies(cases)
    panel.set_xscale("log", base=2)
    panel.set_xticks(at, [str(number) for number in at])
    panel.minorticks_off()
    panel.legend(frameon=False, fontsize=8, ncols=2)
