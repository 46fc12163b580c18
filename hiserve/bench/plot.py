"""Plots of a run, of rounds, of the cache and of speculation, with matplotlib, which is an extra."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiserve.bench.cache_summary import KINDS, TIERS, Held, kind_of, tiers_of
from hiserve.bench.report import usual_source
from hiserve.bench.spec_run import Case, CycleCost, Found, acceptance, drafts_of, figures_of
from hiserve.bench.summary import (
    Round,
    chunk_gaps_s,
    in_flight,
    steady_state,
    throughput,
    token_gaps_s,
    tpot_s,
    ttft_s,
    values_of,
)
from hiserve.bench.workload import Run
from hiserve.errors import ConfigError

BLUE, ORANGE, GREEN, GREY = "#2563a8", "#d9772b", "#3b8f5a", "#9aa3ad"
FORMATS = (".png", ".svg", ".pdf")
MIN_BINS, MAX_BINS = 12, 60
# A distribution this wide is drawn on a logarithmic axis; what is wider than the axis is drawn at its ends.
WIDE, WIDEST = 20.0, 1e3
# Draws into one panel of matplotlib's.
Painter: TypeAlias = Callable[[Any], None]
TIER_COLOURS = {"device": BLUE, "host": GREEN, "store": ORANGE, "miss": GREY}
LABELS = {"device": "device", "host": "from the host", "store": "from the store", "miss": "miss"}
# Requests in one span of time, on average, and how many spans.
SPAN_REQUESTS = 6
MIN_SPANS, MAX_SPANS = 4, 60
Floats = NDArray[np.float64]
COLOURS = (BLUE, ORANGE, GREEN, "#8a5aa8", "#b3404a", "#6b7a2c", "#2a8c8c")
STYLES = ("-", "--", ":", "-.")


class Plotter:
    """Draws into one file, whose ending chooses the format; made before a run, so that a missing library costs no time.

    Raises ConfigError without matplotlib, or where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._new_figure: Any = importlib.import_module("matplotlib.figure").Figure
        except ImportError:
            raise ConfigError(
                "--plot needs matplotlib, which is not installed. Install it: pip install hiserve[bench].",
                param="plot",
            ) from None
        if path.suffix not in FORMATS:
            raise ConfigError(f"--plot {path} must end with {', '.join(FORMATS)}.", param="plot")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise ConfigError(f"cannot write --plot {path}: {error}.", param="plot") from None
        self._path = path

    def draw_run(self, title: str, run: Run) -> None:
        fine = [sample for sample in run.samples if not sample.error]
        ttft, tpot = values_of(ttft_s, fine), values_of(tpot_s, fine)
        gaps = [token_gaps_s(sample) for sample in fine]
        unit = "chunk" if None in gaps else "token"
        if None in gaps:
            gaps = [chunk_gaps_s(sample) for sample in fine]
        itl = [gap for found in gaps for gap in found or []]
        curves = [("TPOT, per request", tpot, ORANGE), (f"ITL, per {unit}", itl, GREEN)]
        self.draw(
            title,
            partial(_distributions, title="Time to first token", curves=[("TTFT", ttft, BLUE)]),
            partial(_distributions, title="Time between tokens", curves=curves),
            partial(_throughput, run=run),
            partial(_in_flight, run=run),
        )

    def draw_rounds(self, title: str, rounds: Sequence[Round]) -> None:
        self.draw(title, partial(_round_ttft, rounds=rounds), partial(_round_hits, rounds=rounds))

    def draw(self, title: str, *painters: Painter) -> None:
        """Draws panels, two in a row; each of an even number of painters is given its panel."""
        num_rows = len(painters) // 2
        figure = self._new_figure(figsize=(13, 1 + 3.5 * num_rows), layout="constrained", dpi=130)
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        for panel, paint in zip(figure.subplots(num_rows, 2, squeeze=False).flat, painters, strict=True):
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(color="#e6e9ec", linewidth=0.8)
            panel.set_axisbelow(True)
            paint(panel)
        figure.savefig(self._path, facecolor="white")


def _distributions(panel: Any, title: str, curves: list[tuple[str, list[float], str]]) -> None:
    """Draws the share of values in each bin, with median and 99th percentile marked."""
    panel.set(title=title, xlabel="milliseconds", ylabel="share of values")
    curves = [(name, values, colour) for name, values, colour in curves if values]
    if not curves:
        _say(panel, "no values")
        return
    values_ms = [np.array(values) * 1e3 for _, values, _ in curves]
    joined = np.concatenate(values_ms)
    high = max(float(np.percentile(joined, 99.9)), 1e-3)
    low = min(max(float(joined.min()), high / WIDEST), high / 1.01)
    is_wide = high / low > WIDE
    num_bins = int(np.clip(2 * np.sqrt(joined.size), MIN_BINS, MAX_BINS))
    bins = np.geomspace(low, high, num_bins) if is_wide else np.linspace(low, high, num_bins)
    for (name, _, colour), found in zip(curves, values_ms, strict=True):
        median, p99 = np.percentile(found, (50, 99))
        weights = np.full(found.size, 1 / found.size)
        label = f"{name}: median {median:.3g}, p99 {p99:.3g}"
        clipped = np.clip(found, low, high)
        panel.hist(clipped, bins, weights=weights, color=colour, alpha=0.35, histtype="stepfilled")
        panel.hist(clipped, bins, weights=weights, color=colour, histtype="step", linewidth=1.2)
        panel.axvline(median, color=colour, linewidth=1.4, label=label)
        panel.axvline(p99, color=colour, linewidth=1.2, linestyle=":")
    if is_wide:
        widen(panel)
    _headed(panel)


