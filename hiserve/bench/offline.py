"""Throughput of an engine behind the offline API, which is given to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from hiserve.bench.request import Workload
from hiserve.core.request import SamplingParams


class Engine(Protocol):
    """As much of the offline API as is used here."""

    def generate(self, prompts: Any, sampling: Any = None) -> Sequence[Any]:
        """Generates for every prompt."""


class OfflineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of an offline run.

    Attributes:
        duration_s: From giving the prompts to the last reply.
        num_requests: Prompts.
        num_prompt: Prompt tokens.
        num_cached: Of these, from the prefix cache.
        num_output: Output tokens.
        requests_per_s: Requests.
        input_tokens_per_s: Prompt tokens.
        output_tokens_per_s: Output tokens.
        total_tokens_per_s: Both.
        lengths: Prompt and output tokens of each request.
    """

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


def measure(engine: Engine, workload: Workload, *, temperature: float) -> OfflineSummary:
    """Warms up with one request of the first one's size, then gives all prompts at once and waits.

    Args:
        engine: The offline API.
        workload: Token-id prompts, one turn a session.
        temperature: Sampling temperature.
    """
    turns = [turns[0] for turns in workload.sessions]
    prompts = [np.asarray(turn.prompt).tolist() for turn in turns]
    params = [SamplingParams(temperature=temperature, max_tokens=turn.max_tokens, ignore_eos=True) for turn in turns]
    engine.generate([prompts[0][::-1]], params[0])
    begin = time.perf_counter()
    outputs = engine.generate(prompts, params)
    duration_s = time.perf_counter() - begin
    lengths = [(len(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in outputs]
    num_prompt, num_output = (sum(column) for column in zip(*lengths, strict=True))
    return OfflineSummary(
        duration_s=duration_s,
        num_requests=len(outputs),
        num_prompt=num_prompt,
        num_cached=sum(output.num_cached_tokens for output in outputs),
        num_output=num_output,
        requests_per_s=len(outputs) / duration_s,
        input_tokens_per_s=num_prompt / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_prompt + num_output) / duration_s,
        lengths=lengths,
    )
