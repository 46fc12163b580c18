"""Sliding windows and experts: the same tokens whoever drafts, whatever became of a prompt's pages, with graphs too.

Exact: float64 on the CPU, where graphs are recorded, against an engine without graphs that guesses and reuses nothing.
The models are small and drawn; so are the heads that draft for them, which are right now and then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.ipc.messages import Admit
from hiserve.models.model_config import NANO, find_model
from tests.helpers.cache_paths import (
    SETTINGS,
    Case,
    Work,
    answer,
    ask,
    host_hits,
    pairwise,
    pool,
    preemption,
    store_hits,
    storm,
)
from tests.helpers.gated import run_until
from tests.helpers.models import SHAPE, save_family
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.tiered import check_whole, engine_of
from tests.helpers.widening import usual
from tools.nano.head_files import export_head
from tools.nano.heads import Eagle3Head, MTPHead
from tools.nano.model import Nano, NanoConfig

SEED, NUM_NEW, WINDOW, PAGE = 53, 16, 21, 16
VOCAB = 4096  # of the tokenizer of hiserve-nano
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mistral", {"sliding_window": WINDOW}),
    "windows in some layers": ("gemma3_text", {"sliding_window": WINDOW}),  # and two rotations
    "experts": ("gpt_oss", {"sliding_window": WINDOW}),  # windows in some layers and sinks, too
    "experts in some layers": ("qwen3_moe", {}),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_p": 0.95},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {11: 2.0}},
}


def replay(work: Work, folder: Path, page_size: int, **settings: object) -> None:
    """Another worker goes on with what one has said, which comes as one sequence."""
    with LLM(**SETTINGS | pool(page_size) | {"host_cache_gib": 0} | settings) as llm:
        engine, told = engine_of(llm), dict[int, list[int]]()
        for uid, (prompt, sampling, expected) in enumerate(
            zip(work.prompts, work.sampling, work.expected, strict=True), start=1
        ):
            said = expected.token_ids[: 3 * uid]
            told[uid] = list(said)
            engine.add(Admit(uid, len(prompt), sampling, b"", 0), np.array(prompt + said, dtype=np.int32))
        run_until(engine, told, lambda: not engine.has_work)
        assert list(told.values()) == [expected.token_ids for expected in work.expected]
        ask(llm, work)
        check_whole(llm)


PATHS: tuple[Callable[..., None], ...] = (preemption, host_hits, store_hits, storm, replay)
PROPOSERS = ("off", "ngram", "draft_model", "eagle3", "mtp")
ALL: list[Case] = list(product(FAMILIES, PATHS, PROPOSERS, SAMPLING, (0, 1), ("off", "all")))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the models, and of the heads of either kind."""
    torch.set_num_threads(1)
    folders = {name: tmp_path_factory.mktemp("model") for name in FAMILIES}
    for name, (family, overrides) in FAMILIES.items():
        save_family(family, folders[name], vocab_size=VOCAB, **overrides)
        shutil.copy(find_model(NANO) / "tokenizer.json", folders[name])
    target = Nano(
        NanoConfig(
            vocab_size=VOCAB,
            hidden_size=SHAPE["hidden_size"],
            num_layers=SHAPE["num_hidden_layers"],
            num_heads=SHAPE["num_attention_heads"],
            num_kv_heads=SHAPE["num_key_value_heads"],
            head_dim=SHAPE["head_dim"],
            ffn_size=SHAPE["intermediate_size"],
            max_positions=SHAPE["max_position_embeddings"],
        )
    )
    for kind, head in {"eagle3": Eagle3Head(target, (0, 1, 2)), "mtp": MTPHead(target)}.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        export_head(head, target.config, folders[kind])
    return folders


@lru_cache
def work_of(folder: Path, how: str) -> Work:
    """Prompts that repeat themselves, longer than the window, and share their beginnings in pairs."""
    print(f"seed {SEED}")
    rng = np.random.default_rng([SEED, list(SAMPLING).index(how)])
    shared = rng.integers(7, VOCAB, 18).tolist()
    prompts = [shared * 2 + rng.integers(7, VOCAB, 4 + 11 * index).tolist() + shared[:9] for index in range(4)]
    sampling = [SamplingParams(seed=i, max_tokens=NUM_NEW, ignore_eos=True, **SAMPLING[how]) for i in range(4)]
    return answer(prompts, sampling, model=str(folder))


def named(case: Case) -> str:
    name, path, proposer, how, depth, graphs = case
    return f"{name.replace(' ', '_')}-{path.__name__}-{proposer}-{how}-depth_{depth}-graphs_{graphs}"


def run(case: Case, folders: dict[str, Path], folder: Path, patch: pytest.MonkeyPatch) -> None:
    name, path, proposer, how, depth, graphs = case
    work = work_of(folders[name], how)
    source = {"draft_model": f"draft:{folders[name]}"} | {kind: f"{kind}:{folders[kind]}" for kind in ("eagle3", "mtp")}
    executors = allow_recording(patch)
    options = {"spec": source.get(proposer, proposer), "spec_steps": 2, "overlap": depth, "graphs": graphs}
    path(work, folder, PAGE, model=str(folders[name]), kv_canary=False, **options)
    replays = [sum(executor.gate_counts().get("replay", {}).values()) for executor in executors]
    assert all((num_replays > 10) == (graphs == "all") for num_replays in replays), replays


@pytest.mark.parametrize("case", usual(pairwise(ALL)), ids=named)
def test_windows_and_experts_change_nothing(
    case: Case, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(case, folders, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=named)
def test_the_whole_product_changes_nothing(
    case: Case, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(case, folders, tmp_path, monkeypatch)
