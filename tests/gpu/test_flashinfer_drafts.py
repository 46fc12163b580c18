"""FlashInfer beside every proposer: its schedules are made from lengths of the host, which drafts make uncertain."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.forward import ForwardInputs
from hiserve.models.model_config import NANO
from tests.helpers.cache_paths import SETTINGS, pool
from tests.helpers.drafted import save_heads
from tests.helpers.margin import as_tensor, join, margin, shape_difference, teacher_forced
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.tiered import engine_of

pytestmark = pytest.mark.gpu

SEED, STEPS, NUM_NEW, MAX_LEN = 67, 3, 60, 160
PROMPTS = [
    "I would like a small latte with oat milk, please.",
    "Can you book a table for two tonight? " * 3,
    "Find me a cheap hotel in Boston.",
    "What movies are playing this weekend? " * 2,
    "Two cappuccinos, please.",
]
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    assert importlib.util.find_spec("flashinfer"), "install it: pip install 'hiserve[gpu]'"
    heads = save_heads(tmp_path_factory.mktemp("heads"), SEED)
    drawn = {f"drawn {kind}": f"{kind}:{folder}" for kind, folder in heads.items()}
    return {"off": "off", "ngram": "ngram", "draft_model": f"draft:{NANO}", "eagle3": "eagle3", "mtp": "mtp"} | drawn


@pytest.mark.parametrize("graphs", ["off", "all"])
@pytest.mark.parametrize("kind", ["off", "ngram", "draft_model", "eagle3", "mtp", "drawn eagle3", "drawn mtp"])
def test_flashinfer_plans_with_exact_lengths_and_keeps_the_margin_of_the_reference(
    specs: dict[str, str], nano: Path, kind: str, graphs: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiserve.attention import flashinfer  # needs the package

    exact: list[bool] = []
    plan = flashinfer.FlashInferAttention.plan

    def watch(self: Any, inputs: ForwardInputs) -> None:
        exact.append(inputs.kv_lens.tolist() == inputs.kv_bounds.tolist())
        plan(self, inputs)

    settings = SETTINGS | pool(16) | {"device": "cuda", "dtype": "bfloat16", "host_cache_gib": 0, "overlap": depth}
    options = {"attention_backend": "flashinfer", "spec": specs[kind], "spec_steps": STEPS, "graphs": graphs}
    with LLM(**settings | options) as llm:
        monkeypatch.setattr(flashinfer.FlashInferAttention, "plan", watch)  # what rehearsed is over
        results = llm.generate(PROMPTS, GREEDY)
        assert engine_of(llm)._depth == (depth if kind == "off" else 0)
        counts = engine_of(llm).stats().graph_gate
    if graphs == "all":
        assert counts["replay"]["decode" if kind == "off" else "verify"] > 5, counts
    assert exact and all(exact), f"{exact.count(False)} of {len(exact)} plans were inexact"
    answers = [(result.prompt_token_ids, result.outputs[0].token_ids) for result in results]
    forced = {row: teacher_forced(prompt, tokens) for row, (prompt, tokens) in enumerate(answers, start=1)}

    def logits(dtype: str, device: str, chunk: int) -> Any:
        subject = Engine(nano, dtype=dtype, device=device, attention="reference", max_len=MAX_LEN, num_pages=64)
        return subject.logits(HandPlanner(16, 64), forced, chunk)

    reference = logits("float32", "cpu", MAX_LEN)
    shapes = logits("bfloat16", "cuda", 64), logits("bfloat16", "cpu", 7)
    verdict = join(
        [
            margin(reference[row][len(prompt) - 1 :], as_tensor(tokens), shape_difference(*shapes))
            for row, (prompt, tokens) in enumerate(answers, start=1)
        ]
    )
    print(kind, graphs, verdict, flush=True)
    assert verdict.is_near, verdict  # lengths that are wrong are found out by far
