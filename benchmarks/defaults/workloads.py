"""Whole workloads through the offline API of whatever hiserve the path finds, in a process of its own.

Usage, by ``benchmarks.defaults`` alone: ``python workloads.py SHAPE SETTINGS ROUNDS``, with the model's settings as JSON;
the last line printed is JSON: rates of each workload, round by round. It imports nothing but hiserve's public names, so
that an earlier version can run it too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hiserve

SEED = 20261122
VOCAB_SIZE = 4096  # ids of prompts are below it
Prompt = NDArray[np.int32]


def main() -> None:
    shape, settings, rounds = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    begin = time.perf_counter()
    with hiserve.LLM(shape=shape, load_format="dummy", **settings) as llm:
        found: dict[str, Any] = {"start_s": time.perf_counter() - begin}
        rng = np.random.default_rng(SEED)
        workloads = TINY if settings.get("device") == "cpu" else LARGE if shape == "llama-8b" else SMALL
        found["first row"] = [workloads["1 row"](llm, rng)]  # while pages are still being pinned
        for name, workload in workloads.items():
            workload(llm, rng)  # warms up
            found[name] = []
            for _ in range(rounds):
                llm.flush()
                found[name].append(workload(llm, rng))
    print(json.dumps(found))


def at_once(num_rows: int, num_prompt: int, num_output: int) -> Callable[[Any, np.random.Generator], float]:
    def run(llm: Any, rng: np.random.Generator) -> float:
        prompts = [draw(rng, num_prompt) for _ in range(num_rows)]
        return num_rows * num_output / timed(llm, prompts, num_output)[0]

    return run


def chats(
    num_chats: int, num_turns: int, shared: int, added: int, reply: int
) -> Callable[[Any, np.random.Generator], float]:
    """Returns a workload of chats in turns, each of which sends all that was said before."""

    def run(llm: Any, rng: np.random.Generator) -> float:
        said = [draw(rng, shared)] * num_chats
        seconds = 0.0
        for _ in range(num_turns):
            prompts = [np.concatenate((before, draw(rng, added))) for before in said]
            took_s, replies = timed(llm, prompts, reply)
            seconds += took_s
            said = [np.concatenate(both) for both in zip(prompts, replies, strict=True)]
        return num_chats * num_turns * reply / seconds

    return run


def timed(llm: Any, prompts: list[Prompt], num_output: int) -> tuple[float, list[Prompt]]:
    """Generates for prompts, which are lists of ids as most callers have them; returns seconds and the replies."""
    given = [prompt.tolist() for prompt in prompts]
    sampling = hiserve.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(given, sampling)
    seconds = time.perf_counter() - begin
    replies = [np.array(output.outputs[0].token_ids, dtype=np.int32) for output in outputs]
    assert all(reply.size == num_output for reply in replies), "a reply is shorter than asked for"
    return seconds, replies


def draw(rng: np.random.Generator, count: int) -> Prompt:
    return rng.integers(0, VOCAB_SIZE, count, dtype=np.int32)


LARGE = {
    "1 row": at_once(1, 1024, 512),
    "128 rows": at_once(128, 1024, 256),
    "64 chats of 6 turns": chats(64, 6, 1024, 512, 64),
}
SMALL = {"1 row": at_once(1, 1024, 256), "128 rows": at_once(128, 1024, 256)}
TINY = {"1 row": at_once(1, 24, 4), "128 rows": at_once(4, 24, 4), "64 chats of 6 turns": chats(2, 2, 16, 8, 4)}

if __name__ == "__main__":
    main()
