"""Throughput of an engine through the offline API."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from hiserve.bench.load import Advance
from hiserve.bench.workload import Workload
from hiserve.core.request import SamplingParams


class OfflineEngine(Protocol):
    """As much of the offline API as is used here."""

    def generate(self, prompts: Any, sampling: Any = None) -> Sequence[Any]:
        """Generates for every prompt."""

    def generate_each(self, requests: Iterable[tuple[Any, SamplingParams]]) -> Iterator[Any]:
        """Yields a result for each prompt, in order."""


class OfflineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of an offline run, from giving the prompts to the last reply; ``lengths`` are prompt and output tokens of each."""

    duration_s: float
    num_requests: int
    num_prompt: int
    num_cached: int
    num_output: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    lengths: list[tuple[int, int]]


def measure(
    engine: OfflineEngine, workload: Workload, *, temperature: float, advance: Advance = lambda _: None
) -> OfflineSummary:
    """Warms up with one request of the first one's size, then gives all prompts at once and waits.

    After Ctrl-C returns the figures of the requests that had ended; raises KeyboardInterrupt if none had.
    """
    turns = [turns[0] for turns in workload.sessions]
    prompts = [np.asarray(turn.prompt).tolist() for turn in turns]
    params = [SamplingParams(temperature=temperature, max_tokens=turn.max_tokens, ignore_eos=True) for turn in turns]
    engine.generate([prompts[0][::-1]], params[0])
    begin = time.perf_counter()
    end = begin
    num_cached = 0
    lengths: list[tuple[int, int]] = []
    try:
        for output in engine.generate_each(zip(prompts, params, strict=True)):
            end = time.perf_counter()
            lengths.append((len(output.prompt_token_ids), len(output.outputs[0].token_ids)))
            num_cached += output.num_cached_tokens
            advance(f"{sum(length for _, length in lengths) / (end - begin):,.0f} tokens/s")
    except KeyboardInterrupt:
        if not lengths:
            raise
    return _summary(lengths, num_cached, end - begin)


def _summary(lengths: list[tuple[int, int]], num_cached: int, duration_s: float) -> OfflineSummary:
    num_prompt, num_output = (sum(column) for column in zip(*lengths, strict=True))
    return OfflineSummary(
        duration_s=duration_s,
        num_requests=len(lengths),
        num_prompt=num_prompt,
        num_cached=num_cached,
        num_output=num_output,
        requests_per_s=len(lengths) / duration_s,
        input_tokens_per_s=num_prompt / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_prompt + num_output) / duration_s,
        lengths=lengths,
    )
