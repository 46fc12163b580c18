"""Turns samples into the figures people compare: latencies, throughput, cache share, errors.

The definitions are those that SGLang's and vLLM's serving benchmarks share, so that figures can be compared:

- TTFT: first chunk that carries text - sending. E2EL: last chunk - sending.
- TPOT of a request: (E2EL - TTFT) / (output tokens - 1); requests with one output token have none.
- ITL per chunk: gaps between chunks, of all requests together. ITL per token: each gap divided by the tokens
  it brought, once for each of them; only where the server sends its running token count, or sent one chunk a
  token. Chunks may carry several tokens: compare TPOT between engines, not ITL per chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from hiserve.bench.options import MultiturnOptions
from hiserve.bench.workload import Run, Sample
from hiserve.errors import ConfigError

Floats = NDArray[np.float64]
OBJECTIVES = ("ttft", "tpot", "e2e")


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


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in five numbers, in milliseconds; all 0 when there is nothing."""

    count: int = 0
    mean: float = 0.0
    median: float = 0.0
    p90: float = 0.0  # 90th percentile, interpolated between the two nearest values
    p99: float = 0.0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a run. Rates are over the whole run, ramp and tail included.

    Attributes:
        late_ms: How long after its time a request was sent; large values mean that the offered load was not the one
            asked for, or that ``--max-concurrency`` held requests back.
    """

    duration_s: float  # from the start of the run to the end of its last request
    num_requests: int
    num_ok: int  # those that ended well; all figures but ``errors`` are about these
    num_silent: int  # of these, those that brought no text; they have no TTFT and no TPOT
    errors: dict[str, int]
    num_prompt: int  # prompt tokens
    num_cached: int | None  # of these, from the prefix cache, or None if the server does not report it
    num_output: int
    has_usage: bool  # token counts are the server's; otherwise a chunk counts as a token
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    steady: SteadyState | None  # output throughput without ramp and tail, or None for a run without output
    peak_in_flight: int  # most requests in flight at once
    mean_in_flight: float  # requests in flight, averaged over the run
    ttft_ms: Spread
    tpot_ms: Spread  # time per output token, a value for each request
    itl_chunk_ms: Spread
    itl_token_ms: Spread | None  # gaps per token, or None when they are unknown
    e2el_ms: Spread
    late_ms: Spread
    client_cpu_share: float  # processor time of the load generator per second of the run, 1.0 is one core

    @property
    def cached_share(self) -> float | None:
        """Share of prompt tokens that came from the prefix cache, or None if the server does not report it."""
        return None if self.num_cached is None else self.num_cached / max(1, self.num_prompt)


def values_of(measure: Callable[[Sample], float | None], samples: Iterable[Sample]) -> list[float]:
    return [value for sample in samples if (value := measure(sample)) is not None]


def cached_tokens(samples: Sequence[Sample]) -> int | None:
    """Returns the prompt tokens from the prefix cache; None if the server does not report them, or without requests."""
    is_told = bool(samples) and all(sample.num_cached >= 0 for sample in samples)
    return sum(sample.num_cached for sample in samples) if is_told else None


def spread(values_s: Iterable[float]) -> Spread:
    found = np.fromiter(values_s, dtype=np.float64) * 1e3
    if not found.size:
        return Spread()
    median, p90, p99 = (float(value) for value in np.percentile(found, (50, 90, 99)))
    return Spread(count=found.size, mean=float(found.mean()), median=median, p90=p90, p99=p99)


def ttft_s(sample: Sample) -> float | None:
    return sample.chunk_s[0] - sample.begin_s if sample.chunk_s else None


def tpot_s(sample: Sample) -> float | None:
    """Returns the seconds per output token after the first, or None with fewer than two tokens or no text."""
    if sample.num_output < 2 or not sample.chunk_s:
        return None
    return (sample.end_s - sample.chunk_s[0]) / (sample.num_output - 1)


def chunk_gaps_s(sample: Sample) -> list[float]:
    return [float(gap) for gap in np.diff(sample.chunk_s)]


def token_gaps_s(sample: Sample) -> list[float] | None:
    """Returns the seconds between tokens, those of one chunk evenly spaced; None if they are unknown."""
    counts = list(sample.chunk_tokens)
    if -1 in counts:
        if len(counts) != sample.num_output:
            return None
        counts = list(range(1, len(counts) + 1))
    times = list(sample.chunk_s)
    if counts and sample.num_output > counts[-1]:  # the end brought tokens without text
        times.append(sample.end_s)
        counts.append(sample.num_output)
    gaps: list[float] = []
    last = 0
    for at in range(1, len(times)):
        new = counts[at] - counts[last]
        if new > 0:  # a chunk without a new token belongs to the gap of the next one that has some
            gaps += [(times[at] - times[last]) / new] * new
            last = at
    return gaps


def summarize(run: Run) -> Summary:
    fine = [sample for sample in run.samples if not sample.error]
    duration_s = max(run.end_s - run.begin_s, 1e-9)
    num_prompt = sum(max(0, sample.num_prompt) for sample in fine)
    num_output = sum(sample.num_output for sample in fine)
    per_token = [token_gaps_s(sample) for sample in fine]
    return Summary(
        duration_s=duration_s,
        num_requests=len(run.samples),
        num_ok=len(fine),
        num_silent=sum(not sample.chunk_s for sample in fine),
        errors=dict(Counter(sample.error for sample in run.samples if sample.error)),
        num_prompt=num_prompt,
        num_cached=cached_tokens(fine),
        num_output=num_output,
        has_usage=all(sample.has_usage for sample in fine),
        requests_per_s=len(fine) / duration_s,
        input_tokens_per_s=num_prompt / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_prompt + num_output) / duration_s,
        steady=steady_state(run),
        peak_in_flight=peak_in_flight(run.samples),
        mean_in_flight=sum(sample.end_s - sample.begin_s for sample in run.samples) / duration_s,
        ttft_ms=spread(values_of(ttft_s, fine)),
        tpot_ms=spread(values_of(tpot_s, fine)),
        itl_chunk_ms=spread(gap for sample in fine for gap in chunk_gaps_s(sample)),
        itl_token_ms=None if None in per_token else spread(gap for gaps in per_token for gap in gaps or []),
        e2el_ms=spread(sample.end_s - sample.begin_s for sample in fine),
        late_ms=spread(max(0.0, sample.begin_s - sample.due_s) for sample in run.samples),
        client_cpu_share=run.client_cpu_s / duration_s,
    )


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The number of requests that met the objectives."""

    objectives_ms: dict[str, float]  # the limits; a request must meet all of them
    num_good: int  # requests that did. Failed ones and ones without text do not
    requests_per_s: float  # these, per second of the whole run
    attainment: float  # these, as a share of all requests
    attainment_of: dict[str, float]  # for each objective alone, the share of all requests that met it


