"""Drafts behind captured steps, recorded and played on the CPU: they are those of eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hiserve import SamplingParams
from hiserve.models.config import NANO
from hiserve.runners.graph import GraphRunner
from tests.helpers.cache_paths import pool
from tests.helpers.drafted import Drafted, save_heads
from tests.helpers.recorded import RecordableAttention, RecordedCapture, recordable_ops

STEPS, NUM_NEW = 3, 13
PROMPTS = ["Two cappuccinos, please.", "Find me a cheap hotel in Boston.", "Book a table."]
SAMPLING = (
    SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=NUM_NEW, ignore_eos=True),
)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.set_num_threads(1)
    heads = save_heads(tmp_path_factory.mktemp("heads"), seed=7)
    return {"draft_model": f"draft:{NANO}"} | {kind: f"{kind}:{folder}" for kind, folder in heads.items()}


def drafted(spec: str) -> Drafted:
    settings: dict[str, Any] = {"host_cache_gib": 0, "attention_backend": "reference", "disable_prefix_cache": True}
    return Drafted(spec=spec, spec_steps=STEPS, **pool(16), **settings)


def with_graphs(subject: Drafted) -> None:
    """Records steps of one token a row, and of all drafts."""
    dispatch, rows = subject.executor._runners, subject.executor._rows
    eager, proposer = dispatch._eager, dispatch._proposer
    rows.ops = proposer._step_ops = recordable_ops()
    proposer._attention = RecordableAttention(proposer._attention)
    attention, capture = RecordableAttention(eager._attention), RecordedCapture()
    dispatch._full = {
        width: GraphRunner(
            eager._model,
            eager._layers,
            attention,
            rows,
            capture,  # type: ignore[arg-type]
            width=width,
            buckets=(1, 2, 4),
            proposer=proposer,
        )
        for width in (1, 1 + STEPS)
    }
    dispatch.capture()


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "mtp"])
def test_drafts_behind_graphs_are_those_of_eager_steps(specs: dict[str, str], kind: str) -> None:
    graphs, eager = drafted(specs[kind]), drafted(specs[kind])
    with_graphs(graphs)
    with graphs.llm, eager.llm:
        for sampling in SAMPLING:
            said = [
                [each.outputs[0].token_ids for each in run.llm.generate(PROMPTS, sampling)] for run in (graphs, eager)
            ]
            assert said[0] == said[1]
    assert graphs.drafts == eager.drafts
    num_prompts = len(SAMPLING)
    assert (graphs.num_replayed, eager.num_replayed) == (len(graphs.drafts) - num_prompts, 0)
    assert len({token for step in graphs.drafts for draft in step.values() for token in draft.tokens}) >= 10
