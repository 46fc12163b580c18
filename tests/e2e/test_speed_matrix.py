"""What makes an engine fast meets in pairs: weights and rows in few bits, ``--exact``, chains and trees of drafts, graphs, overlap,
and what became of a prompt's pages, or of its worker, meanwhile. The tokens, ends and scores are always the same.

Exact: float64 on the CPU, where graphs are recorded, against an engine with the same weights and rows that guesses nothing, captures
nothing and reuses nothing. With ``--exact`` in bfloat16, and no bit of a score differs from that of a row alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiserve import SamplingParams
from hiserve.config.options import make_options
from hiserve.llm.outputs import CompletionOutput, _logprobs
from hiserve.scheduler.client import SCHEDULER_COMMAND, EngineClient
from tests.helpers.cache_paths import (
    HOST,
    SETTINGS,
    Case,
    Work,
    answer,
    check,
    chunks,
    device_hits,
    host_hits,
    pairs_of,
    pairwise,
    pool,
    preemption,
    store_hits,
    storm,
)
from tests.helpers.dialogues import held_out_prompts
from tests.helpers.forks import forked_engines
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.settings import identified
from tests.helpers.waiting import until

NUM_NEW, MOST_ATTEMPTS = 13, 5
WITH_RECORDED = (sys.executable, "-m", "tests.faults.scheduler", "tests.helpers.recorded_worker")


def killed(work: Work, folder: Path, page_size: int, **settings: Any) -> None:
    """The worker is killed when a third of the tokens came from it; its successor generates the others."""
    given = SETTINGS | pool(page_size) | HOST | settings
    del given["in_process"]
    asyncio.run(_survive(work, given))


async def _survive(work: Work, given: dict[str, Any]) -> None:
    """Asks and kills, again if the test waited for the processor until all requests had ended."""
    has_graphs = given["graphs"] != "off"
    with forked_engines():
        settings = identified(make_options(**given))
        client = await EngineClient.start(settings, command=WITH_RECORDED if has_graphs else SCHEDULER_COMMAND)
    try:
        for _ in range(MOST_ATTEMPTS):
            await _kill(client, work)
            status = await client.status()
            if status.replays.requests:
                break
        assert status.replays.requests > 0
        assert not has_graphs or status.workers[0].stats.graph_gate["replay"]
    finally:
        await client.stop()


async def _kill(client: EngineClient, work: Work) -> None:
    """Asks everything, kills the worker meanwhile, and checks all replies."""
    found = [CompletionOutput(index) for index in range(len(work.prompts))]

    async def read(index: int) -> None:
        output, sampling, scores = found[index], work.sampling[index], b""
        async for delta in client.generate(np.array(work.prompts[index], dtype=np.int32), sampling):
            output.token_ids += delta.tokens
            output.finish_reason = delta.finish.text
            scores += delta.scores
        assert sampling.logprobs is not None
        output.logprobs = _logprobs(output.token_ids, scores, sampling.logprobs)

    (worker,) = (await client.status()).workers
    tasks = [asyncio.create_task(read(index)) for index in range(len(found))]
    enough = sum(sampling.max_tokens or 0 for sampling in work.sampling) // 3
    await until(lambda: sum(len(each.token_ids) for each in found) >= enough)
    os.kill(worker.pid, signal.SIGKILL)
    await asyncio.gather(*tasks)
    while [each.incarnation for each in (await client.status()).workers] != [worker.incarnation + 1]:
        await asyncio.sleep(0.01)
    for ours, theirs in zip(found, work.expected, strict=True):
        check(ours, theirs, work.max_error)


PATHS: tuple[Callable[..., None], ...] = (chunks, preemption, device_hits, host_hits, store_hits, storm, killed)
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {"spec": "off"},
    "ngram": {"spec": "ngram", "spec_steps": 3},
    "chain": {"spec": "eagle3", "spec_steps": 3},
    "tree": {"spec": "eagle3", "spec_steps": "auto", "spec_tree": "3x4:12"},
}
WEIGHTS, ROWS, EXACT, GRAPHS, DEPTHS = ("off", "fp8", "int4"), ("auto", "fp8"), (False, True), ("off", "all"), (0, 1)


def can_be(case: Case) -> bool:
    """Whether options of a case are not refused; exact sums have no graphs on a CPU (``tests/gpu/test_exact.py`` has them)."""
    _, drafts, weights, rows, is_exact, graphs, _ = case
    return not is_exact or (drafts != "tree" and (weights, rows, graphs) == ("off", "auto", "off"))


ALL: list[Case] = [case for case in product(PATHS, DRAFTS, WEIGHTS, ROWS, EXACT, GRAPHS, DEPTHS) if can_be(case)]
COVERING = list(pairwise(ALL))
USUAL = (
    (killed, "tree", "fp8", "fp8", False, "off", 1),
    (host_hits, "tree", "fp8", "fp8", False, "all", 1),
    (preemption, "chain", "int4", "fp8", False, "off", 1),
)
CASES = [*USUAL, *(case for case in COVERING if case not in USUAL)]


def named(case: Case) -> str:
    path, drafts, weights, rows, is_exact, graphs, depth = case
    words = [path.__name__, drafts, f"weights_{weights}", f"rows_{rows}", f"graphs_{graphs}", f"depth_{depth}"]
    return "-".join([*words, "exact"] if is_exact else words)


@lru_cache
def work_of(weights: str, rows: str, is_exact: bool) -> Work:
    """Text that the heads were trained on, so that they are right often; some rows are drawn."""
    texts = [text for text in held_out_prompts("services") if len(text) > 100]
    prompts = [text[: 67 + 9 * index] for index, text in enumerate(texts[:3])]
    sampling = [
        SamplingParams(seed=i, max_tokens=NUM_NEW - i, ignore_eos=True, temperature=0.8 * (i % 2), logprobs=2)
        for i in range(3)
    ]
    options: dict[str, Any] = {"quantize": weights, "kv_dtype": rows}
    if is_exact:
        options |= {"exact": True, "dtype": "bfloat16", "max_running_requests": 1}
    work = answer(prompts, sampling, **options)
    return replace(work, max_error=0.0) if is_exact else work


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in USUAL else pytest.mark.wide) for case in CASES], ids=named
)
def test_nothing_changes_a_token(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, drafts, weights, rows, is_exact, graphs, depth = case
    work = work_of(weights, rows, is_exact)
    executors = allow_recording(monkeypatch) if graphs != "off" else []
    settings = DRAFTS[drafts] | {"quantize": weights, "kv_dtype": rows, "graphs": graphs, "overlap": depth}
    settings |= {"exact": True, "dtype": "bfloat16"} if is_exact else {}
    settings |= {"kv_canary": False, "max_running_requests": 2, "max_batched_tokens": 32} if graphs != "off" else {}
    path(work, tmp_path, 16, **settings)
    assert bool(executors) == (graphs != "off" and path is not killed)  # whose worker is a process of its own
    steps = {"plain": ("decode",), "ngram": ("decode", "verify")}.get(drafts, ("verify",))
    for executor in executors:
        replays = executor.gate_counts()["replay"]
        assert sum(replays.get(each, 0) for each in steps) > 0, replays


def test_each_pair_that_is_not_refused_meets() -> None:
    assert set().union(*map(pairs_of, COVERING)) == set().union(*map(pairs_of, ALL))
    assert all(map(can_be, USUAL)) and len(CASES) < len(ALL) / 20
