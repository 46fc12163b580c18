"""Graphs of models with states: the tokens of eager steps, through prompts, drafts and rows that pad."""

from __future__ import annotations

import shutil
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.models.delta_layer import DeltaLayer
from hiserve.models.model_config import NANO, find_model
from tests.helpers.models import save_family
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.widening import some

SAMPLING = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "in_process": True,
    "page_size": 4,
    "kv_pages": 200,
    "max_model_len": 128,
    "max_running_requests": 4,
    "max_batched_tokens": 24,
    "host_cache_gib": 0,
}


def prompts() -> list[list[int]]:
    """More than there are rows; some repeat themselves, so that n-grams are found."""
    generator = torch.Generator().manual_seed(8)
    some = [torch.randint(5, 300, (n,), generator=generator).tolist() for n in (1, 2, 3, 4, 9, 30)]
    return [*some, some[4] * 4, some[5][:7] * 3]


def generate(folder: Path, **settings: Any) -> list[list[int]]:
    with LLM(str(folder), **SETTINGS | settings) as llm:
        return [list(result.outputs[0].token_ids) for result in llm.generate(prompts(), SAMPLING)]


@pytest.mark.parametrize(
    ("family", "overrides", "spec", "depth"),
    [
        ("qwen3_5_text", {}, "off", 1),
        pytest.param("qwen3_5_text", {"num_hidden_layers": 3}, "ngram", 1, marks=pytest.mark.wide),
        ("qwen3_5_moe_text", {}, "ngram", 0),
    ],
)
def test_graphs_give_the_tokens_of_eager_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, overrides: dict[str, Any], spec: str, depth: int
) -> None:
    torch.set_num_threads(1)
    save_family(family, tmp_path, **overrides)
    shutil.copy(find_model(NANO) / "tokenizer.json", tmp_path)
    expected = generate(tmp_path, spec="off")
    executors = allow_recording(monkeypatch)
    drafts = {} if spec == "off" else {"spec_steps": 3}
    assert generate(tmp_path, spec=spec, overlap=depth, graphs="all", **drafts) == expected
    counts = Counter[str]()
    for executor in executors:
        counts.update(executor.gate_counts()["replay"])
    print(counts)
    assert counts["decode" if spec == "off" else "verify"] and counts["mixed"] and not counts["piecewise"]


@pytest.mark.parametrize("depth", some([0, 1], 1))
def test_a_step_that_fails_half_way_leaves_no_state_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """H14: memory runs out between two layers, of which the first has advanced its states already."""
    torch.set_num_threads(1)
    save_family("qwen3_5_text", tmp_path)
    shutil.copy(find_model(NANO) / "tokenizer.json", tmp_path)
    expected = generate(tmp_path, spec="off")
    compute, calls = DeltaLayer.__call__, count()

    def fail_at_times(self: DeltaLayer, *args: Any) -> torch.Tensor:
        out = compute(self, *args)
        if next(calls) % 23 == 11:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out

    monkeypatch.setattr(DeltaLayer, "__call__", fail_at_times)
    assert generate(tmp_path, spec="ngram", spec_steps=3, overlap=depth) == expected
    assert next(calls) > 23 * 3
