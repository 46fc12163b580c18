"""Constrained replies on a device: its draw kernels, and the same tokens with and without graphs, drafts and overlap."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.kernels import draw, step_reference
from hiserve.kernels.step_ops import TokenMasks
from tests.helpers.cache_paths import SETTINGS, pool
from tests.helpers.grammars import GRAMMARS, is_valid
from tests.helpers.sampling import keys, random_logits, random_masks
from tests.helpers.tiered import engine_of

pytestmark = pytest.mark.gpu

TEXTS = ["I would like a small latte with oat milk, please.", "Find me a cheap hotel in Boston."]
HOW = [
    SamplingParams(temperature=0.0, seed=1, max_tokens=48),
    SamplingParams(temperature=1.0, seed=3, max_tokens=48),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=48),
]
ON_CUDA: dict[str, Any] = SETTINGS | {"device": "cuda", "dtype": "float32", "host_cache_gib": 0, **pool(16)}
VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {"graphs": "all", "spec": "off"},
    "graphs ahead": {"graphs": "all", "spec": "off", "overlap": 1},
    "drafts": {"graphs": "off", "spec": "eagle3", "spec_steps": 3},
    "graphs with drafts": {"graphs": "all", "spec": "eagle3", "spec_steps": 3, "overlap": 1},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 131_072), (5, 1303), (129, 32_001)])
def test_masked_draws_are_those_of_the_twins(dtype: torch.dtype, num_rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(7)
    logits, masks = random_logits(generator, num_rows, size, dtype), random_masks(generator, num_rows, size)
    keyed = keys(generator, num_rows)
    there = TokenMasks(masks.entries.cuda(), masks.words.cuda())
    assert torch.equal(draw.greedy(logits.cuda(), there).cpu(), step_reference.greedy(logits, masks))
    drawn = draw.draw_free(logits.cuda(), *(each.cuda() for each in keyed), None, there).cpu()
    wanted = step_reference.draw_free(logits, *keyed, None, masks)
    # The logarithms of a device differ in their last bit: seldom enough to change the best of several.
    assert (drawn != wanted).sum() <= num_rows // 50
    for row, entry in enumerate(masks.entries.tolist()):
        token = int(drawn[row])
        assert entry < 0 or int(masks.words[entry, token // 32]) >> (token % 32) & 1


def replies(**settings: Any) -> list[tuple[list[int], str | None]]:
    """Each grammar, drawn in several ways, beside rows without one."""
    asked = [msgspec.structs.replace(how, grammar=grammar) for grammar in (*GRAMMARS.values(), None) for how in HOW]
    names = [name for name in (*GRAMMARS, None) for _ in HOW]
    with LLM(**ON_CUDA | settings) as llm:
        done = [llm.generate([text] * len(asked), asked) for text in TEXTS]
        stats, grammars = engine_of(llm).stats(), engine_of(llm)._planner.grammars
    assert grammars.num_masks > 100
    if settings["graphs"] == "all":
        assert sum(stats.graph_gate["replay"].values()) > 0
    if settings["spec"] != "off":
        assert grammars.num_refused > 0
    outputs = [each.outputs[0] for part in done for each in part]
    for name, output in zip(names * len(TEXTS), outputs, strict=True):
        assert name is None or is_valid(name, output.text, is_cut=output.finish_reason == "length"), output.text
    return [(output.token_ids, output.finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def eager() -> list[tuple[list[int], str | None]]:
    return replies(graphs="off", spec="off", overlap=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_replies_are_those_of_eager_steps(eager: list[tuple[list[int], str | None]], variant: str) -> None:
    """In float32, where no two tokens of these replies are so close that another shape of batch changes the best."""
    assert replies(**VARIANTS[variant]) == eager
