"""Graphs of models with an index beside their latents: transformers' tokens, from steps of every kind.

All memory is NaN that no page holds.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.models.model_config import NANO, find_model
from hiserve.runners import capture
from tests.helpers.compressed_models import PoisonedPool
from tests.helpers.compressed_oracle import SETTINGS, check_replies, prompts_of
from tests.helpers.latent_models import save_with_mtp
from tests.helpers.recorded_llm import allow_recording

# Of GLM-5 the first layer chooses for the second.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("glm_moe_dsa", {"spec": "off"}),
    "a head": ("deepseek_v32", {"spec": "mtp", "spec_steps": 2, "overlap": 1}),
    "short": (
        "glm_moe_dsa",
        {"spec": "ngram", "spec_steps": 2, "max_model_len": 48},
    ),  # graphs in which all tokens are seen
}


@pytest.mark.parametrize("case", CASES)
def test_graphs_give_the_tokens_of_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H13: replies cross pages and the number of tokens that are chosen, beside prompts that begin and end."""
    torch.set_num_threads(1)
    family, settings = CASES[case]
    is_short = case == "short"
    save_with_mtp(family, tmp_path, vocab_size=4096, index_topk=48 if is_short else 12)
    shutil.copy(find_model(NANO) / "tokenizer.json", tmp_path)
    monkeypatch.setattr(capture, "_ROWS", (2, 3))
    monkeypatch.setattr(capture, "_MIXED_TOKENS", (4, 24))
    pools, executors = PoisonedPool(monkeypatch), allow_recording(monkeypatch)
    prompts, num_new = prompts_of(*(30, 17, 9, 1) if is_short else (117, 17, 9, 1)), (14, 16, 6, 14)
    prompts[-1] = prompts[-1] * 3
    sampling = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in num_new]
    options = {
        "graphs": "all",
        "max_model_len": 144,
        "page_size": 8,
        "max_batched_tokens": 24,
        "max_running_requests": 3,
    }
    with LLM(model=str(tmp_path), **SETTINGS | options | settings) as llm:
        engine = pools.watch(llm)
        replies = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling)]
        assert engine.stats().stale_rows == 0
    check_replies(tmp_path, prompts, replies)
    counts = Counter[str]()
    for executor in executors:
        for action, reasons in executor.gate_counts().items():
            counts.update({f"{action}/{reason}": count for reason, count in reasons.items()})
    print(counts)
    assert counts["replay/mixed"] > 2 and counts["replay/decode"] + counts["replay/verify"] > 10