def parse_objectives(given: Sequence[str]) -> dict[str, float]:
    """Reads objectives like ``ttft:200``, in milliseconds. Raises ConfigError."""
    found: dict[str, float] = {}
    for item in given:
        name, _, limit = item.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = -1.0
        if name not in OBJECTIVES or not found[name] > 0:
            raise ConfigError(
                f"--goodput {item!r} is no objective; give milliseconds like ttft:200 tpot:50 e2e:5000.",
                param="goodput",
            )
    return found


def goodput(run: Run, objectives_ms: dict[str, float]) -> Goodput:
    met = [
        {name for name, limit_ms in objectives_ms.items() if _meets(sample, name, limit_ms)} for sample in run.samples
    ]
    num_requests = max(1, len(run.samples))
    num_good = sum(len(names) == len(objectives_ms) for names in met)
    return Goodput(
        objectives_ms=objectives_ms,
        num_good=num_good,
        requests_per_s=num_good / max(run.end_s - run.begin_s, 1e-9),
        attainment=num_good / num_requests,
        attainment_of={name: sum(name in names for names in met) / num_requests for name in objectives_ms},
    )


def _meets(sample: Sample, name: str, limit_ms: float) -> bool:
    if sample.error or not sample.chunk_s:
        return False
    if name == "e2e":
        seconds: float | None = sample.end_s - sample.begin_s
    else:
        seconds = ttft_s(sample) if name == "ttft" else tpot_s(sample)
    return seconds is None or seconds * 1e3 <= limit_ms  # a single token has no TPOT to miss


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The n-th request of all chats."""

    number: int  # n, from 1
    num_ok: int  # requests that ended well; the rest is about these
    ttft_ms: Spread
    num_prompt: int  # prompt tokens
    num_cached: int | None  # of these, from the prefix cache, or None if the server does not tell
    num_known: int  # of these, whole pages that were sent or generated in earlier rounds: what a perfect cache holds

    @property
    def hit_rate(self) -> float | None:
        return None if self.num_cached is None else self.num_cached / max(1, self.num_prompt)

    @property
    def best_hit_rate(self) -> float:
        """The hit rate of a perfect cache."""
        return self.num_known / max(1, self.num_prompt)


def by_round(run: Run, rounds: MultiturnOptions, page_size: int) -> list[Round]:
    """Summarises the samples of each round; the server's cache finds whole pages, and never a prompt's last token."""
    found = []
    for turn in range(rounds.num_rounds):
        fine = [sample for sample in run.samples if sample.turn == turn and not sample.error]
        num_prompt = sum(max(0, sample.num_prompt) for sample in fine)
        found.append(
            Round(
                number=turn + 1,
                num_ok=len(fine),
                ttft_ms=spread(values_of(ttft_s, fine)),
                num_prompt=num_prompt,
                num_cached=cached_tokens(fine),
                num_known=sum(_known(sample, rounds.request_length, page_size) for sample in fine),
            )
        )
    return found


def _known(sample: Sample, request_length: int, page_size: int) -> int:
    """Returns the tokens in whole pages of what came before a request, of which at least one token is new."""
    return max(0, sample.num_prompt - request_length) // page_size * page_size


def num_without_ids(run: Run) -> int:
    """Counts replies without token ids: they are missing from the chats' later prompts."""
    return sum(not sample.error and sample.num_output > 0 and not sample.output_ids for sample in run.samples)
