"""What it costs to check a prompt of token ids, per token: as a list, and as an array.

Usage: ``python -m benchmarks.token_prompts``. CPU time of this process, median of several rounds in turns. The id-by-id
check in Python that hiserve had before is measured in the same run. Bar: a list at most 0.1 x of it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, Record
from hiserve.llm.prompt_inputs import check_tokens

NUM_PROMPTS, PROMPT_TOKENS, VOCAB_SIZE = 128, 2048, 128_256
ROUNDS = 9
SEED = 20261122
BAR = 0.1


def one_by_one(prompt: list[int]) -> Any:
    """As it was: each id by itself."""
    assert all(isinstance(value, Integral) and 0 <= int(value) < VOCAB_SIZE for value in prompt)
    return np.array([int(value) for value in prompt], dtype=np.int32)


def main() -> int:
    """Writes ``benchmarks/results/token_prompts.json``; returns 1 if the bar is missed."""
    arrays = list(np.random.default_rng(SEED).integers(0, VOCAB_SIZE, (NUM_PROMPTS, PROMPT_TOKENS), dtype=np.int32))
    lists = [prompt.tolist() for prompt in arrays]
    ways: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "list, id by id": (one_by_one, lists),
        "list": (lambda prompt: check_tokens(prompt, VOCAB_SIZE), lists),
        "int64 array": (lambda prompt: check_tokens(prompt, VOCAB_SIZE), [each.astype(np.int64) for each in arrays]),
        "int32 array": (lambda prompt: check_tokens(prompt, VOCAB_SIZE), arrays),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (check, prompts) in ways.items():
            begin = time.process_time()
            for prompt in prompts:
                check(prompt)
            samples[name].append(1e9 * (time.process_time() - begin) / (NUM_PROMPTS * PROMPT_TOKENS))
    ns_per_token = {name: round(statistics.median(values), 2) for name, values in samples.items()}
    ratio = ns_per_token["list"] / ns_per_token["list, id by id"]
    command = "python -m benchmarks.token_prompts"
    record = Record(RESULTS / "token_prompts.json", command, "hiserve/llm", "benchmarks/token_prompts.py")
    record |= {
        "seed": SEED,
        "ns_per_token": ns_per_token,
        "spread_ns": {name: [round(min(values), 2), round(max(values), 2)] for name, values in samples.items()},
        "list_to_id_by_id": round(ratio, 3),
        "bar": BAR,
    }
    record.save()
    print(json.dumps(record, indent=1))
    return int(ratio > BAR)


if __name__ == "__main__":
    sys.exit(main())
