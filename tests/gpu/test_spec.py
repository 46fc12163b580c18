"""Speculation on a device: its kernels, its graphs, and the tokens of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve import LLM, SamplingParams
from hiserve.engine.graph_check import no_sync
from hiserve.kernels import draft_reference, draft_triton
from hiserve.models.model_config import NANO
from hiserve.runners.draft_graphs import DraftGraphs
from tests.helpers.cache_paths import SETTINGS, check, pool
from tests.helpers.cold_heads import Scripted, counted, script
from tests.helpers.draft_cases import DraftCase, draft_case
from tests.helpers.drafted import Drafted, save_heads
from tests.helpers.step_cases import changed
from tests.helpers.tiered import counts_of, engine_of, leave_device

pytestmark = pytest.mark.gpu

STEPS, NUM_NEW, SEED = 3, 41, 19
PROMPTS = [
    "I would like a small latte with oat milk, please.",
    "Can you book a table for two tonight?",
    "Find me a cheap hotel in Boston.",
    "What movies are playing this weekend?",
]
# Of several pages each, which leave the device and come back.
LONG_PROMPTS = [" ".join(PROMPTS[i:] + PROMPTS[:i]) for i in range(len(PROMPTS))]
HOW = {
    "greedy": SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, seed=5, max_tokens=NUM_NEW, ignore_eos=True),
}
ON_CUDA: dict[str, Any] = {"device": "cuda", "host_cache_gib": 0, **pool(16)}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_heads(tmp_path_factory.mktemp("heads"), SEED)


def on_device(case: DraftCase) -> DraftCase:
    moved: DraftCase = changed(case, Tensor.cuda)
    return moved


def test_the_draft_kernels_give_what_their_twins_give() -> None:
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    for number in range(40):
        case = draft_case(generator)
        ours, theirs = on_device(case).outputs(draft_triton), case.outputs(draft_reference)
        assert all(torch.equal(our.cpu(), their) for our, their in zip(ours, theirs, strict=True)), f"case {number}"


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle3", "mtp"])
@pytest.mark.parametrize("how", HOW)
def test_speculation_changes_no_token(heads: dict[str, Path], kind: str, how: str, depth: int) -> None:
    """In float64, through pages that left the device and came back."""
    named = {"ngram": "ngram", "draft_model": f"draft:{NANO}"} | {each: f"{each}:{heads[each]}" for each in heads}
    settings = SETTINGS | ON_CUDA | {"host_cache_gib": 0.05, "overlap": depth}
    with LLM(**settings, spec="off") as plain:
        expected = plain.generate(LONG_PROMPTS, HOW[how])
    with LLM(**settings | {"spec": named[kind], "spec_steps": STEPS}) as llm:
        for round_number in range(2):
            for result, theirs in zip(llm.generate(LONG_PROMPTS, HOW[how]), expected, strict=True):
                check(result.outputs[0], theirs.outputs[0])
            if not round_number:
                leave_device(llm)
        assert counts_of(llm).loads.num_fulfilled > 0


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("graphs", ["off", "all"])
def test_a_model_that_drafts_for_itself_is_hardly_ever_wrong(how: str, graphs: str) -> None:
    """In float32 verified and drafted tokens are computed in other shapes, so that now and then a tie goes the other way."""
    settings = SETTINGS | ON_CUDA | {"dtype": "float32", "graphs": graphs, "spec": f"draft:{NANO}", "spec_steps": STEPS}
    with LLM(**settings) as llm:
        results = llm.generate(PROMPTS, HOW[how])
        counts = engine_of(llm).stats().graph_gate
    drafts = [result.outputs[0].drafts for result in results]
    assert all(each is not None for each in drafts)
    accepted, steps = (sum(getattr(each, name) for each in drafts) for name in ("accepted", "verify_steps"))
    assert 1 + accepted / steps >= 0.95 * (1 + STEPS), (accepted, steps)
    assert bool(counts.get("replay", {}).get("verify")) == (graphs == "all"), counts


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "mtp"])
@pytest.mark.parametrize("how", HOW)
def test_drafts_behind_graphs_are_those_of_eager_steps(heads: dict[str, Path], kind: str, how: str) -> None:
    """Bit by bit, where the batch has the size of its bucket."""
    spec = f"draft:{NANO}" if kind == "draft_model" else f"{kind}:{heads[kind]}"
    found = []
    for graphs in ("decode", "off"):
        subject = Drafted(**ON_CUDA, spec=spec, spec_steps=STEPS, dtype="float32", graphs=graphs, overlap=0)
        with subject.llm as llm:
            said = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, HOW[how])]
        assert (subject.num_replayed > 0) == (graphs == "decode")
        found.append((said, subject.drafts))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "mtp"])
@pytest.mark.parametrize("graphs", ["off", "all"])
def test_heads_that_go_cold_change_no_token_and_compute_nothing(
    heads: dict[str, Path], kind: str, graphs: str, depth: int
) -> None:
    """Through pages that left the device and came back; a cold step replays no graph of a draft's.

    In float64, whose attention cannot be captured; with graphs in float32, and only tokens are compared.
    """
    spec = f"draft:{NANO}" if kind == "draft_model" else f"{kind}:{heads[kind]}"
    is_captured = graphs == "all"
    settings = SETTINGS | ON_CUDA | {"host_cache_gib": 0.05, "overlap": depth, "graphs": graphs}
    settings |= {"dtype": "float32"} if is_captured else {}
    with LLM(**settings, spec="off") as plain:
        expected = plain.generate(LONG_PROMPTS, HOW["drawn"])
    with LLM(**settings | {"spec": spec, "spec_steps": STEPS}) as llm:
        head, replays = counted(llm), 0
        replay = DraftGraphs.propose

        def count(*args: Any, **words: Any) -> None:
            nonlocal replays
            replays += 1
            replay(*args, **words)

        DraftGraphs.propose = count  # type: ignore[method-assign]
        try:
            for period in (1, 7, 10_000):  # the last: cold from the first step on
                script(llm, Scripted(STEPS, lambda step, p=period: (step + p // 10_000 * p) // p % 2 == 1))
                before = head.num_forwards + replays
                for result, theirs in zip(llm.generate(LONG_PROMPTS, HOW["drawn"]), expected, strict=True):
                    assert result.outputs[0].token_ids == theirs.outputs[0].token_ids
                    if not is_captured:
                        check(result.outputs[0], theirs.outputs[0])
                assert (head.num_forwards + replays == before) == (period == 10_000)
                leave_device(llm)
        finally:
            DraftGraphs.propose = replay  # type: ignore[method-assign]
        assert (replays > 0) == is_captured


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_steps_of_more_tokens_than_a_page_holds_are_captured(heads: dict[str, Path], kind: str, page_size: int) -> None:
    """Replays are compared at start: over rows whose tokens do not share the sink's few places."""
    spec = f"draft:{NANO}" if kind == "draft_model" else f"{kind}:{heads[kind]}"
    settings = SETTINGS | ON_CUDA | pool(page_size) | {"dtype": "float32", "graphs": "all"}
    with LLM(**settings | {"spec": spec, "spec_steps": STEPS}) as llm:
        llm.generate(PROMPTS, HOW["greedy"])
        runners = engine_of(llm)._executor._runners  # type: ignore[attr-defined]
        assert not any(runner.failed for runner in runners._full.values())
        counts = engine_of(llm).stats().graph_gate
    assert counts["replay"]["verify"] > 0 and "capture_failed" not in counts.get("eager", {}), counts


@pytest.mark.parametrize("graphs", ["off", "all"])
def test_drafting_waits_for_nothing(heads: dict[str, Path], graphs: str) -> None:
    settings = SETTINGS | ON_CUDA | {"dtype": "float32", "graphs": graphs, "overlap": 1}
    with LLM(**settings | {"spec": f"eagle3:{heads['eagle3']}", "spec_steps": STEPS}) as llm:
        llm.generate(PROMPTS, HOW["drawn"])  # the first time is not yet steady state
        dispatch = engine_of(llm)._executor._runners  # type: ignore[attr-defined]
        propose, num_guarded = dispatch.propose, 0

        def guarded(plan: Any, ran: Any) -> None:
            nonlocal num_guarded
            num_guarded += 1
            with no_sync():
                propose(plan, ran)

        dispatch.propose = guarded
        llm.generate(PROMPTS[::-1], HOW["drawn"])
    assert num_guarded > NUM_NEW // (1 + STEPS)
