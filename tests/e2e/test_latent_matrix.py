"""Latent attention: the same tokens whoever drafts, whatever became of a prompt's pages, with graphs too.

Exact: float64 on the CPU, where graphs are recorded, against an engine without graphs that guesses and reuses nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.models.model_config import NANO, find_model
from tests.helpers.cache_paths import (
    SETTINGS,
    Case,
    Work,
    answer_repeating,
    device_hits,
    host_hits,
    pairwise,
    pool,
    preemption,
    store_hits,
)
from tests.helpers.latent_models import FAMILIES, save_with_mtp
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.widening import usual

SEED, VOCAB = 61, 4096  # tokens of hiserve-nano's tokenizer
PATHS: tuple[Callable[..., None], ...] = (preemption, device_hits, host_hits, store_hits)
ALL: list[Case] = list(
    product(FAMILIES, PATHS, ("off", "ngram", "mtp"), ("greedy", "drawn"), (8, 16), (0, 1), ("off", "all"))
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    folders = {family: tmp_path_factory.mktemp("model") for family in FAMILIES}
    for family, folder in folders.items():
        save_with_mtp(family, folder, vocab_size=VOCAB)
        shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return folders


@lru_cache
def work_of(folder: Path, how: str) -> Work:
    return answer_repeating(folder, how, SEED, VOCAB)


def named(case: Case) -> str:
    family, path, *rest = case
    return "-".join(map(str, (family, path.__name__, *rest)))


def run(case: Case, folders: dict[str, Path], folder: Path, patch: pytest.MonkeyPatch) -> None:
    family, path, proposer, how, page_size, depth, graphs = case
    work = work_of(folders[family], how)
    executors = allow_recording(patch)
    source = {"mtp": f"mtp:{folders[family]}"}.get(proposer, proposer)
    options = {"spec": source, "spec_steps": 2, "overlap": depth, "graphs": graphs, "kv_canary": False}
    path(work, folder, page_size, model=str(folders[family]), **options)
    replays = [sum(executor.gate_counts().get("replay", {}).values()) for executor in executors]
    assert all((num_replays > 10) == (graphs == "all") for num_replays in replays), replays


@pytest.mark.parametrize("case", usual(pairwise(ALL)), ids=named)
def test_rows_of_latents_change_nothing(
    case: Case, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(case, folders, tmp_path, monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_is_right_is_always_accepted(family: str, tmp_path: Path) -> None:
    """Each step gives as many tokens as it computes; pages that a head has drafted for are hits too."""
    folder = save_with_mtp(family, tmp_path, is_right=True, vocab_size=VOCAB)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    prompt, sampling = list(range(40, 75)), SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)  # 1 + 6 * 4
    found = []
    for spec in ("off", "mtp"):
        settings = SETTINGS | pool(8) | {"spec": spec, "spec_steps": 3, "host_cache_gib": 0, "model": str(folder)}
        with LLM(**settings) as llm:
            first, again = (llm.generate([prompt], [sampling])[0] for _ in range(2))
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
        assert again.cached.num_tokens == 32
        found.append(first.outputs[0])
    plain, drafted = found
    assert plain.token_ids == drafted.token_ids and len(set(plain.token_ids)) > 1
    assert drafted.drafts is not None
    assert drafted.drafts.accepted == drafted.drafts.proposed == 18


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=named)
def test_the_whole_product_changes_nothing(
    case: Case, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(case, folders, tmp_path, monkeypatch)
