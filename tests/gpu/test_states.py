"""Recurrent states on CUDA: graphs and eager steps say what the reference says, through prompts, drafts and snapshots."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.models.model_config import NANO, find_model
from tests.helpers.state_models import save_with_head

pytestmark = pytest.mark.gpu

NUM_NEW = 48
# Heads of sizes that the kernels take.
SIZES: dict[str, Any] = {"head_dim": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
SETTINGS: dict[str, Any] = {
    "in_process": True,
    "page_size": 16,
    "kv_pages": 400,
    "max_model_len": 256,
    "max_running_requests": 8,
    "max_batched_tokens": 96,
    "host_cache_gib": 0,
    "tail_every": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_with_head("qwen3_5_text", tmp_path_factory.mktemp("states"), **SIZES)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return folder


def prompts() -> list[list[int]]:
    """Every length around that of a step that verifies drafts; others end around boundaries; some repeat themselves."""
    generator = torch.Generator().manual_seed(8)
    some = [torch.randint(5, 300, (n,), generator=generator).tolist() for n in (1, 2, 3, 4, 5, 15, 16, 17, 33, 100)]
    return [*some, some[5] * 4, some[8][:9] * 5]


def generate(folder: Path, **settings: Any) -> list[list[list[int]]]:
    """Answers everything twice: the second time, prompts resume from snapshots."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    told = []
    with LLM(str(folder), **SETTINGS | settings) as llm:
        for _ in range(2):
            results = llm.generate(prompts(), sampling)
            told.append([list(result.outputs[0].token_ids) for result in results])
        assert sum(result.cached.num_tokens for result in results) > 0
    return told


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    return generate(folder, device="cpu", dtype="float64", spec="off", max_batched_tokens=48)


@pytest.mark.parametrize("graphs", ["off", "decode", "all"])
@pytest.mark.parametrize("spec", ["off", "ngram", "mtp"])
def test_steps_of_every_kind_give_the_tokens_of_the_reference(
    folder: Path, expected: list[list[list[int]]], graphs: str, spec: str
) -> None:
    """One graph crosses boundaries of pages and snapshots, with drafts of which some are rejected."""
    drafts = {} if spec == "off" else {"spec_steps": 3}
    found = generate(
        folder, device="cuda", dtype="float64", attention_backend="reference", spec=spec, graphs=graphs, **drafts
    )
    assert found == expected


@pytest.mark.parametrize("graphs", ["off", "all"])
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_attention_backends_are_told_of_the_first_layer_that_attends(
    folder: Path, expected: list[list[list[int]]], graphs: str, backend: str
) -> None:
    """The first layers of this model have no attention; rounding may change a token late in a reply, and no early one."""
    found = generate(folder, device="cuda", dtype="float32", attention_backend=backend, spec="off", graphs=graphs)
    for ours, theirs in zip(found, expected, strict=True):
        assert [each[:8] for each in ours] == [each[:8] for each in theirs]
