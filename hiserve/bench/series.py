"""A run over time: requests in flight, tokens per second, and the part between ramp and tail."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from hiserve.bench.workload import Run, Sample

Floats = NDArray[np.float64]


class SteadyState(msgspec.Struct, frozen=True, kw_only=True):
    """Output throughput between ramp and tail."""

    output_tokens_per_s: float  # output tokens that arrived in it, per second of it
    begin_s: float  # its start, seconds from the start of the run
    end_s: float  # its end, likewise
    min_in_flight: int  # requests in flight at both ends


def in_flight(samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """Returns when the number of requests in flight changes, ascending, and the number from then on.

    A request that ends at the moment another one begins is not in flight together with it.
    """
    times = np.array([*(sample.end_s for sample in samples), *(sample.begin_s for sample in samples)])
    changes = np.repeat([-1.0, 1.0], len(samples))
    order = np.argsort(times, kind="stable")  # at the same moment, ends come first
    return times[order], np.cumsum(changes[order])


def peak_in_flight(samples: Sequence[Sample]) -> int:
    return int(in_flight(samples)[1].max(initial=0.0))


def token_arrivals(samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """Returns when output arrived, and how many tokens each time.

    Without running counts from the server, a request's tokens are spread evenly over its chunks.
    """
    times: list[float] = []
    tokens: list[float] = []
    for sample in samples:
        if sample.error or not sample.chunk_s:
            continue
        times += sample.chunk_s
        if -1 in sample.chunk_tokens:
            tokens += [sample.num_output / len(sample.chunk_s)] * len(sample.chunk_s)
            continue
        tokens += np.diff(sample.chunk_tokens, prepend=0).tolist()
        if sample.num_output > sample.chunk_tokens[-1]:
            times.append(sample.end_s)
            tokens.append(sample.num_output - sample.chunk_tokens[-1])
    return np.array(times), np.array(tokens)


def steady_state(run: Run) -> SteadyState | None:
    """Finds the part of a run between ramp and tail; None when no output arrived.

    It lasts from the first to the last moment with at least the median number of requests in flight (over
    time), and at least one.
    """
    times, tokens = token_arrivals(run.samples)
    moments, numbers = in_flight(run.samples)
    spans = np.diff(moments, append=moments[-1:])
    if not times.size or not spans.any():
        return None
    median = max(1.0, _weighted_median(numbers, spans))
    busy = np.flatnonzero((numbers >= median) & (spans > 0))
    begin_s, end_s = moments[busy[0]], moments[busy[-1]] + spans[busy[-1]]
    inside = (times > begin_s) & (times <= end_s)
    return SteadyState(
        output_tokens_per_s=float(tokens[inside].sum() / (end_s - begin_s)),
        begin_s=float(begin_s - run.begin_s),
        end_s=float(end_s - run.begin_s),
        min_in_flight=int(median),
    )


def _weighted_median(values: Floats, weights: Floats) -> float:
    """Returns the value at or below which half of the weight lies."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(reached, reached[-1] / 2)]])


def throughput(run: Run, num_bins: int) -> tuple[Floats, Floats]:
    """Returns the edges of equal spans of a run, seconds from its start, and tokens per second in each."""
    times, tokens = token_arrivals(run.samples)
    span = (0.0, max(run.end_s - run.begin_s, 1e-9))
    sums, edges = np.histogram(times - run.begin_s, bins=num_bins, range=span, weights=tokens)
    return edges, sums / np.diff(edges)