def _say(panel: Any, words: str) -> None:
    panel.text(0.5, 0.5, words, transform=panel.transAxes, ha="center", color=GREY)


def _whole(axis: Any) -> None:
    """Marks whole numbers alone."""
    axis.get_major_locator().set_params(integer=True)


def widen(panel: Any) -> None:
    """Makes the horizontal axis logarithmic, with plain numbers."""
    panel.set_xscale("log", subs=(2, 5))
    for set_formatter in (panel.xaxis.set_major_formatter, panel.xaxis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:g}")


def _headed(panel: Any) -> None:
    panel.set_ylim(0, panel.get_ylim()[1] * 1.25)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(loc="upper right", framealpha=0.95, edgecolor="none")


def _throughput(panel: Any, run: Run) -> None:
    """Draws output tokens per second, and the steady state."""
    panel.set(title="Output throughput", xlabel="seconds of the run", ylabel="tokens/s")
    num_bins = int(np.clip((run.end_s - run.begin_s) / 0.5, 20, 120))
    edges, rates = throughput(run, num_bins)
    panel.stairs(rates, edges, color=BLUE, fill=True, alpha=0.3)
    panel.stairs(rates, edges, color=BLUE, linewidth=1.2)
    steady = steady_state(run)
    if steady is not None:
        label = f"without ramp and tail: {steady.output_tokens_per_s:,.0f} tokens/s"
        panel.hlines(steady.output_tokens_per_s, steady.begin_s, steady.end_s, color=ORANGE, linewidth=2, label=label)
    panel.set_xlim(0, edges[-1])
    _headed(panel)


def _in_flight(panel: Any, run: Run) -> None:
    times, numbers = in_flight(run.samples)
    panel.set(title="Requests in flight", xlabel="seconds of the run", ylabel="requests")
    panel.step(times - run.begin_s, numbers, where="post", color=GREEN, linewidth=1.2)
    panel.fill_between(times - run.begin_s, numbers, step="post", color=GREEN, alpha=0.2)
    panel.set_xlim(0, run.end_s - run.begin_s)
    panel.set_ylim(bottom=0)
    _whole(panel.yaxis)


def _round_ttft(panel: Any, rounds: Sequence[Round]) -> None:
    panel.set(title="Time to first token", xlabel="round", ylabel="milliseconds")
    for name, colour in (("median", BLUE), ("p90", ORANGE), ("p99", GREY)):
        values = [getattr(each.ttft_ms, name) for each in rounds]
        panel.plot([each.number for each in rounds], values, color=colour, marker="o", markersize=4, label=name)
    panel.set_ylim(bottom=0)
    _whole(panel.xaxis)
    panel.legend(frameon=False)


def _round_hits(panel: Any, rounds: Sequence[Round]) -> None:
    panel.set(title="Prompt tokens from the prefix cache", xlabel="round", ylabel="share", ylim=(0, 1.02))
    best = [each.best_hit_rate for each in rounds]
    panel.plot([each.number for each in rounds], best, color=GREY, linestyle="--", label="best possible")
    rates = [np.nan if each.hit_rate is None else each.hit_rate for each in rounds]
    panel.plot([each.number for each in rounds], rates, color=GREEN, marker="o", markersize=4, label="measured")
    _whole(panel.xaxis)
    panel.legend(frameon=False)


def draw_cache(plotter: Plotter, title: str, run: Run, held: Sequence[Held]) -> None:
    """Draws a run beside the tokens that an endless cache held of each sample's prompt."""
    plotter.draw(title, partial(_tier_hits, run=run, held=held), partial(_ttft_by_kind, run=run))


