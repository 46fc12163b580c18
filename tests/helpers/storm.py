"""More traffic than the device's pages hold: prefixes that many share leave for the host and come back all the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hiserve import LLM, SamplingParams
from hiserve.ipc.messages import WorkerStats
from hiserve.kernels.reference import gumbel
from hiserve.kernels.step_reference import SAMPLE_STREAM
from hiserve.models.model_config import NANO, find_model
from tests.helpers import cuda
from tests.helpers.margin import MAX_SHARE, as_tensor, margin, shape_difference, teacher_forced
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.tiered import engine_of

PAGE, MAX_LEN = 16, 320
Requests = tuple[list[list[int]], list[SamplingParams]]


@dataclass(frozen=True)
class Load:
    """How much traffic.

    Attributes:
        num_requests: In all.
        num_running: At once.
        num_forewords: Prefixes that requests share; of six pages, in the mean.
        kv_pages: Of the device: much less than forewords and replies take.
    """

    num_requests: int
    num_running: int
    num_forewords: int
    kv_pages: int


def settings(load: Load, **options: Any) -> dict[str, Any]:
    return {
        "in_process": True,
        "spec": "off",
        "device": cuda.DEVICE,
        "dtype": "float32",
        "page_size": PAGE,
        "max_model_len": MAX_LEN,
        "max_running_requests": load.num_running,
        "max_batched_tokens": 2048,
        "cpu_threads": 1,
        "log_level": "warning",
    } | options


def load_whatever_it_costs(llm: LLM) -> None:
    """What the host has is loaded, also where computing it would be faster."""
    engine_of(llm)._planner._costs.is_worth_loading = lambda *_: True  # type: ignore[method-assign]


def tokens_of(llm: LLM, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(list(prompts), list(sampling))]


def check_margins(requests: Requests, tokens: list[list[int]], expected: list[list[int]]) -> None:
    """Tokens that another shape of batch rounded the other way: each must be as good as the best, and few may be."""
    num_requests = len(tokens)
    differing = [
        (prompt, params, got)
        for prompt, params, got, wanted in zip(*requests, tokens, expected, strict=True)
        if got != wanted
    ]
    print(f"{len(differing)} of {num_requests} replies differ")
    assert len(differing) <= MAX_SHARE * num_requests, f"{len(differing)} replies differ: {differing[:2]}"
    if not differing:
        return
    forced = {row: teacher_forced(prompt, tokens) for row, (prompt, _, tokens) in enumerate(differing, start=1)}
    sizes = {"num_pages": 21 * len(forced) + 1, "max_rows": len(forced), "max_len": MAX_LEN}
    scores = [
        Engine(find_model(NANO), device=cuda.DEVICE, attention="reference", **sizes).logits(
            HandPlanner(PAGE, sizes["num_pages"]), forced, chunk
        )
        for chunk in (64, 7)
    ]
    difference = shape_difference(scores[0], scores[1])
    for row, (prompt, sampling, tokens) in enumerate(differing, start=1):
        reference = scores[0][row][len(prompt) - 1 :].cpu().double()
        verdict = margin(reference + noise(prompt, sampling, tokens), as_tensor(tokens), difference)
        print(verdict)
        assert verdict.worst <= verdict.epsilon, (prompt, tokens, verdict)


def noise(prompt: list[int], sampling: SamplingParams, tokens: list[int]) -> torch.Tensor:
    """What drawing adds to the scores: the token is the best of the sum."""
    assert sampling.seed is not None
    places = torch.arange(len(prompt), len(prompt) + len(tokens))
    seeds = torch.full_like(places, sampling.seed)
    return sampling.temperature * gumbel(seeds, torch.zeros_like(places), places, SAMPLE_STREAM, 4096)


def share_of_replays(stats: WorkerStats) -> float:
    counts = stats.graph_gate
    num_steps = sum(sum(reasons.values()) for reasons in counts.values())
    share = sum(counts["replay"].values()) / num_steps
    print(f"{share:.4f} of {num_steps} steps replayed: {counts}")
    return share
