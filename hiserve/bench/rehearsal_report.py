"""The table and the plot of rehearsed drafts, by concurrency and acceptance."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape

from hiserve.bench.plot import COLOURS, GREY, Plotter
from hiserve.bench.rehearsal import AUTO, BAR, Rehearsed, RehearsedCase
from hiserve.bench.report import BAD, GOOD, columns

EXPLAINED = (
    "Tokens per second over those without drafts. A draft is right with the probability asked for, and costs the time of the "
    "head; accepted: those that were, of a fixed number, while all before them were."
)


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