def _tier_hits(panel: Any, run: Run, held: Sequence[Held]) -> None:
    """Draws the share of prompt tokens from each tier, stacked, by the time of sending."""
    panel.set(
        title="Prompt tokens from the cache", xlabel="seconds of the run", ylabel="share of tokens", ylim=(0, 1.02)
    )
    pairs = [(sample, of_it) for sample, of_it in zip(run.samples, held, strict=True) if not sample.error]
    edges = np.linspace(0, max(run.end_s - run.begin_s, 1e-9), _num_spans(len(pairs)) + 1)
    begins = [sample.begin_s - run.begin_s for sample, _ in pairs]

    def share(counts: list[int]) -> Floats:
        """Prompt tokens per prompt token of each span; nothing where nothing was sent."""
        found = np.histogram(begins, edges, weights=counts)[0] / np.where(num_prompt > 0, num_prompt, 1)
        return np.where(num_prompt > 0, found, np.nan)

    num_prompt = np.histogram(begins, edges, weights=[max(0, sample.num_prompt) for sample, _ in pairs])[0]
    floor = np.zeros(edges.size - 1)
    for tier in TIERS:
        counts = [tiers_of(sample)[tier] for sample, _ in pairs]
        if any(counts):
            top = floor + share(counts)
            panel.stairs(
                top, edges, baseline=floor, color=TIER_COLOURS[tier], fill=True, alpha=0.55, label=LABELS[tier]
            )
            floor = np.nan_to_num(top)
    for name, style, counts in (
        ("endless cache, at most", "-", [of_it.most for _, of_it in pairs]),
        ("endless cache, at least", ":", [of_it.least for _, of_it in pairs]),
    ):
        panel.stairs(share(counts), edges, color="black", linestyle=style, linewidth=1.3, label=name)
    panel.set_xlim(0, edges[-1])
    _legend_below(panel)


def _ttft_by_kind(panel: Any, run: Run) -> None:
    """Draws the share of the requests of each kind that had their first token within a time."""
    panel.set(
        title="Time to first token by kind of hit", xlabel="milliseconds", ylabel="share of requests", ylim=(0, 1.02)
    )
    drawn: list[Floats] = []
    for kind in KINDS:
        fine = (sample for sample in run.samples if not sample.error and kind_of(sample) == kind)
        values = 1e3 * np.sort(values_of(ttft_s, fine))
        if values.size:
            label = f"{LABELS[kind]}: {values.size:,}, median {np.median(values):.3g}"
            panel.ecdf(values, color=TIER_COLOURS[kind], linewidth=1.6, label=label)
            drawn.append(values)
    if not drawn:
        _say(panel, "no values")
        return
    values = np.concatenate(drawn)
    if values.max() / max(values.min(), 1e-6) > WIDE:
        widen(panel)
    _legend_below(panel)


def _legend_below(panel: Any) -> None:
    """Puts the legend under the panel, where it hides nothing."""
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


def _num_spans(num_requests: int) -> int:
    return int(np.clip(num_requests // SPAN_REQUESTS, MIN_SPANS, MAX_SPANS))


def draw_spec(plotter: Plotter, title: str, found: Found) -> None:
    costs = next(iter(found.costs.items()), ("", []))
    plotter.draw(
        title,
        partial(_accept_length, cases=found.cases),
        partial(_acceptance, cases=found.cases),
        partial(_speedup, cases=found.cases),
        partial(_costs, proposer=costs[0], costs=costs[1]),
    )


def _style(proposer: int, other: int) -> dict[str, Any]:
    """Returns a line's colour by proposer, its dashes by another number."""
    colour, dashes = COLOURS[proposer % len(COLOURS)], STYLES[other % len(STYLES)]
    return {"color": colour, "linestyle": dashes, "marker": "o", "markersize": 4}


def _accept_length(panel: Any, cases: Sequence[Case]) -> None:
    """Draws accept length by drafts, for each proposer, temperature and source."""
    panel.set(title="Accept length", xlabel="drafts", ylabel="tokens of a verifying step")
    proposers = list(dict.fromkeys(case.proposer for case in cases))
    temperatures = list(dict.fromkeys(case.temperature for case in cases))
    for i, proposer in enumerate(proposers):
        for j, temperature in enumerate(temperatures):
            chosen = [case for case in cases if (case.proposer, case.temperature) == (proposer, temperature)]
            fixed = sorted({int(case.steps) for case in chosen if case.steps.isdecimal() and case.steps != "0"})
            lengths = [
                drafts_of([case for case in chosen if case.steps == str(steps)]).accept_length for steps in fixed
            ]
            panel.plot(fixed, lengths, label=f"{proposer}, temperature {temperature:g}", **_style(i, j))
    panel.set_ylim(bottom=1)
    _whole(panel.xaxis)
    _legend(panel)


def _acceptance(panel: Any, cases: Sequence[Case]) -> None:
    """Draws acceptance by place with the most drafts, for each proposer, by the tier of prompts."""
    panel.set(title="Accepted, of verifying steps", xlabel="place of the draft", ylabel="share", ylim=(0, 1.02))
    fixed = [int(case.steps) for case in cases if case.steps.isdecimal() and case.steps != "0"]
    for i, proposer in enumerate(dict.fromkeys(case.proposer for case in cases)):
        for j, source in enumerate(dict.fromkeys(case.source for case in cases)):
            most = str(max(fixed, default=0))
            drafts = drafts_of(
                [case for case in cases if (case.proposer, case.source, case.steps) == (proposer, source, most)]
            )
            shares = acceptance(drafts)
            panel.plot(range(1, len(shares) + 1), shares, label=f"{proposer}, {source}", **_style(i, j))
    _whole(panel.xaxis)
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
        _say(panel, "measured with auto drafts only")
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
