"""A worker's kernel refuses it memory in the middle of a forward: the step is done in parts, nobody loses a token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from hiserve import LLM, SamplingParams
from tests.faults.harness import read, serving, worker_pid
from tests.helpers.traffic import SETTINGS

SIZES = {"max_model_len": 3328, "max_batched_tokens": 3072, "kv_pages": 480, "host_cache_gib": 0}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
LONG, SHORT, NUM_NEW = 3000, 24, 60
STARVED = "tests.faults.starved 10 24"  # with the tenth step, that is while the short ones decode


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(9)
    return [rng.integers(7, 4096, size).tolist() for size in (SHORT, SHORT + 9, SHORT + 20, LONG)]


def sampling(index: int) -> dict[str, Any]:
    return {"temperature": 0.8 * (index % 2), "seed": index, "max_tokens": NUM_NEW, "ignore_eos": True}


def undisturbed() -> list[list[int]]:
    with LLM(in_process=True, disable_prefix_cache=True, spec="off", **SETTINGS | SIZES) as llm:
        results = llm.generate(prompts(), [SamplingParams(**sampling(index)) for index in range(len(prompts()))])
        return [result.outputs[0].token_ids for result in results]


async def test_a_prompt_for_which_there_is_no_memory_is_computed_in_parts_and_every_stream_is_right(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, *FLAGS, worker=STARVED) as live:
        worker = worker_pid(live)
        bodies = [
            {"prompt": prompt, "stream": True, "return_token_ids": True, **sampling(index)}
            for index, prompt in enumerate(prompts())
        ]
        async with httpx.AsyncClient(base_url=live.url, timeout=120, trust_env=False) as http:
            short = [asyncio.create_task(read(http, body)) for body in bodies[:-1]]
            while live.counter("hiserve:engine_steps_total") < 12:
                await asyncio.sleep(0.02)
            assert not any(task.done() for task in short)
            replies = [await read(http, bodies[-1]), *await asyncio.gather(*short)]
        info = live.wait_idle()
        assert worker_pid(live) == worker, live.log.read_text()
        (stats,) = (each["stats"] for each in info["workers"])
        assert stats["step_faults"]["out_of_memory"] >= 1
        assert live.counter("hiserve:step_faults_total", kind="out_of_memory") == stats["step_faults"]["out_of_memory"]
        assert stats["free_pages"] + stats["evictable_pages"] == info["workers"][0]["num_pages"]
    assert "can't allocate memory" in live.log.read_text()
    replies.append(replies.pop(0))
    assert [reply.ends for reply in replies] == [["length"]] * len(replies)
    assert [reply.tokens for reply in replies] == undisturbed()
