"""Trees of drafts on a device: kernels, graphs, and the tokens of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.config.settings import TreeShape
from hiserve.kernels import step_reference, step_triton, tree_growth, tree_reference
from tests.helpers.cache_paths import SETTINGS, check, pool
from tests.helpers.dialogues import held_out_prompts
from tests.helpers.grown_trees import SHAPES, grow_trees, logits_of
from tests.helpers.tiered import counts_of, engine_of, leave_device

pytestmark = pytest.mark.gpu

NUM_NEW, TREE = 40, "3x6:16"
PROMPTS = [text[:80] for text in held_out_prompts("services") if len(text) > 100][:4]
HOW = {"greedy": 0.0, "drawn": 0.8}
ON_CUDA: dict[str, Any] = {"device": "cuda", "spec": "eagle3", **pool(16)}


def sampling(how: str) -> list[SamplingParams]:
    return [SamplingParams(seed=i, temperature=HOW[how], max_tokens=NUM_NEW, ignore_eos=True) for i in range(4)]


@pytest.mark.parametrize("shape", [*SHAPES, TreeShape(3, 6, 16)], ids=str)
def test_trees_grow_as_those_of_the_twin(shape: TreeShape) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = [each.cuda() for each in logits_of(shape, 128_256, generator, torch.float32)]
    for is_greedy in (True, False):
        grown, expected = (grow_trees(ops, shape, logits, is_greedy=is_greedy) for ops in (tree_growth, tree_reference))
        for ours, theirs in zip(grown.words(), expected.words(), strict=True):
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(grown.candidates.worth, expected.candidates.worth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_moves_of_overlapping_paths_are_those_of_the_twin(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    slots = torch.randperm(4000, generator=generator)[: 64 * 16].cuda()
    paths = torch.stack([torch.randperm(15, generator=generator)[:6].sort().values + 1 for _ in range(64)]).cuda()
    path = torch.nn.functional.pad(paths, (1, 0))
    starts, counts = torch.arange(64, device="cuda") * 16, torch.randint(0, 8, (64,), generator=generator).cuda()
    storage = torch.randint(0, 250, (32, 2, 4000, 8, 128), generator=generator).to("cuda", dtype)
    expected = storage.clone()
    step_reference.move([expected], slots, starts, path, counts)
    step_triton.move([storage], slots, starts, path, counts)
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("how", HOW)
def test_trees_change_no_token(how: str, depth: int) -> None:
    """In float64, through pages that left the device and came back."""
    settings = SETTINGS | ON_CUDA | {"host_cache_gib": 0.05, "overlap": depth, "max_batched_tokens": 128}
    with LLM(**settings | {"spec": "off"}) as plain:
        expected = plain.generate(PROMPTS, sampling(how))
    with LLM(**settings, spec_tree=TREE) as llm:
        for round_number in range(2):
            for result, theirs in zip(llm.generate(PROMPTS, sampling(how)), expected, strict=True):
                check(result.outputs[0], theirs.outputs[0])
            if not round_number:
                leave_device(llm)
        assert counts_of(llm).loads.num_fulfilled > 0


@pytest.mark.parametrize("how", HOW)
def test_graphs_of_trees_change_no_token_and_are_replayed(how: str) -> None:
    settings = SETTINGS | ON_CUDA | {"host_cache_gib": 0, "dtype": "float32", "max_batched_tokens": 128, "overlap": 1}
    found = []
    for graphs in ("off", "all"):
        with LLM(**settings, spec_tree=TREE, graphs=graphs) as llm:
            results = llm.generate(PROMPTS, sampling(how))
            found.append([result.outputs[0].token_ids for result in results])
            counts = engine_of(llm).stats().graph_gate
    assert found[0] == found[1]
    assert counts.get("replay", {}).get("verify"), counts
