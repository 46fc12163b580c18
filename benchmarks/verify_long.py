"""Steps that verify drafts of long rows, in an engine, by how many parts attention may split their keys into.

Usage: ``python -m benchmarks.verify_long OUT.json COMMIT [--drafts 3] [--tiny]`` on a CUDA device: Llama-8B's shape, random
weights, drafts of n-grams, hardly any of which is right, so that a step is what a row waits for a token. ``now`` is
``choose_num_extra`` as it is; ``before`` gives rows of several tokens as many parts as rows of one (as until 53c153b). Two
engines, one after the other, with the same prompts; of each case the median step. ``--tiny`` runs it on the CPU, where attention
has no such choice, as a test of this file.
"""

from __future__ import annotations

import json
import statistics
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.drive import Drive
from benchmarks.measured import ENGINE
from benchmarks.record import Record, gpu_parser
from hiserve.attention import triton as chosen_in
from hiserve.kernels.attention_schedule import ScheduledRows, choose_num_extra, count_programs

SEED = 20261122
VOCAB_SIZE = 4096
CASES = ((1, 8_000), (1, 32_000), (4, 8_000), (4, 32_000), (8, 16_000), (16, 8_000))  # rows, tokens of each prompt
TINY_CASES = ((1, 24), (4, 24))
NUM_NEW = 160
FULL: dict[str, Any] = {"shape": "llama-8b", "load_format": "dummy", "device": "cuda", "max_model_len": 33_000}
TINY: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "kv_pages": 64, "max_model_len": 256}


def as_before(rows: ScheduledRows, heads: tuple[int, int], num_sms: int, num_keys: int) -> int:
    """As ``choose_num_extra``, whatever the tokens of a row."""
    num_rows, num_at_once = rows.kv_lens.shape[0], num_sms // count_programs(rows, heads)
    num_more_blocks = num_rows * (-(-rows.max_kv_len // num_keys) - 1)
    return max(1, min(num_at_once * (2 if num_rows <= num_at_once else 1), num_more_blocks))


def measure(settings: dict[str, Any], cases: tuple[tuple[int, int], ...], num_new: int) -> dict[str, float]:
    """Returns the median milliseconds of a step, by case."""
    rng = np.random.default_rng(SEED)
    drive, found = Drive(**settings), {}
    for rows, length in cases:
        drive.settle()
        drive.engine.flush()
        seen = [drive.add(rng.integers(0, VOCAB_SIZE, length).astype(np.int32), num_new) for _ in range(rows)]
        drive.finish(*seen)
        times = np.unique(np.array(seen[-1].times))[num_new // 5 :]  # its prompt is computed last
        found[f"{rows} x {length}"] = statistics.median(np.diff(times).tolist()) * 1e3
    drive.close()
    return found


def main() -> int:
    """Writes the result file, choice by choice."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--drafts", type=int, default=3)
    given = parser.parse_args()
    settings = (TINY if given.tiny else FULL) | {"spec": "ngram", "spec_steps": given.drafts, "host_cache_gib": 0}
    command = f"python -m benchmarks.verify_long OUT.json COMMIT --drafts {given.drafts}"
    result = Record.of(given, command, *ENGINE)
    result |= {"seed": SEED, "step_ms": {}}
    for name, choice in {"before": as_before, "now": choose_num_extra}.items():
        with mock.patch.object(chosen_in, "choose_num_extra", choice):
            made = measure(settings, TINY_CASES if given.tiny else CASES, 16 if given.tiny else NUM_NEW)
        result["step_ms"][name] = made
        result.save()
        print(name, json.dumps(made), flush=True)
    now, before = result["step_ms"]["now"], result["step_ms"]["before"]
    result["now over before"] = {case: round(now[case] / before[case], 3) for case in now}
    result.save()
    print(json.dumps(result["now over before"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
