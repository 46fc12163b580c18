"""Pictures of a cache at work: hit rate by tier over the run, and time to first token by kind of hit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hiserve.bench.cache.cache_summary import KINDS, TIERS, kind_of, tiers_of
from hiserve.bench.cache.endless_cache import Held
from hiserve.bench.plot import BLUE, GREEN, GREY, ORANGE, WIDE, Plotter, widen
from hiserve.bench.summary import ttft_s, values_of
from hiserve.bench.workload import Run

COLOURS = {"device": BLUE, "host": GREEN, "store": ORANGE, "miss": GREY}
LABELS = {"device": "device", "host": "from the host", "store": "from the store", "miss": "miss"}
# Requests in one span of time, on average, and how many spans.
SPAN_REQUESTS = 6
MIN_SPANS, MAX_SPANS = 4, 60

Floats = NDArray[np.float64]


def draw_cache(plotter: Plotter, title: str, run: Run, held: Sequence[Held]) -> None:
    """Draws a run beside what an endless cache held of each sample's prompt."""
    plotter.draw(title, partial(_hits, run=run, held=held), partial(_ttft, run=run))


def _hits(panel: Any, run: Run, held: Sequence[Held]) -> None:
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
            panel.stairs(top, edges, baseline=floor, color=COLOURS[tier], fill=True, alpha=0.55, label=LABELS[tier])
            floor = np.nan_to_num(top)
    for name, style, counts in (
        ("endless cache, at most", "-", [of_it.most for _, of_it in pairs]),
        ("endless cache, at least", ":", [of_it.least for _, of_it in pairs]),
    ):
        panel.stairs(share(counts), edges, color="black", linestyle=style, linewidth=1.3, label=name)
    panel.set_xlim(0, edges[-1])
    _legend(panel)


def _ttft(panel: Any, run: Run) -> None:
    """Draws what share of the requests of each kind had their first token within a time."""
    panel.set(
        title="Time to first token by kind of hit", xlabel="milliseconds", ylabel="share of requests", ylim=(0, 1.02)
    )
    drawn: list[Floats] = []
    for kind in KINDS:
        fine = (sample for sample in run.samples if not sample.error and kind_of(sample) == kind)
        values = 1e3 * np.sort(values_of(ttft_s, fine))
        if values.size:
            label = f"{LABELS[kind]}: {values.size:,}, median {np.median(values):.3g}"
            panel.ecdf(values, color=COLOURS[kind], linewidth=1.6, label=label)
            drawn.append(values)
    if not drawn:
        panel.text(0.5, 0.5, "no values", transform=panel.transAxes, ha="center", color=GREY)
        return
    values = np.concatenate(drawn)
    if values.max() / max(values.min(), 1e-6) > WIDE:
        widen(panel)
    _legend(panel)


def _legend(panel: Any) -> None:
    """Puts the legend under the panel, where it hides nothing."""
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


def _num_spans(num_requests: int) -> int:
    return int(np.clip(num_requests // SPAN_REQUESTS, MIN_SPANS, MAX_SPANS))
