"""Engines of models with compressed attention, and what transformers makes of their prompts, without its cache."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from tests.helpers.compressed_models import VOCAB, PoisonedPool
from tests.helpers.models import load_transformers

PAGE, NUM_NEW = 16, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_model_len": 128,
    "page_size": PAGE,
    "kv_pages": 60,
    "max_running_requests": 4,
    "max_batched_tokens": 24,
    "cpu_threads": 1,
    "host_cache_gib": 0,
    "spec": "off",
    "in_process": True,
    "disable_prefix_cache": True,
}


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@lru_cache
def oracle_of(folder: Path, dtype: torch.dtype) -> Any:
    return load_transformers(folder, dtype)


@torch.inference_mode()
def expected_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    logits: torch.Tensor = oracle_of(folder, dtype)(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def check_replies(folder: Path, prompts: list[list[int]], replies: list[list[int]]) -> None:
    """Every token is the likeliest behind those before it."""
    for prompt, reply in zip(prompts, replies, strict=True):
        likeliest = expected_logits(folder, prompt + reply).argmax(-1)[len(prompt) - 1 : -1]
        assert reply == likeliest.tolist(), f"a prompt of {len(prompt)} tokens"


def generate(folder: Path, patch: pytest.MonkeyPatch, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    pools = PoisonedPool(patch)
    with LLM(model=str(folder), **SETTINGS | options) as llm:
        engine = pools.watch(llm)
        replies = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY)]
        assert engine.stats().stale_rows == 0
    return replies
