"""Keys and values in 8 bits: the same tokens whatever became of a prompt's pages, with graphs, drafts, chunks and preemption.

Exact: float64 on the CPU, where graphs are recorded, against an engine with keys and values in 8 bits that reuses nothing.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.models.model_config import NANO, find_model
from tests.helpers.cache_paths import (
    Work,
    answer,
    chunks,
    garbled_pages,
    host_hits,
    pool,
    preemption,
    store_hits,
    storm,
)
from tests.helpers.models import Engine, save_family, save_llama
from tests.helpers.plans import HandPlanner
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.small_model import small_model
from tests.helpers.tiered import host_of
from tests.helpers.widening import some

HELD_OUT = Path(__file__).parents[1] / "data" / "held_out_prompts.jsonl"
PAGE, WINDOW = 16, 21
PACKED: dict[str, Any] = {"kv_dtype": "fp8"}
# Path, model, and settings; where windows have pages of their own, their scales have these too.
CASES: dict[str, tuple[Callable[..., None], str, dict[str, Any]]] = {
    "storm": (storm, "small", {"spec": "eagle3", "spec_steps": 2, "overlap": 1, "graphs": "all", "kv_canary": False}),
    "preemption": (preemption, "small", {"spec": "mtp", "spec_steps": 2, "max_batched_tokens": 16}),
    "windows": (host_hits, "windows", {"spec": "ngram", "overlap": 1, "graphs": "all", "kv_canary": False}),
    "store": (store_hits, "small", {"spec": "off"}),
    "chunks": (chunks, "windows", {"spec": "ngram", "window_pages": "auto"}),
    "garbled": (garbled_pages, "small", {"spec": "ngram", "overlap": 1}),
}
USUAL = ("windows", "store")  # and what ``test_speed_matrix.py`` has


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    windows = tmp_path_factory.mktemp("windows")
    save_family("gpt_oss", windows, vocab_size=4096, sliding_window=WINDOW, head_dim=32)
    shutil.copy(find_model(NANO) / "tokenizer.json", windows)
    return {"small": Path(small_model()), "windows": windows}


@lru_cache
def work_of(folder: Path) -> Work:
    """Prompts that repeat themselves, and share their beginnings in pairs."""
    rng = np.random.default_rng(61)
    shared = rng.integers(7, 4096, 20).tolist()
    prompts = [shared * 2 + rng.integers(7, 4096, 4 + 11 * index).tolist() + shared[:9] for index in range(4)]
    options: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9}] * 2
    sampling = [SamplingParams(seed=i, max_tokens=14, ignore_eos=True, **each) for i, each in enumerate(options)]
    return answer(prompts, sampling, model=str(folder), **PACKED)


@pytest.mark.parametrize("name", some(CASES, *USUAL))
def test_tokens_are_those_of_an_engine_that_reuses_nothing(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model, options = CASES[name]
    work = work_of(folders[model])
    if options.get("graphs") == "all":
        allow_recording(monkeypatch)
    path(work, tmp_path, PAGE, **{"model": str(folders[model])} | PACKED | options)


def test_bytes_of_a_page_depend_on_its_tokens_alone() -> None:
    """Computed at once, in chunks that end within pages, and beside rows that decode: the pages on the host are the same."""
    rng = np.random.default_rng(3)
    prompt, other = (rng.integers(7, 4096, 5 * PAGE + 3).tolist() for _ in range(2))
    kept = []
    for step, others in ((128, []), (23, [other])):
        settings = {"dtype": "float64", "host_cache_gib": 0.01, "spec": "off", "max_batched_tokens": step}
        settings |= {"in_process": True, "max_model_len": 160, "max_running_requests": 4, "cpu_threads": 1}
        with LLM(**settings | pool(PAGE) | PACKED) as llm:
            llm.generate([prompt, *others], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
            llm.generate([other[:3]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
            host = host_of(llm)
            layout = host.layout
            (values, scales) = layout.groups[:2]
            assert (values.codec, scales.codec) == ("heads", "scales")
            kept.append({bytes(host.buffer(page)) for page in range(1, host.num_pages)} - {bytes(layout.page_bytes)})
    assert len(kept[0] & kept[1]) >= 5, [len(each) for each in kept]


def test_logits_do_not_depend_on_chunks_and_differ_a_little_from_those_of_wide_rows(tmp_path: Path) -> None:
    save_llama(tmp_path)
    prompt = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    found = []
    for packs, chunk in ((True, 70), (True, 9), (False, 70)):
        engine = Engine(tmp_path, dtype="float64", attention="cpu", packs_rows=packs)
        found.append(engine.logits(HandPlanner(16, 64, shuffle_seed=chunk), {1: prompt}, chunk)[1])
        engine.executor.close()
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)
    error = (found[0] - found[2]).norm() / found[2].norm()
    assert 1e-4 < error < 0.2, error


def test_the_loss_on_held_out_dialogues_is_nearly_that_of_wide_rows() -> None:
    """Of hiserve-nano, in texts that it was not trained on; 0.5 % at most."""
    texts = [json.loads(line)["prompt"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    texts = sorted(texts, key=len)[-4:]
    losses = {}
    for dtype in ("bf16", "fp8"):
        with LLM(model=NANO, in_process=True, max_model_len=1024, cpu_threads=1, spec="off", kv_dtype=dtype) as llm:
            asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            found = [each.prompt_logprobs[1:] for each in llm.generate(texts, asked)]
            losses[dtype] = -float(np.mean([token.logprob for each in found for token in each]))
    assert math.isfinite(losses["fp8"]) and losses["fp8"] != losses["bf16"]
    assert abs(losses["fp8"] / losses["bf16"] - 1) < 0.005, losses
