"""The gain of hiserve-nano's own drafts for a single stream on the CPU, with default settings.

Usage: ``python -m benchmarks.nano_spec [--rounds N]``. One engine as it comes, another with ``--spec off``, in turns:
each continues held-out dialogues and held-out code, one prompt at a time, greedily, by 200 tokens. Bar: at least 1.15 x
plain decoding, over the medians of each prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from benchmarks.record import ENGINE, RESULTS, ROOT, Record
from hiserve import LLM, SamplingParams
from hiserve.core.usage import DraftUse

PROMPTS = ROOT / "tests/data/held_out_prompts.jsonl"
KINDS = {"dialogue": ("coffee", "services"), "code": ("python", "pytask")}
NUM_PROMPTS, NUM_TOKENS = 6, 200  # of each kind; of each answer
ROUNDS = 7
BAR = 1.15
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS = {"plain": {"spec": "off"}, "default": {}}


def read_prompts() -> dict[str, list[str]]:
    """Returns some of the longest prompts of each kind: where nothing was said yet, nothing is held out either."""
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    found = {}
    for kind, sources in KINDS.items():
        texts = [row["prompt"] for row in rows if row["source"] in sources]
        found[kind] = sorted(texts, key=len)[-NUM_PROMPTS:]
    return found


def timed(llm: LLM, prompt: str) -> tuple[float, DraftUse, list[int]]:
    """Returns the seconds of an answer, what became of its drafts, and its tokens."""
    begin = time.perf_counter()
    (result,) = llm.generate([prompt], GREEDY)
    return time.perf_counter() - begin, result.outputs[0].drafts or DraftUse(), result.outputs[0].token_ids


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    engines, starts = {}, {}
    for name, settings in SETTINGS.items():
        begin = time.perf_counter()
        engines[name] = LLM("hiserve-nano", in_process=True, device="cpu", log_level="warning", **settings)
        starts[name] = round(time.perf_counter() - begin, 3)
    command = f"python -m benchmarks.nano_spec --rounds {rounds}"
    result = Record(RESULTS / "nano_spec.json", command, *ENGINE, "benchmarks/nano_spec.py")
    result |= {
        "workload": f"{NUM_PROMPTS} prompts a kind, one at a time, {NUM_TOKENS} tokens each, greedy, float32",
        "config": {
            "spec": engines["default"].settings.spec.spec,
            "spec_steps": engines["default"].settings.spec.spec_steps,
        },
        "cpu_threads": engines["default"].settings.runner.cpu_threads,
        "start_s": starts,
        "bar": BAR,
    }
    speedups = {}
    for kind, prompts in read_prompts().items():
        seconds: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in engines}
        use, num_equal = DraftUse(), 0
        for number in range(1 + rounds):  # the first warms up
            for index, prompt in enumerate(prompts):
                took = {name: timed(engines[name], prompt) for name in sorted(engines, reverse=bool(number % 2))}
                if number:
                    for name, (each, _, _) in took.items():
                        seconds[name][index].append(each)
                    use, num_equal = use + took["default"][1], num_equal + (took["default"][2] == took["plain"][2])
        totals = {name: sum(map(statistics.median, of_each)) for name, of_each in seconds.items()}
        speedups[kind] = totals["plain"] / totals["default"]
        result[kind] = {
            "tokens_per_s": {name: round(len(prompts) * NUM_TOKENS / total, 1) for name, total in totals.items()},
            "speedup": round(speedups[kind], 3),
            "drafts": use.shown() | {"accept_length": round(use.accept_length, 3)},
            "answers_equal": round(num_equal / (rounds * len(prompts)), 4),
            "seconds": {name: [[round(s, 4) for s in each] for each in of] for name, of in seconds.items()},
        }
        print(
            f"{kind:<10} {result[kind]['tokens_per_s']} {speedups[kind]:.2f} x, {use.accept_length:.2f} tokens a step"
        )
    for engine in engines.values():
        engine.close()
    result.save()
    return int(min(speedups.values()) < BAR)


if __name__ == "__main__":
    raise SystemExit(main())
