"""The same tokens, ends and scores with graphs, whoever drafts and whatever became of a prompt's pages meanwhile.

Exact: float64 on the CPU, where graphs are recorded, against an engine without graphs that guesses and reuses nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.transfers import CopyKind, PageCopy
from tests.helpers.cache_paths import (
    HOST,
    SETTINGS,
    Case,
    Work,
    answer,
    ask,
    chunks,
    host_hits,
    pairwise,
    pool,
    preemption,
    store_hits,
    storm,
)
from tests.helpers.dialogues import trained
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.small_model import small_model
from tests.helpers.tiered import check_whole, counts_of, leave_device, transfers_of
from tests.helpers.transfers import hold_copies
from tests.helpers.widening import usual

SEED, NUM_NEW, PAGE, SLOW_S = 47, 14, 16, 0.01


def slow_load(work: Work, folder: Path, page_size: int, **settings: object) -> None:
    """Steps are planned and launched while loads are under way."""
    with LLM(**SETTINGS | pool(page_size) | HOST | settings) as llm:
        ask(llm, work)

        def hold(copy: PageCopy) -> None:
            if copy.kind is CopyKind.LOAD:
                time.sleep(SLOW_S)

        hold_copies(transfers_of(llm), hold)
        for backwards in (False, True):
            leave_device(llm)
            ask(llm, work, backwards=backwards)
        assert counts_of(llm).loads.num_fulfilled > 0
        check_whole(llm)


PATHS: tuple[Callable[..., None], ...] = (preemption, store_hits, storm, slow_load)
MORE_PATHS: tuple[Callable[..., None], ...] = (*PATHS, chunks, host_hits)
PROPOSERS, DEPTHS, GATES = ("off", "ngram", "draft_model", "eagle3", "mtp"), (0, 1), ("precise", "strict")
GRAPHS, HOW = ("all", "decode"), ("greedy", "drawn", "penalised")
SOME = usual(pairwise(list(product(PATHS, PROPOSERS, DEPTHS, GATES, (2,), GRAPHS, HOW))))
ALL: list[Case] = list(product(MORE_PATHS, PROPOSERS, DEPTHS, GATES, (2, "auto"), GRAPHS, HOW))
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9},
    "penalised": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.3},
}


@lru_cache
def work_of(how: str) -> Work:
    """Prompts that repeat themselves, and share their beginnings in pairs; one leaves one token behind its pages."""
    print(f"seed {SEED}")
    rng = np.random.default_rng([SEED, list(SAMPLING).index(how)])
    shared = rng.integers(7, 4096, 20).tolist()
    prompts = [shared * 2 + rng.integers(7, 4096, 10 + 9 * index).tolist() + shared[:9] for index in range(4)]
    prompts[3] = prompts[3][: 5 * PAGE + 1]
    sampling = [
        SamplingParams(
            seed=i, max_tokens=NUM_NEW - i, ignore_eos=bool(i % 2), logprobs=2 if i == 3 else None, **options
        )
        for i, options in enumerate([SAMPLING[how]] * 4)
    ]
    return answer(prompts, sampling, model=small_model())


def named(case: Case) -> str:
    path, proposer, depth, gate, steps, graphs, how = case
    return f"{path.__name__}-{proposer}-{steps}-depth_{depth}-{gate}-{graphs}-{how}"


@pytest.mark.parametrize("case", SOME, ids=named)
def test_graphs_change_nothing(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, proposer, depth, gate, steps, graphs, how = case
    work = work_of(how)
    executors = allow_recording(monkeypatch)
    options = {"spec": trained(proposer, small_model()), "spec_steps": steps, "overlap": depth}
    path(work, tmp_path, PAGE, model=small_model(), kv_canary=False, graphs=graphs, graph_gate=gate, **options)
    counts = Counter[str]()
    for executor in executors:
        for action, reasons in executor.gate_counts().items():
            counts.update({action: sum(reasons.values())})
    assert counts["replay"] >= 10 and not counts["defer"], counts


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=named)
def test_the_whole_product_changes_nothing(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_graphs_change_nothing(case, tmp_path, monkeypatch)
