"""What a step's launch must be followed by: nobody reads its result, or a page it reads or writes, too early.

Kernels that only take time stand before what must be waited for. Without the wait the wrong bytes are read each time. That
copies wait for the steps before them, and forwards for their loads, is in ``test_stream_transfers.py``, mechanism by mechanism.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.models.model_config import NANO
from tests.helpers.cuda import NUM_PAGES, PAGE, graph_engine, prompts_of
from tests.helpers.gated import spoil_device
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.tiered import check_whole, engine_of, transfers_of
from tests.helpers.transfers import hold_copies

pytestmark = pytest.mark.gpu

LONG = 400_000_000  # cycles: 0.2 s
SEED, NUM_NEW = 83, 10


def results_of(subject: Engine, *, delayed: bool) -> list[list[int]]:
    """The tokens of decode steps; each step launched behind a kernel that takes its time."""
    planner, prompts = HandPlanner(PAGE, NUM_PAGES), prompts_of([9, 30], seed=2)
    for row, prompt in prompts.items():
        planner.admit(row, prompt)
    stream: Any = subject.executor._stream
    plans = [planner.step({row: len(prompt) for row, prompt in prompts.items()})]
    plans += [planner.step(dict.fromkeys(prompts, 1)) for _ in range(6)]
    found = []
    for plan in plans:
        if delayed:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG)
        # Pinned memory is taken again by who asks next: nothing of the step before may look like this one's result.
        for _ in range(4):
            torch.empty(64, dtype=torch.int32, pin_memory=True).fill_(-7)
        found.append(subject.executor.submit(plan).result().tokens[:, 0].tolist())
    return found


@pytest.mark.parametrize("graphs", ["off", "decode"])
def test_a_result_is_read_when_its_copy_has_arrived(nano: Path, graphs: str) -> None:
    subject = graph_engine(nano, graphs)
    expected = results_of(subject, delayed=False)
    assert results_of(subject, delayed=True) == expected
    assert len({token for tokens in expected for token in tokens}) > 3
    subject.executor.close()


@pytest.mark.parametrize("graphs", ["off", "all"])
@pytest.mark.parametrize("spec", ["off", f"draft:{NANO}"])
def test_whole_engines_wait_for_loads_and_loads_for_steps(graphs: str, spec: str, depth: int) -> None:
    """Loads begin late, steps take long, and pages go from one to the other all the time; what is too early reads NaN."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(7, 4096, size).tolist() for size in (64, 65, 79, 97)]
    greedy = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True)
    settings: dict[str, Any] = {
        "in_process": True,
        "device": "cuda",
        "dtype": "float64",
        "attention_backend": "reference" if graphs == "off" else "auto",
        "page_size": PAGE,
        "max_model_len": 128,
        "kv_pages": 20,
        "max_running_requests": 2,
        "max_batched_tokens": 64,
        "cpu_threads": 1,
        "log_level": "warning",
        "spec_steps": 2,
    }
    if graphs == "all":
        settings["dtype"] = "float32"  # Triton has no wider one

    def tokens_of(llm: LLM) -> list[list[int]]:
        return [result.outputs[0].token_ids for result in llm.generate(prompts, greedy)]

    with LLM(**settings | {"graphs": "off", "spec": "off", "disable_prefix_cache": True, "host_cache_gib": 0}) as llm:
        expected = tokens_of(llm)
    with LLM(**settings | {"graphs": graphs, "spec": spec, "host_cache_gib": 0.1, "overlap": depth}) as llm:
        assert tokens_of(llm) == expected
        executor: Any = engine_of(llm)._executor
        spoil_device(llm)
        transfers = transfers_of(llm)

        def hold(copy: PageCopy) -> None:
            with torch.cuda.stream(transfers._streams[copy.kind]._first):
                torch.cuda._sleep(LONG // 4 if copy.kind is CopyKind.LOAD else LONG // 40)

        hold_copies(transfers, hold)
        submit = executor.submit

        def delay(plan: Any) -> Any:
            with torch.cuda.stream(executor._stream):
                torch.cuda._sleep(LONG // 40)
            return submit(plan)

        executor.submit = delay
        for _ in range(2):
            assert tokens_of(llm) == expected
        assert engine_of(llm).stats().cache.loads.num_fulfilled > 0
        hold_copies(transfers, None)
        executor.submit = submit
        check_whole(llm)
