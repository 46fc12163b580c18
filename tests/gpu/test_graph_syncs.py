"""In steady state nothing waits for the device: steps of every kind, with graphs and without, and a whole engine beside its copies."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.plan import BatchPlan
from hiserve.engine.graph_check import no_sync
from tests.helpers import cuda
from tests.helpers.cuda import FREE, NUM_PAGES, PAGE, SAMPLED, decisions, prompts_of, run_all
from tests.helpers.gated import spoil_device
from tests.helpers.plans import GREEDY, HandPlanner
from tests.helpers.tiered import counts_of, engine_of

pytestmark = pytest.mark.gpu

WIDTH, CHUNK, PADDING = 4, 32, 2
RAN = {
    "off": {"eager/graphs_off"},
    "decode": {"replay/decode", "replay/verify", "eager/width"},
    "all": {"replay/decode", "replay/verify", "replay/mixed", "replay/piecewise"},
}


def steps_of_every_kind(sampling: SamplingParams) -> list[BatchPlan]:
    """Prompts in chunks, some of which end while others go on; decode steps; steps with drafts that are refused."""
    planner = HandPlanner(PAGE, NUM_PAGES)
    prompts = prompts_of([20, 33, 64, 150])
    for row, prompt in prompts.items():
        planner.admit(row, prompt, sampling)
    plans = []
    for _ in range(12):
        work = {row: min(CHUNK, planner.known[row] - planner.computed[row]) for row in prompts}
        plans.append(planner.step(work))
    for _ in range(3):
        plans.append(planner.draft_step(dict.fromkeys(prompts, WIDTH - 1)))
        for row in prompts:
            planner.settle(row, 1)
    plans += [planner.step(dict.fromkeys(prompts, 1)) for _ in range(3)]
    return plans


@pytest.mark.parametrize("graphs", RAN)
@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_no_step_waits_for_the_device(nano: Path, attention: str, graphs: str) -> None:
    """Drafts are the padding token, which no row draws, so each step that verifies emits one token."""
    sizes: dict[str, Any] = {"max_rows": 4, "max_batched_tokens": 4 * CHUNK, "widths": (1, WIDTH)}
    subject = cuda.graph_engine(nano, graphs, "bfloat16", attention=attention, **sizes)
    for sampling in (GREEDY, FREE, SAMPLED):
        for guard in (nullcontext, no_sync):  # the first time is not yet steady state
            subject.rows.tokens.fill_(PADDING)
            cuda.wait_for_stream()
            plans = steps_of_every_kind(sampling)
            with guard():
                tokens = run_all(subject, plans)
            assert {len(each) for each in tokens.values()} >= {18}
    lacks = {"replay/mixed"} if attention == "flashinfer" else set()  # what it launches depends on lengths
    assert decisions(subject).keys() == RAN[graphs] - lacks
    subject.executor.close()


@pytest.mark.parametrize("graphs", ["off", "all"])
def test_no_step_of_an_engine_waits_while_pages_come_and_go(graphs: str) -> None:
    rng = torch.Generator().manual_seed(3)
    prompts = torch.randint(7, 4096, (12, 120), generator=rng).tolist()
    sampling = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=16, ignore_eos=True) for i in range(12)]
    options = {"dtype": "bfloat16", "page_size": PAGE, "max_model_len": 256, "kv_pages": 60, "host_cache_gib": 0.2}
    sizes = {
        "max_running_requests": 4,
        "max_batched_tokens": 64,
        "cpu_threads": 1,
        "log_level": "warning",
        "spec": "off",
    }
    with LLM(in_process=True, device=cuda.DEVICE, graphs=graphs, overlap=1, **options, **sizes) as llm:
        for _ in range(2):
            llm.generate(prompts, sampling)
        spoil_device(llm)
        before = counts_of(llm)
        with no_sync():
            results = llm.generate(prompts, sampling)
        now = counts_of(llm)
        assert all(len(result.outputs[0].token_ids) == 16 for result in results)
        assert now.loads.num_fulfilled > before.loads.num_fulfilled
        assert engine_of(llm).stats().graph_gate.keys() == ({"eager"} if graphs == "off" else {"replay"})
