"""Trees of drafts in an engine: how many tokens they bring, rows that have none, and steps that fail."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from hiserve import LLM, SamplingParams
from hiserve.core.request import SpecParams
from hiserve.kernels import step_reference
from hiserve.llm.outputs import CompletionOutput
from tests.helpers.cache_paths import SETTINGS, pool
from tests.helpers.dialogues import held_out_prompts
from tests.helpers.grammars import GRAMMARS
from tests.helpers.tiered import engine_of

NUM_NEW = 40
PROMPTS = [text[:48] for text in held_out_prompts("services") if len(text) > 100][:3]
HEAD: dict[str, Any] = {"spec": "eagle3", "host_cache_gib": 0}


@cache
def replies(temperature: float, **settings: Any) -> list[CompletionOutput]:
    sampling = [
        SamplingParams(seed=seed, temperature=temperature, max_tokens=NUM_NEW, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    with LLM(**SETTINGS | pool(16) | HEAD | settings) as llm:
        return [result.outputs[0] for result in llm.generate(PROMPTS, sampling)]


def tokens_per_step(outputs: list[CompletionOutput]) -> float:
    used = [output.drafts for output in outputs if output.drafts is not None]
    assert len(used) == len(outputs)
    return NUM_NEW * len(outputs) / sum(drafts.verify_steps for drafts in used)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tree_of_one_candidate_a_level_is_a_chain(temperature: float) -> None:
    """The head's states, too, are those of the path: else fewer drafts would be accepted."""
    chain, tree = replies(temperature, spec_steps=4), replies(temperature, spec_tree="1x4:5")
    assert [each.token_ids for each in tree] == [each.token_ids for each in chain]
    for ours, theirs in zip(tree, chain, strict=True):
        assert ours.drafts is not None and theirs.drafts is not None
        assert (ours.drafts.verify_steps, ours.drafts.proposed) == (theirs.drafts.verify_steps, theirs.drafts.proposed)
        assert ours.drafts.accepted == theirs.drafts.accepted > 0


@pytest.mark.parametrize(("temperature", "gain"), [(0.0, 1.1), (0.8, 1.1)])
def test_branches_bring_more_tokens_a_step_than_a_chain_as_deep(temperature: float, gain: float) -> None:
    chain, tree = replies(temperature, spec_steps=4), replies(temperature, spec_tree="3x4:16")
    assert [each.token_ids for each in tree] == [each.token_ids for each in chain]
    assert tokens_per_step(tree) > gain * tokens_per_step(chain)


@pytest.mark.parametrize("num_moved", [0, 1])
def test_memory_that_runs_out_amid_the_moves_of_accepted_nodes_changes_no_token(
    num_moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the walk and the moves, and when those of one group have been made but not those of the next."""
    whole, calls = step_reference.move, itertools.count(1)

    def move(storages: Sequence[Tensor], slots: Tensor, starts: Tensor, path: Tensor, counts: Tensor) -> None:
        depth, rest = torch.arange(path.shape[1]), (slots, starts, path, counts)
        lie_elsewhere = (path != depth) & (depth < counts[:, None])
        if not lie_elsewhere.any() or next(calls) != 3:
            return whole(storages, *rest)
        assert len(storages) > num_moved
        whole(storages[:num_moved], *rest)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(step_reference, "move", move)
    settings = SETTINGS | pool(16) | HEAD | {"spec_tree": "3x4:16", "kv_canary": True}
    sampling = [SamplingParams(seed=seed, temperature=0.8, max_tokens=24, ignore_eos=True) for seed in range(3)]
    with LLM(**settings) as llm:
        outputs = [result.outputs[0] for result in llm.generate(PROMPTS, sampling)]
        assert engine_of(llm).stats().step_faults == {"out_of_memory": 1}
        said = [[*prompt, *each.token_ids] for prompt, each in zip(PROMPTS, outputs, strict=True)]
        hits = llm.generate(said, SamplingParams(temperature=0.0, max_tokens=2))  # the canary of each page is read
        assert all(each.num_cached_tokens > len(prompt) for prompt, each in zip(PROMPTS, hits, strict=True))
    plain = replies(0.8, spec_steps=4)
    assert [each.token_ids for each in outputs] == [each.token_ids[:24] for each in plain]


def test_rows_with_few_nodes_and_rows_with_a_grammar_which_have_chains_run_beside_others() -> None:
    plain = SamplingParams(temperature=0.0, seed=0, max_tokens=16, ignore_eos=True)
    asked = (
        plain,
        msgspec.structs.replace(plain, spec=SpecParams(num_steps=2)),
        msgspec.structs.replace(plain, spec=SpecParams(enabled=False)),
        msgspec.structs.replace(plain, grammar=GRAMMARS["regex"], ignore_eos=False),
    )
    with LLM(**SETTINGS | pool(16) | HEAD | {"spec": "off"}) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate([PROMPTS[0]] * 4, [plain] * 3 + [asked[3]])]
    with LLM(**SETTINGS | pool(16) | HEAD | {"spec_tree": "3x4:16"}) as llm:
        outputs = [each.outputs[0] for each in llm.generate([PROMPTS[0]] * 4, list(asked))]
    assert [each.token_ids for each in outputs] == expected
    free, few, none, constrained = (each.drafts for each in outputs)
    assert free is not None and few is not None
    assert free.proposed > 2 * free.verify_steps and 0 < few.proposed <= 2 * few.verify_steps
    assert none is None or none.verify_steps == 0
    assert constrained is not None and 0 < constrained.proposed <= 4 * constrained.verify_steps
    assert constrained.accepted > 0
