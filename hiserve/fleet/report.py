"""``hiserve bench fleet``: its options, table, bars and plot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.console import Console

from hiserve.bench.load import Begin
from hiserve.bench.plot import COLOURS, Plotter
from hiserve.bench.report import columns
from hiserve.config.flags import about
from hiserve.fleet.simulation import FleetCase, PolicyName, endless_hit_rate, made_up, recorded, simulate

POLICIES: tuple[PolicyName, ...] = ("round-robin", "two-choices", "affinity", "exact")
# Of affinity: its hit rate over that of the exact index, and over that of round robin, from so many replicas on.
LEAST_OF_EXACT, LEAST_OF_ROUND_ROBIN, FEWEST_REPLICAS = 0.95, 4.0, 16


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas under a trace, computed without any engine."""

    sizes: Annotated[tuple[int, ...], about("Numbers of replicas.", least=1, most=10_000)] = (1, 16, 64, 256, 1000)
    policies: Annotated[tuple[PolicyName, ...], about("Ways to choose the replica of a request.")] = POLICIES
    cache_tokens: Annotated[int, about("Cached tokens that a replica has room for.", unit="tokens", least=512)] = (
        1_000_000
    )
    requests_per_replica: Annotated[int, about("Made-up requests for each replica.", unit="requests", least=1)] = 100
    path: Annotated[
        Path | None,
        about(
            "A trace in Mooncake's format in place of made-up conversations; JSON lines, gzipped if it ends with .gz."
        ),
    ] = None
    replicas_per_copy: Annotated[int, about("Replicas for which there is one copy of the trace.", least=1)] = 16
    seed: Annotated[int, about("Of what is made up.", least=0)] = 0


class FleetRun(msgspec.Struct, frozen=True):
    """The figures of a run."""

    cases: list[FleetCase]
    endless: dict[int, float]  # by number of replicas: the hit rate of one cache without end


def run_fleet(options: FleetOptions, begin: Begin) -> FleetRun:
    """Computes all cases.

    Args:
        options: Of the run.
        begin: Shows the progress, in cases.

    Raises:
        ConfigError: The trace cannot be read.
    """
    cases, endless = list[FleetCase](), dict[int, float]()
    advance = begin(len(options.sizes) * len(options.policies))
    for count in options.sizes:
        if options.path is None:
            arrivals = made_up(count, options.requests_per_replica, options.seed)
        else:
            arrivals = recorded(options.path, count, options.replicas_per_copy, options.seed)
        endless[count] = endless_hit_rate(arrivals)
        for policy in options.policies:
            cases.append(simulate(policy, count, arrivals, options.cache_tokens, options.seed))
            advance(f"{count} {policy}")
    return FleetRun(cases, endless)


def missed_bars(found: FleetRun) -> list[str]:
    """Returns a sentence for each bar of affinity that is missed."""
    by_policy = {(case.num_replicas, case.policy): case.hit_rate for case in found.cases}
    missed = []
    for count in found.endless:
        own = by_policy.get((count, "affinity"))
        if own is None or count < FEWEST_REPLICAS:
            continue
        bars: tuple[tuple[PolicyName, float], ...] = (("exact", LEAST_OF_EXACT), ("round-robin", LEAST_OF_ROUND_ROBIN))
        for other, least in bars:
            rate = by_policy.get((count, other))
            if rate is not None and own < least * rate:
                missed.append(
                    f"{count:,} replicas: affinity has {own / rate:.2f} of the hits of {other}, bar {least:g}"
                )
    return missed


def show_fleet(console: Console, found: FleetRun) -> None:
    """Shows a table, and the bars that are missed."""
    names = (
        "replicas",
        "requests",
        "policy",
        "hit rate",
        "of an endless cache",
        "TTFT p50 s",
        "p99 s",
        "busiest / mean",
    )
    table = columns("Fleet", *names, left="policy")
    for case in found.cases:
        share = case.hit_rate / max(found.endless[case.num_replicas], 1e-9)
        table.add_row(
            f"{case.num_replicas:,}",
            f"{case.num_requests:,}",
            case.policy,
            f"{case.hit_rate:.3f}",
            f"{share:.2f}",
            f"{case.ttft_p50_s:.2f}",
            f"{case.ttft_p99_s:.1f}",
            f"{case.busiest:.2f}",
        )
    console.print(table)
    for sentence in missed_bars(found):
        console.print(f"[red]{sentence}[/red]")


def draw_fleet(plotter: Plotter, title: str, found: FleetRun) -> None:
    """Draws hit rates and times to the first token by number of replicas."""
    plotter.draw(
        title,
        partial(
            _lines,
            cases=found.cases,
            field="hit_rate",
            label="share of prompt tokens that were cached",
            endless=found.endless,
        ),
        partial(_lines, cases=found.cases, field="ttft_p50_s", label="median seconds to the first token", endless={}),
    )


def _lines(panel: Any, cases: Sequence[FleetCase], field: str, label: str, endless: dict[int, float]) -> None:
    panel.set(title=label.capitalize(), xlabel="replicas", ylabel=label)
    panel.set_xscale("log")
    for index, policy in enumerate(dict.fromkeys(case.policy for case in cases)):
        own = [case for case in cases if case.policy == policy]
        values = [getattr(case, field) for case in own]
        panel.plot(
            [case.num_replicas for case in own], values, color=COLOURS[index], marker="o", markersize=4, label=policy
        )
    if endless:
        panel.plot(list(endless), list(endless.values()), color="black", linestyle=":", label="cache without end")
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False, fontsize=8)
