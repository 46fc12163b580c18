"""Replies of engines on GPUs, which groups and a group of one give alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from hiserve import LLM, SamplingParams

SETTINGS: dict[str, Any] = {
    "in_process": True,
    "device": "cuda",
    "max_model_len": 512,
    "max_running_requests": 16,
    "max_batched_tokens": 512,
    "kv_pages": 600,
    "page_size": 16,
    "host_cache_gib": 0,
    "attention_backend": "triton",
    "log_level": "warning",
}
RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(7, 4096, 20 + 37 * index).tolist() for index in range(8)]


def sampling(max_tokens: int = 40) -> list[SamplingParams]:
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.0, "frequency_penalty": 0.3},
    ]
    return [SamplingParams(seed=i, max_tokens=max_tokens, ignore_eos=True, **ways[i % 4]) for i in range(len(PROMPTS))]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, sampling())]


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """Share of tokens before the first that differs in each reply."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(one, other, strict=True)
    ]
    return sum(same) / sum(map(len, one))
