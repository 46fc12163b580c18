"""Offline throughput on the CPU against transformers, in one process and in turns.

Usage: ``python -m benchmarks.offline [--threads N]``. hiserve-nano in float32, 8 prompts of 256 tokens, 128 tokens
each, greedy, no prefix shared or kept. Bars: at least 3 x ``generate`` one prompt at a time, at least 1.0 x
``generate`` over the batch, with the same threads.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

from benchmarks.record import ENGINE, RESULTS, Record, judge, medians
from hiserve import LLM, SamplingParams
from hiserve.models.model_config import find_model

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 256, 128
ROUNDS = 7
SEED = 20261121
BARS = {"one by one": 3.0, "batched": 1.0}


def timed(work: Callable[..., object], *arguments: object) -> float:
    begin = time.perf_counter()
    work(*arguments)
    return ROWS * OUTPUT_TOKENS / (time.perf_counter() - begin)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    oracle = transformers.AutoModelForCausalLM.from_pretrained(find_model("hiserve-nano"), dtype=torch.float32).eval()
    oracle.generation_config.eos_token_id = None  # as ignore_eos: go on after it
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    generator = np.random.default_rng(SEED)
    settings = {"in_process": True, "dtype": "float32", "cpu_threads": threads, "max_running_requests": ROWS}
    samples: dict[str, list[float]] = {"hiserve": [], "one by one": [], "batched": []}

    @torch.inference_mode()
    def generate(rows: torch.Tensor) -> torch.Tensor:
        options = {"do_sample": False, "temperature": None, "top_p": None, "pad_token_id": 2}
        mask = torch.ones_like(rows)
        return oracle.generate(rows, attention_mask=mask, max_new_tokens=OUTPUT_TOKENS, **options)[:, PROMPT_TOKENS:]

    with LLM("hiserve-nano", disable_prefix_cache=True, log_level="warning", **settings) as llm:
        torch.set_num_threads(threads)
        for _ in range(ROUNDS):
            prompts = torch.from_numpy(generator.integers(7, 4096, (ROWS, PROMPT_TOKENS)))
            lists = prompts.tolist()
            samples["hiserve"].append(timed(llm.generate, lists, sampling))
            samples["one by one"].append(timed(lambda rows: [generate(row[None]) for row in rows], prompts))
            samples["batched"].append(timed(generate, prompts))
        ours = [result.outputs[0].token_ids for result in llm.generate(lists, sampling)]
    agreeing = float(np.mean(np.array(ours) == generate(prompts).numpy()))
    tokens_per_s = medians(samples, 1)
    ratios = {name: tokens_per_s["hiserve"] / tokens_per_s[name] for name in BARS}
    command = f"python -m benchmarks.offline --threads {threads}"
    record = Record(RESULTS / "offline.json", command, *ENGINE, "hiserve/llm", "benchmarks/offline.py")
    record |= {
        "workload": f"{ROWS} x {PROMPT_TOKENS} -> {OUTPUT_TOKENS} tokens, float32, {threads} threads, seed {SEED}",
        "tokens_per_s": tokens_per_s,
        "ratios": {name: round(value, 2) for name, value in ratios.items()},
        "bars": BARS,
        "tokens_equal_to_transformers": round(agreeing, 4),
        "samples_tokens_per_s": {name: [round(value, 1) for value in values] for name, values in samples.items()},
    }
    record.save()
    return int(bool(judge(ratios, least=BARS)))


if __name__ == "__main__":
    sys.exit(main())
