"""``hiserve bench``: load, chats, cache loads or faults against a server; the offline API's throughput and speculation."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import shlex
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
import uvloop
from rich.console import Console

import hiserve
from hiserve.bench import offline, online, report
from hiserve.bench.cache_run import measure
from hiserve.bench.cache_summary import summarize_cache
from hiserve.bench.datasets.synthetic import check_fits, random_prompts
from hiserve.bench.equality import are_kept
from hiserve.bench.load import Begin
from hiserve.bench.online import RunOutcome
from hiserve.bench.options import (
    CacheLoadOptions,
    ConnectionOptions,
    DataOptions,
    GoodputOptions,
    LimitOptions,
    LoadOptions,
    MultiturnOptions,
    OfflineOptions,
    OutputOptions,
    PlotOptions,
    RehearsalOptions,
    SoakOptions,
    SweepOptions,
    add_flags,
    filled,
    pick,
)
from hiserve.bench.plot import Plotter, draw_cache, draw_spec
from hiserve.bench.record import about, discard_empty, prepare, raw, write
from hiserve.bench.rehearsal import draw_rehearsed, rehearse_engines, show_rehearsed
from hiserve.bench.rehearsal import figures_of as rehearsed_figures
from hiserve.bench.report import show_cache, show_soak, show_spec
from hiserve.bench.soak.soak_run import soak
from hiserve.bench.spec_run import figures_of, sweep_engines
from hiserve.bench.summary import Summary, by_round, goodput, num_without_ids, parse_objectives, summarize
from hiserve.bench.workload import Run
from hiserve.commands.progress import progress
from hiserve.config.options import Options, flat, without_secrets
from hiserve.errors import ConfigError
from hiserve.fleet.report import FleetOptions, draw_fleet, missed_bars, run_fleet, show_fleet
from hiserve.models.builtin_shapes import read_model

_T = TypeVar("_T")
INTERRUPTED = 130  # as a shell tells of a command that Ctrl-C ended
AddSettings = Callable[[argparse.ArgumentParser], None]


class BenchKind(msgspec.Struct, frozen=True):
    """One kind of benchmark."""

    summary: str  # its help sentence
    sections: tuple[type[msgspec.Struct], ...]  # its options
    has_settings: bool  # it takes the engine's own flags as well
    run: Callable[[Options, Mapping[str, Any]], int]  # runs it and returns the exit status


def add_arguments(parser: argparse.ArgumentParser, add_settings: AddSettings) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, kind in KINDS.items():
        own = kinds.add_parser(name, help=kind.summary, description=kind.summary, allow_abbrev=False)
        if kind.has_settings:
            add_settings(own)
        add_flags(own, *kind.sections)


def run(config: Options, *, kind: str, **arguments: Any) -> int:
    """Runs one benchmark; returns 1 when no request ended well, or a check failed. Raises HiserveError."""
    output = pick(OutputOptions, arguments).output
    if output is None:
        return KINDS[kind].run(config, arguments)
    prepare(output)
    try:
        return KINDS[kind].run(config, arguments)
    finally:
        discard_empty(output)


def _serve(_: Options, arguments: Mapping[str, Any]) -> int:
    data, load, limits = pick(DataOptions, arguments), pick(LoadOptions, arguments), pick(LimitOptions, arguments)
    objectives_ms = parse_objectives(pick(GoodputOptions, arguments).goodput)
    plotter, console = _plotter(arguments), Console(highlight=False)
    outcome = _wait("requests", partial(online.serve, pick(ConnectionOptions, arguments), data, load, limits))
    title = f"{data.dataset} on {outcome.target.model}"
    summary = _show(console, title, outcome)
    found = goodput(outcome.run, objectives_ms) if objectives_ms else None
    if found is not None:
        report.show_goodput(console, found)
    _write(arguments, outcome, {"summary": summary, "goodput": found})
    if plotter is not None:
        plotter.draw_run(title, outcome.run)
    return _status(outcome.run, summary)


def _multiturn(_: Options, arguments: Mapping[str, Any]) -> int:
    rounds, limits = pick(MultiturnOptions, arguments), pick(LimitOptions, arguments)
    plotter, console = _plotter(arguments), Console(highlight=False)
    outcome = _wait("requests", partial(online.multiturn, pick(ConnectionOptions, arguments), rounds, limits))
    page_size = outcome.target.page_size or 1
    rounds = filled(rounds, device=outcome.target.device, max_model_len=outcome.target.max_model_len)
    title = f"{rounds.num_clients} chats of {rounds.num_rounds} rounds on {outcome.target.model}"
    summary = _show(console, title, outcome)
    found = by_round(outcome.run, rounds, page_size)
    num_missing = num_without_ids(outcome.run)
    report.show_rounds(console, found, num_missing)
    extra = {"rounds": found, "replies_without_ids": num_missing}
    _write(arguments, outcome, {"summary": summary, "page_size": page_size, **extra})
    if plotter is not None:
        plotter.draw_rounds(title, found)
    return _status(outcome.run, summary)


def _cache(_: Options, arguments: Mapping[str, Any]) -> int:
    load, limits = pick(CacheLoadOptions, arguments), pick(LimitOptions, arguments)
    plotter, console = _plotter(arguments), Console(highlight=False)
    found = _wait("requests", partial(measure, pick(ConnectionOptions, arguments), load, limits))
    run = found.outcome.run
    title = f"{load.load} on {found.outcome.target.model}"
    summary = _show(console, title, found.outcome)
    cache = summarize_cache(run, found.held)
    show_cache(console, found, cache)
    figures = {"summary": summary, "cache": cache, "page_size": found.page_size, "held": found.held}
    figures |= {"copies": found.copies, "server_counters": found.counters, "server_notes": found.notes}
    figures |= {"prompts_of_another_length": found.num_differing}
    _write(arguments, found.outcome, figures)
    if plotter is not None:
        draw_cache(plotter, title, run, found.held)
    return _status(run, summary)


def _offline(config: Options, arguments: Mapping[str, Any]) -> int:
    vocab_size = read_model(config.model)[1].vocab_size
    begin_s = time.perf_counter()
    with hiserve.LLM(in_process=pick(OfflineOptions, arguments).in_process, **flat(config)) as llm:
        start_s = time.perf_counter() - begin_s
        device, max_model_len = llm.settings.model.device, llm.settings.model.max_model_len
        batch = filled(pick(OfflineOptions, arguments), device=device, max_model_len=max_model_len)
        workload = random_prompts(
            num_prompts=batch.num_prompts,
            input_length=batch.input_length,
            output_length=batch.output_length,
            range_ratio=batch.random_range_ratio,
            vocab_size=vocab_size,
            seed=batch.seed,
        )
        check_fits(workload, max_model_len)
        with progress("requests") as begin:
            advance = begin(workload.num_turns)
            summary = offline.measure(llm, workload, temperature=batch.temperature, advance=advance)
        resolved = without_secrets(llm.settings)
    report.show_offline(Console(highlight=False), f"offline on {config.model.shape or config.model.model}", summary)
    _write(arguments, None, {"options": [batch], "config": resolved, "start_s": start_s, "summary": summary})
    return INTERRUPTED if summary.num_requests < workload.num_turns else 0


def _spec(config: Options, arguments: Mapping[str, Any]) -> int:
    sweep, rehearsal = pick(SweepOptions, arguments), pick(RehearsalOptions, arguments)
    if rehearsal.sweep:
        return _rehearsed(config, sweep, arguments)
    if rehearsal != RehearsalOptions():
        raise ConfigError("--acceptances and --concurrency are of --sweep. Add it, or use --batches.", param="sweep")
    plotter, console = _plotter(arguments), Console(highlight=False)
    with progress("cases") as begin:
        found = sweep_engines(config, sweep, lambda settings: hiserve.LLM(in_process=True, **settings), begin)
    show_spec(console, found)
    cases = [msgspec.structs.asdict(case) | {"figures": figures_of(case)} for case in found.cases]
    resolved = without_secrets(found.config)
    _write(arguments, None, {"options": [sweep], "config": resolved, "cases": cases, "cycle_costs": found.costs})
    if plotter is not None:
        draw_spec(plotter, f"Speculation on {config.model.shape or config.model.model}", found)
    if found.is_partial:
        console.print(f"[yellow]stopped early, after {len(found.cases)} cases[/yellow]")
        return INTERRUPTED
    return int(not are_kept([case.equality for case in found.cases]))


def _rehearsed(config: Options, sweep: SweepOptions, arguments: Mapping[str, Any]) -> int:
    rehearsal = pick(RehearsalOptions, arguments)
    rehearsed = importlib.import_module("hiserve.llm.rehearsed")  # imports torch: loaded where it is used
    plotter, console = _plotter(arguments), Console(highlight=False)
    with progress("cases") as begin:
        found = rehearse_engines(
            config,
            sweep,
            rehearsal,
            lambda settings: hiserve.LLM(in_process=True, **settings),
            lambda settings: rehearsed.RehearsedLLM(**settings),
            begin,
        )
    show_rehearsed(console, found)
    cases = [msgspec.structs.asdict(case) | {"figures": rehearsed_figures(case)} for case in found.cases]
    figures = {"options": [sweep, rehearsal], "config": without_secrets(found.config), "proposer": found.proposer}
    _write(arguments, None, figures | {"cases": cases, "is_partial": found.is_partial})
    if plotter is not None:
        draw_rehearsed(plotter, f"Rehearsed drafts on {config.model.shape or config.model.model}", found)
    if found.is_partial:
        console.print(f"[yellow]stopped early, after {len(found.cases)} cases[/yellow]")
        return INTERRUPTED
    return int(not found.is_same)


def _soak(config: Options, arguments: Mapping[str, Any]) -> int:
    options = pick(SoakOptions, arguments)
    console = Console(highlight=False)
    found = _wait("seconds", partial(soak, config, options))
    show_soak(console, f"soak of {found.target.model}", found.figures)
    settings = without_secrets(config)
    figures = {"options": [options], "config": settings, "server": found.target, "soak": found.figures}
    if found.figures.num_violations:
        figures["log_tail"] = found.log_tail
    _write(arguments, None, figures)
    if found.is_partial:
        console.print(f"[yellow]stopped early, after {found.figures.duration_s:.0f} s[/yellow]")
    return INTERRUPTED if found.is_partial else int(bool(found.figures.num_violations))


def _fleet(_: Options, arguments: Mapping[str, Any]) -> int:
    options, plotter = pick(FleetOptions, arguments), _plotter(arguments)
    with progress("cases") as begin:
        found = run_fleet(options, begin)
    show_fleet(Console(highlight=False), found)
    missed = missed_bars(found)
    _write(arguments, None, {"options": [options], "cases": found.cases, "endless": found.endless, "missed": missed})
    if plotter is not None:
        draw_fleet(plotter, "made-up conversations" if options.path is None else options.path.name, found)
    return int(bool(missed))


# The one table of benchmarks.
KINDS = {
    "serve": BenchKind(
        "Send a data set to a server.",
        (ConnectionOptions, DataOptions, LoadOptions, LimitOptions, GoodputOptions, OutputOptions, PlotOptions),
        False,
        _serve,
    ),
    "multiturn": BenchKind(
        "Hold chats with a server in a closed loop.",
        (ConnectionOptions, MultiturnOptions, LimitOptions, OutputOptions, PlotOptions),
        False,
        _multiturn,
    ),
    "cache": BenchKind(
        "Measure a server's prefix cache, tier by tier, against a cache without end.",
        (ConnectionOptions, CacheLoadOptions, LimitOptions, OutputOptions, PlotOptions),
        False,
        _cache,
    ),
    "offline": BenchKind("Measure the offline API's throughput.", (OfflineOptions, OutputOptions), True, _offline),
    "spec": BenchKind(
        "Measure speculation against plain decoding: what is accepted, gained and paid, with the same tokens.",
        (SweepOptions, RehearsalOptions, OutputOptions, PlotOptions),
        True,
        _spec,
    ),
    "fleet": BenchKind(
        "Compute what replicas find cached by the way in which requests are spread over them; no engine runs.",
        (FleetOptions, OutputOptions, PlotOptions),
        False,
        _fleet,
    ),
    "soak": BenchKind(
        "Load a server, strike it with faults, and see what it survives.", (SoakOptions, OutputOptions), True, _soak
    ),
}


def _status(run: Run, summary: Summary) -> int:
    """Returns the exit status of a run: as after Ctrl-C, if that stopped it; 1 when no request ended well."""
    return INTERRUPTED if run.is_partial else int(not summary.num_ok)


def _wait(unit: str, work: Callable[[Begin], Coroutine[Any, Any, _T]]) -> _T:
    """Runs a benchmark in an event loop and shows its progress in units."""
    with progress(unit) as begin, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work(begin))


def _show(console: Console, title: str, outcome: RunOutcome) -> Summary:
    summary = summarize(outcome.run)
    report.show_notes(console, outcome.workload)
    report.show_run(console, title, summary)
    if outcome.run.is_partial:
        total = outcome.run.num_unsent + summary.num_requests
        console.print(f"[yellow]stopped early: {summary.num_requests:,} of {total:,} requests were sent[/yellow]")
    report.show_errors(console, outcome.run)
    return summary


def _plotter(arguments: Mapping[str, Any]) -> Plotter | None:
    path = pick(PlotOptions, arguments).plot
    return None if path is None else Plotter(path)


def _write(arguments: Mapping[str, Any], outcome: RunOutcome | None, figures: dict[str, Any]) -> None:
    output = pick(OutputOptions, arguments).output
    if output is None:
        return
    content = about(shlex.join(["hiserve", *sys.argv[1:]]), f"hiserve {hiserve.__version__}")
    if outcome is not None:
        content |= {
            "server": outcome.target,
            "backend": outcome.backend,
            "asking": outcome.asking,
            "options": outcome.options,
        }
        figures |= {"workload": outcome.workload.name, "notes": outcome.workload.notes, "samples": raw(outcome.run)}
        figures |= {"unsent_requests": outcome.run.num_unsent}
    write(output, content | figures)
