"""Turns samples into the figures people compare: latencies, throughput, cache share, errors.

The definitions are those that SGLang's and vLLM's serving benchmarks share, so that figures can be compared:

- TTFT: first chunk that carries text - sending. E2EL: last chunk - sending.
- TPOT of a request: (E2EL - TTFT) / (output tokens - 1); requests with one output token have none.
- ITL per chunk: gaps between chunks, of all requests together. ITL per token: each gap divided by the tokens
  it brought, once for each of them; only where the server tells its running token count, or sent one chunk a
  token. Chunks may carry several tokens: compare TPOT between engines, not ITL per chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from hiserve.bench.series import SteadyState, peak_in_flight, steady_state
from hiserve.bench.workload import Run, Sample


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
    itl_token_ms: Spread | None  # gaps per token, or None when they cannot be told
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
