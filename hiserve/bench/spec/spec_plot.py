"""Pictures of speculation: accept length, acceptance by place, speed-up by batch, and where a cycle's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hiserve.bench.plot import BLUE, GREEN, GREY, ORANGE, Plotter
from hiserve.bench.spec.spec_report import usual_source
from hiserve.bench.spec.spec_run import Found
from hiserve.bench.spec.spec_summary import Case, CycleCost, acceptance, drafts_of, figures_of

COLOURS = (BLUE, ORANGE, GREEN, "#8a5aa8", "#b3404a", "#6b7a2c", "#2a8c8c")
STYLES = ("-", "--", ":", "-.")


def draw_spec(plotter: Plotter, title: str, found: Found) -> None:
    """Draws a sweep."""
    costs = next(iter(found.costs.items()), ("", []))
    plotter.draw(
        title,
        partial(_accept_length, cases=found.cases),
        partial(_acceptance, cases=found.cases),
        partial(_speedup, cases=found.cases),
        partial(_costs, proposer=costs[0], costs=costs[1]),
    )


def _accept_length(panel: Any, cases: Sequence[Case]) -> None:
    """Draws accept length by drafts, for each proposer, temperature and source."""
    panel.set(title="Accept length", xlabel="drafts", ylabel="tokens of a verifying step")
    proposers = list(dict.fromkeys(case.proposer for case in cases))
    temperatures = list(dict.fromkeys(case.temperature for case in cases))
    for i, proposer in enumerate(proposers):
        for j, temperature in enumerate(temperatures):
            chosen = [case for case in cases if (case.proposer, case.temperature) == (proposer, temperature)]
            fixed = sorted({int(case.steps) for case in chosen if case.steps not in ("0", "auto")})
            lengths = [
                drafts_of([case for case in chosen if case.steps == str(steps)]).accept_length for steps in fixed
            ]
            style = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[j % len(STYLES)], "marker": "o"}
            panel.plot(fixed, lengths, markersize=4, label=f"{proposer}, temperature {temperature:g}", **style)
    panel.set_ylim(bottom=1)
    panel.xaxis.get_major_locator().set_params(integer=True)
    _legend(panel)


def _acceptance(panel: Any, cases: Sequence[Case]) -> None:
    """Draws acceptance by place with the most drafts, for each proposer, by where prompts were."""
    panel.set(title="Accepted, of verifying steps", xlabel="place of the draft", ylabel="share", ylim=(0, 1.02))
    fixed = [int(case.steps) for case in cases if case.steps not in ("0", "auto")]
    for i, proposer in enumerate(dict.fromkeys(case.proposer for case in cases)):
        for j, source in enumerate(dict.fromkeys(case.source for case in cases)):
            most = str(max(fixed, default=0))
            drafts = drafts_of(
                [case for case in cases if (case.proposer, case.source, case.steps) == (proposer, source, most)]
            )
            shares = acceptance(drafts)
            style = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[j % len(STYLES)], "marker": "o"}
            panel.plot(range(1, len(shares) + 1), shares, markersize=4, label=f"{proposer}, {source}", **style)
    panel.xaxis.get_major_locator().set_params(integer=True)
    _legend(panel)


def _speedup(panel: Any, cases: Sequence[Case]) -> None:
    """Draws speed-up by batch for each number of drafts, of the first proposer and temperature."""
    source, first = usual_source(cases), cases[0]
    panel.set(
        title=f"Speed-up of {first.proposer}, temperature {first.temperature:g}, prompts: {source}",
        xlabel="batch",
        ylabel="times plain decoding",
    )
    chosen = [
        case
        for case in cases
        if (case.proposer, case.temperature, case.source) == (first.proposer, first.temperature, source)
    ]
    for i, steps in enumerate(dict.fromkeys(case.steps for case in chosen)):
        points = sorted((case.batch, figures_of(case).speedup) for case in chosen if case.steps == steps)
        style = {"color": "black", "linewidth": 2.2} if steps == "auto" else {"color": COLOURS[i % len(COLOURS)]}
        panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label=f"{steps} drafts", **style)
    panel.axhline(1, color=GREY, linestyle=":", linewidth=1.4)
    batches = sorted({case.batch for case in chosen})
    panel.set_xscale("log", base=2)
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.set_ylim(bottom=0)
    _legend(panel)


def _costs(panel: Any, proposer: str, costs: Sequence[CycleCost]) -> None:
    """Draws verify, extend and draft stacked, in steps of plain decoding, for each batch and number of drafts."""
    panel.set(title=f"Cost of a cycle{proposer and f' of {proposer}'}, at start", ylabel="steps of plain decoding")
    if not costs:
        panel.text(0.5, 0.5, "measured with auto drafts only", transform=panel.transAxes, ha="center", color=GREY)
        return
    places, at = [], 0.0
    firsts = [not i or costs[i - 1].batch != cost.batch for i, cost in enumerate(costs)]
    for first in firsts:
        at += 1.8 if first else 1.0
        places.append(at)
    floor = [0.0] * len(costs)
    for name, colour in (("verify", BLUE), ("extend", ORANGE), ("draft", GREEN)):
        heights = [getattr(cost, f"{name}_s") / cost.plain_s for cost in costs]
        panel.bar(places, heights, bottom=floor, color=colour, width=0.8, label=name)
        floor = [low + high for low, high in zip(floor, heights, strict=True)]
    panel.axhline(1, color=GREY, linestyle=":", linewidth=1.4)
    labels = [
        f"{cost.steps}\nbatch {cost.batch}" if first else str(cost.steps)
        for cost, first in zip(costs, firsts, strict=True)
    ]
    panel.set_xticks(places, labels)
    panel.set_xlabel("drafts")
    panel.grid(visible=False, axis="x")
    _legend(panel)


def _legend(panel: Any) -> None:
    panel.legend(frameon=False, fontsize=8, ncols=2)
