"""States and rings that rows carry along: the same tokens whoever drafts, whatever became of a prompt's pages, with graphs too.

Exact: float64 on the CPU, where graphs are recorded, against an engine without graphs that guesses and reuses nothing. Heads of
random weights would be right in 0 of 240 drafts: what they draft is rehearsed, so that states and rings follow accepted drafts too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.engine.host_loads import LoadCostModel
from hiserve.llm.rehearsed import RehearsedLLM
from hiserve.models.model_config import NANO, find_model
from tests.helpers import cache_paths
from tests.helpers.cache_paths import (
    Case,
    Work,
    answer_repeating,
    failed_loads,
    garbled_pages,
    host_hits,
    pairwise,
    preemption,
    resumed_replies,
    store_hits,
    storm,
)
from tests.helpers.compressed_models import add_stream_head, save_compressed
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.state_models import save_with_head
from tests.helpers.widening import some

SEED, VOCAB, ACCEPTANCE = 67, 4096, 0.6  # the vocabulary of hiserve-nano's tokenizer
FAMILIES = ("deepseek_v4", "qwen3_5_text")
PATHS: tuple[Callable[..., None], ...] = (
    preemption,
    host_hits,
    resumed_replies,
    store_hits,
    storm,
    failed_loads,
    garbled_pages,
)
ALL: list[Case] = [
    case
    for case in product(FAMILIES, PATHS, ("off", "ngram", "mtp"), ("greedy", "drawn"), (16, 32), (0, 1), ("off", "all"))
    if case[1] is not storm or case[4] == 16  # the beginnings that prompts share are shorter than longer pages
]
USUAL: list[Case] = [
    ("deepseek_v4", resumed_replies, "mtp", "greedy", 16, 0, "off"),
    ("qwen3_5_text", storm, "mtp", "drawn", 16, 1, "off"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    compressed, states = (tmp_path_factory.mktemp(family) for family in FAMILIES)
    add_stream_head(save_compressed(compressed, vocab_size=VOCAB))
    save_with_head("qwen3_5_text", states, vocab_size=VOCAB)
    shutil.copy(find_model(NANO) / "tokenizer.json", states)
    return dict(zip(FAMILIES, (compressed, states), strict=True))


@lru_cache
def work_of(folder: Path, how: str) -> Work:
    return answer_repeating(folder, how, SEED, VOCAB, tail_share=0.5)


def rehearsed(work: Work, *, in_process: bool, **settings: Any) -> RehearsedLLM:
    """Returns an engine whose drafts are right so often."""
    assert in_process
    llm = RehearsedLLM(**settings)
    pairs = zip(work.prompts, work.sampling, work.expected, strict=True)
    llm.rehearse({sampling.seed or 0: prompt + said.token_ids for prompt, sampling, said in pairs}, ACCEPTANCE)
    return llm


def named(case: Case) -> str:
    family, path, *rest = case
    return "-".join(map(str, (family, path.__name__, *rest)))


@pytest.mark.parametrize(
    "case", some([(case,) for case in dict.fromkeys((*USUAL, *pairwise(ALL)))], *((case,) for case in USUAL)), ids=named
)
def test_what_rows_carry_along_changes_nothing(
    case: Case, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, path, proposer, how, page_size, depth, graphs = case
    work = work_of(folders[family], how)
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *measures: True)
    if proposer == "mtp":
        monkeypatch.setattr(cache_paths, "LLM", partial(rehearsed, work))
    executors = allow_recording(monkeypatch)
    source = {"mtp": f"mtp:{folders[family]}"}.get(proposer, proposer)
    options = {"spec": source, "spec_steps": 2, "overlap": depth, "graphs": graphs, "kv_canary": False}
    path(work, tmp_path, page_size, model=str(folders[family]), tail_share=0.6, **options)
    replays = [sum(executor.gate_counts().get("replay", {}).values()) for executor in executors]
    assert all((num_replays > 10) == (graphs == "all") for num_replays in replays), replays
