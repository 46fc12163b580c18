"""Latent attention to the tokens that an index chooses, against transformers: logits and tokens, cold and from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.compressed_models import poison
from tests.helpers.latent_models import expand_from, save_latent
from tests.helpers.models import Engine, load_transformers
from tests.helpers.plans import HandPlanner

MAX_LOGIT_DIFFERENCE = 1e-4  # transformers casts norms, routers and scores to float32, in float64 models too
NUM_PAGES, PAGE_SIZE = 120, 4
LENGTHS = (3, 12, 13, 40, 71)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek_v32", {}),
    "glm": ("glm_moe_dsa", {}),
    "all layers of glm choose": ("glm_moe_dsa", {"indexer_types": None}),
    "one token is seen": ("deepseek_v32", {"index_topk": 1}),
    "every token is seen": ("deepseek_v32", {"index_topk": 71}),
}


def prompts_of(vocab_size: int = 320) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(3)
    return {
        row: torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        for row, length in enumerate(LENGTHS, 1)
    }


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged chunks over scattered pages, all memory NaN until somebody writes it; tokens that see all are expanded."""
    torch.set_num_threads(1)
    expand_from(3, monkeypatch)
    family, overrides = CASES[case]
    save_latent(family, tmp_path, **overrides)
    oracle, prompts = load_transformers(tmp_path, torch.float32), prompts_of()
    with torch.inference_mode():
        expected = {row: oracle(torch.tensor([prompt])).logits[0] for row, prompt in prompts.items()}
    for attention, chunk in (("cpu", 9), ("reference", 71), ("auto", 1)):
        engine = Engine(tmp_path, attention=attention, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        poison(engine.pool)
        logits = engine.logits(HandPlanner(PAGE_SIZE, NUM_PAGES, shuffle_seed=5), prompts, chunk=chunk)
        for row in prompts:
            assert (logits[row] - expected[row]).abs().max().item() <= MAX_LOGIT_DIFFERENCE, (attention, row)
