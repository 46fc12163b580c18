"""The first token under a grammar, known or unseen, against a free one, over HTTP.

Usage: ``python -m benchmarks.first_constrained OUT.json COMMIT [--cpu | --tiny] [--rounds N]``. Requests of one token come one at a
time, in turns: free, under a schema that was used before, and under one that was not; each has a prompt of its own. ``--cpu`` takes
hiserve-nano and counts the CPU time of all processes of the server, so that other load on the machine does not count; otherwise it is a
shape of random weights on a CUDA device, and the time on the clock. Both are told. Bars: the median of known / free, and by how much the 99th
percentile of unseen exceeds the median of free. ``--tiny`` is a test of this file.
"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import numpy as np

from benchmarks.grammars import SEED
from benchmarks.record import SERVER, Record, gpu_parser, judge
from benchmarks.served import Server, child_pids, serving_shape, thread_cpu_s
from benchmarks.vetting import drawn
from hiserve.models.builtin_shapes import SHAPES
from hiserve.models.model_config import NANO

SHAPE, VOCAB_SIZE = "llama-8b", 4096  # ids of prompts are below it
ON_CPU: dict[str, Any] = {"model": NANO, "device": "cpu", "cpu_threads": 1, "kv_pages": 2200, "max_model_len": 2048}
ON_GPU: dict[str, Any] = {"shape": SHAPE, "load_format": "dummy", "device": "cuda", "max_model_len": 2048}
WAYS = ("free", "known", "unseen")
BARS = {"known / free": 1.02, "unseen p99 - free, ms": 60.0}


class Asking:
    """Sends requests to a server, and measures each.

    Args:
        server: The server.
        num_prompt: Tokens of each prompt.
    """

    def __init__(self, server: Server, num_prompt: int) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=600)
        self._pid, self._num_prompt, self._num_unseen = server.process.pid, num_prompt, 0
        self._rng = np.random.default_rng(SEED)

    def ask(self, way: str) -> dict[str, float]:
        """Returns milliseconds until the first token: of CPU of all processes, and on the clock."""
        body: dict[str, Any] = {"prompt": self._rng.integers(7, VOCAB_SIZE, self._num_prompt).tolist(), "max_tokens": 1}
        if way != "free":
            self._num_unseen += way == "unseen"
            body["guided_json"] = json.loads(drawn(self._num_unseen if way == "unseen" else 0).text)
        pids = [self._pid, *child_pids(self._pid)]
        used_s, begin = sum(map(thread_cpu_s, pids)), time.perf_counter()
        self._http.post("/v1/completions", json=body).raise_for_status()
        took_s = time.perf_counter() - begin
        return {"cpu_ms": 1e3 * (sum(map(thread_cpu_s, pids)) - used_s), "clock_ms": 1e3 * took_s}


def measure(server: Server, num_prompt: int, num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns what each request took, by way; the first rounds start processes, and do not count."""
    asking, num_warm = Asking(server, num_prompt), 3
    found = {way: {"cpu_ms": list[float](), "clock_ms": list[float]()} for way in WAYS}
    for index in range(num_warm + num_rounds):
        for way in WAYS[:: 1 if index % 2 else -1]:
            one = asking.ask(way)
            for name, value in one.items() if index >= num_warm else ():
                found[way][name].append(round(value, 3))
    return found


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    is_small = given.cpu or given.tiny
    settings = (ON_CPU if is_small else ON_GPU) | {"spec": "off", "host_cache_gib": 0}
    num_prompt, num_rounds = (16, 2) if given.tiny else (512 if given.cpu else 1024, given.rounds)
    with serving_shape(settings, SHAPES[SHAPE]["vocab_size"]) as server:
        found = measure(server, num_prompt, num_rounds)
    figures = {}
    for clock in ("cpu_ms", "clock_ms"):
        free, known = (float(np.median(found[way][clock])) for way in ("free", "known"))
        figures[clock] = {"free, ms": free, "known / free": known / free}
        figures[clock]["unseen p99 - free, ms"] = float(np.percentile(found["unseen"][clock], 99)) - free
    judged, other = ("cpu_ms", "clock_ms") if is_small else ("clock_ms", "cpu_ms")
    command = f"python -m benchmarks.first_constrained OUT.json COMMIT{' --cpu' if is_small else ''}"
    code = (*SERVER, "hiserve/grammar", "benchmarks/first_constrained.py")
    record = Record(given.out, command, *code, at_commit=given.commit, num_gpus=int(not is_small))
    record |= {"prompt_tokens": num_prompt, "judged": judged, "bars": BARS, "samples": found}
    record |= {name: {each: round(value, 4) for each, value in figures[name].items()} for name in figures}
    record.save()
    print(f"{other}: {record[other]}")
    return int(bool(judge(figures[judged], most=BARS)) and not given.tiny)


if __name__ == "__main__":
    raise SystemExit(main())
