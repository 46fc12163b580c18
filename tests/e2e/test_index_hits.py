"""Models with an index beside their latents, through the whole engine: transformers' tokens, cold and resumed, on all tiers.

All memory is NaN that no page or transfer holds. transformers computes without a cache.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.engine.host_loads import LoadCostModel
from hiserve.models.model_config import NANO, find_model
from tests.helpers.compressed_models import PoisonedPool
from tests.helpers.compressed_oracle import SETTINGS, check_replies, prompts_of
from tests.helpers.latent_models import INDEXED, save_latent

PAGE, VOCAB = 8, 4096  # tokens of the tokenizer
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("deepseek_v32", {}),
    "a choice is shared, drafts, overlap": ("glm_moe_dsa", {"spec": "ngram", "spec_steps": 3, "overlap": 1}),
    "preemption": ("deepseek_v32", {"kv_pages": 20, "spec": "ngram", "spec_steps": 2}),
    "host": ("glm_moe_dsa", {"kv_pages": 28, "host_cache_gib": 0.01, "overlap": 1}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    made = {family: save_latent(family, tmp_path_factory.mktemp(family), vocab_size=VOCAB) for family in INDEXED}
    for folder in made.values():
        shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return made


def shared_prompts() -> list[list[int]]:
    """Prompts that share beginnings, on a boundary of a page, beside one, and none; the last repeats itself."""
    base, *others = prompts_of(40, 3, 20, 64, 1, 20)
    shared = [base[:length] + other for length, other in zip((37, 40, 0, 33, 32), others, strict=True)]
    return [*shared, base[:7] * 6]


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers_whatever_is_cached(
    case: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5: once more, and as beginnings of longer prompts; a repeated prompt of L tokens computes the last page of L - 1 again."""
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *measures: True)
    family, options = CASES[case]
    sampling = SamplingParams(temperature=0.0, max_tokens=16 if case == "preemption" else 10, ignore_eos=True)
    pools, prompts, folder = PoisonedPool(monkeypatch), shared_prompts(), folders[family]
    settings = SETTINGS | {"page_size": PAGE, "disable_prefix_cache": False, "kv_pages": 300} | options
    with LLM(model=str(folder), **settings) as llm:
        engine = pools.watch(llm)

        def told(prompts: list[list[int]]) -> list[list[int]]:
            return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling)]

        first = told(prompts)
        before = engine.stats().cached_tokens
        assert told(prompts) == first
        cached = engine.stats().cached_tokens - before
        turns = [[*prompt, *reply, 5, 6] for prompt, reply in zip(prompts, first, strict=True)]
        later = told(turns)
        stats = engine.stats()
    check_replies(folder, prompts, first)
    check_replies(folder, turns, later)
    whole = sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)
    assert 0 < cached <= whole and stats.stale_rows == 0
    if "kv_pages" not in options:
        assert cached == whole
    assert stats.preemptions > 0 or case != "preemption"
    assert stats.cache.loads.num_fulfilled > 0 or case != "host"
    assert len({token for reply in first + later for token in reply}) > 20
