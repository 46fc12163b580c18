"""What goes wrong on a device: memory that others take, and a kernel that reads and writes where nothing is."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.engine.service import EXIT_DEVICE
from hiserve.models.model_config import NANO, find_model
from tests.e2e import live as lives
from tests.faults.harness import read
from tests.helpers import cuda
from tests.helpers.margin import as_tensor, join, margin, shape_difference, teacher_forced
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.storm import noise
from tests.helpers.tiered import check_whole, engine_of

pytestmark = pytest.mark.gpu

PAGE = 16
SPARE_BYTES = 48 << 20  # of the device, that nobody takes: less than the largest step needs
MAX_RECOVERY_S, MIN_HOST_SHARE = 20.0, 0.9


def sampling_of(index: int, num_new: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=num_new, ignore_eos=True)


def check_margin(prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], tokens: list[list[int]]) -> None:
    """Each token is as good as the best by a plain engine that computes all of the sequence, and few are not the best."""
    forced = {row: teacher_forced(*both) for row, both in enumerate(zip(prompts, tokens, strict=True), start=1)}
    few = {row: forced[row] for row in sorted(forced, key=lambda row: len(forced[row]))[:2]}
    scores, others = (logits(rows, chunk) for rows, chunk in ((forced, 256), (few, 61)))
    difference = shape_difference({row: scores[row] for row in few}, others)
    verdict = join(
        [
            margin(
                scores[row][len(prompt) - 1 :].cpu().double() + noise(prompt, how, said), as_tensor(said), difference
            )
            for row, (prompt, how, said) in enumerate(zip(prompts, sampling, tokens, strict=True), start=1)
        ]
    )
    print(verdict)
    assert verdict.is_kept, verdict


def logits(forced: dict[int, list[int]], chunk: int) -> dict[int, torch.Tensor]:
    num_pages = 1 + sum(-(-len(tokens) // PAGE) for tokens in forced.values())
    max_len = max(len(tokens) for tokens in forced.values()) + 1
    sizes = {"num_pages": num_pages, "max_rows": max(forced), "max_len": max_len}
    subject = Engine(find_model(NANO), device=cuda.DEVICE, attention="reference", **sizes)  # type: ignore[arg-type]
    try:
        return subject.logits(HandPlanner(PAGE, num_pages), forced, chunk)
    finally:
        subject.executor.close()


class Hog:
    """Takes the device's memory before one of an engine's steps.

    Args:
        engine: Whose steps are counted, from 1.
        step: Which.

    Attributes:
        taken: What it took.
    """

    def __init__(self, engine: Any, step: int) -> None:
        self._step = engine.step
        self._left = step
        self.taken: torch.Tensor | None = None
        engine.step = self.step

    def step(self) -> Any:
        self._left -= 1
        if not self._left:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            self.taken = torch.empty(free - SPARE_BYTES, dtype=torch.uint8, device=cuda.DEVICE)
        return self._step()


def test_steps_for_which_another_took_the_memory_are_done_in_parts(depth: int) -> None:
    lengths, num_new = [90] * 8 + [7_000] * 2, 120
    prompts = list(cuda.prompts_of(lengths, seed=5).values())
    sampling = [sampling_of(index, num_new) for index in range(len(prompts))]
    sizes: dict[str, Any] = {"max_model_len": 7_400, "max_batched_tokens": 16_384, "kv_pages": 1_200, "page_size": PAGE}
    sizes |= {"device": cuda.DEVICE, "dtype": "float32", "max_running_requests": 16, "host_cache_gib": 0.2}
    with LLM(in_process=True, graphs="all", overlap=depth, cpu_threads=1, log_level="warning", **sizes) as llm:
        llm.generate(prompts[:1] + prompts[-1:], sampling[:2])  # what a first step allocates for good
        llm.flush()
        hog = Hog(engine_of(llm), 1)
        tokens = [result.outputs[0].token_ids for result in llm.generate(prompts, sampling)]
        stats = engine_of(llm).stats()
        assert hog.taken is not None
        free, total = torch.cuda.mem_get_info()
        print(f"{free >> 20} MiB of {total >> 20} free; {stats.step_faults}; {stats.graph_gate}; {stats.drafts}")
        assert free < 2 * SPARE_BYTES
        assert stats.step_faults["out_of_memory"] >= 1
        assert sum(stats.graph_gate["replay"].values()) > num_new // 4
        hog.taken = None
        torch.cuda.empty_cache()  # for other streams, and other processes
        check_whole(llm)
    assert [len(said) for said in tokens] == [num_new] * len(prompts)
    check_margin(prompts, sampling, tokens)


def test_an_illegal_memory_access_in_a_loaded_server_costs_no_stream_a_token(tmp_path: Path) -> None:
    lengths, num_new = [1_000 + 16 * index for index in range(16)], 900
    prompts = list(cuda.prompts_of(lengths, seed=6).values())
    sampling = [sampling_of(index, num_new) for index in range(len(prompts))]
    sizes = {
        "max_model_len": 2_304,
        "max_running_requests": 16,
        "kv_pages": 2_600,
        "page_size": PAGE,
        "dtype": "float32",
    }
    sizes |= {"device": cuda.DEVICE, "graphs": "all", "host_cache_gib": 1, "spec": "eagle3", "cpu_threads": 1}
    sizes |= {"sampling_defaults": "openai", "log_level": "warning"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    low, high = 60, 120  # steps: the prompts take 8, and none says its 900 tokens in 112, six a step
    command = (sys.executable, "-m", "tests.faults.serve", f"tests.gpu.wild_worker {low}:{high}")
    with lives.serve(tmp_path, *flags, command=command, environment={"TMPDIR": str(tmp_path)}, is_fork=False) as live:
        replies = asyncio.run(all_replies(live.url, prompts, sampling))
        info = live.wait_idle()
        replayed = live.counter("hiserve:graph_gate_total", decision="replay")
    crash, recovery, replays = info["crash"], info["recovery"], info["replays"]
    host_share = replays["cached"]["host"] / replays["tokens"]
    weights_s = recovery["phases"]["load weights"]
    print("crash:", json.dumps(crash))
    print("recovery:", json.dumps(recovery), "replays:", json.dumps(replays), f"host share {host_share:.3f}")
    assert crash["end"] == f"exit code {EXIT_DEVICE}", crash
    assert "illegal memory access" in live.log.read_text()
    assert low - 3 <= crash["num_steps"] <= high and len(crash["uids"]) == len(prompts), crash
    (worker,) = info["workers"]
    assert worker["incarnation"] == 2
    assert replays["requests"] == len(prompts)
    assert recovery["total_s"] <= MAX_RECOVERY_S + weights_s
    assert host_share >= MIN_HOST_SHARE
    assert replayed > 0 and sum(worker["stats"]["graph_gate"]["replay"].values()) > 0
    assert worker["stats"]["drafts"]["chosen_steps"]
    assert [reply.ends for reply in replies] == [["length"]] * len(prompts)
    assert [len(reply.tokens) for reply in replies] == [num_new] * len(prompts)
    check_margin(prompts, sampling, [reply.tokens for reply in replies])


async def all_replies(url: str, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> list[Any]:
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": how.max_tokens,
            "temperature": how.temperature,
            "seed": how.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        for prompt, how in zip(prompts, sampling, strict=True)
    ]
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        return list(await asyncio.gather(*(read(http, body) for body in bodies)))
