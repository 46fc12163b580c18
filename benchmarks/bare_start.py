"""A start on a machine where nothing was compiled yet, beside the next one; and what prompts cost while compilers run.

Usage: ``python -m benchmarks.bare_start OUT.json COMMIT [--watch-s 100] [--tiny]`` on a CUDA device: Llama-8B's shape, random
weights, defaults. Each start is a process of its own whose home is an empty folder, the same for both: compilers keep
there what they make. Told are the seconds until it is ready, and of prompts that come one after the other from then on when each
came and how many of its tokens a second were computed; in the first start until ``--watch-s`` are over, for FlashInfer's compilers
take that long. ``--tiny`` runs it on the CPU, as a test of this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, SERVER, Record, gpu_parser

FULL: dict[str, Any] = {"shape": "llama-8b", "load_format": "dummy", "max_model_len": 16_384}
TINY: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "kv_pages": 64, "max_model_len": 256}
CACHES = ("TRITON_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR")
CHILD = """
import importlib.util, json, sys, time
import numpy as np
import hiserve
settings, length, watch_s, pause_s = json.loads(sys.argv[1])
begin = time.perf_counter()
with hiserve.LLM(**settings) as llm:
    ready_s = time.perf_counter() - begin
    rng, prompts = np.random.default_rng(0), []
    one = hiserve.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    while not prompts or time.perf_counter() - begin < ready_s + watch_s:
        prompt, start = rng.integers(0, 256, length), time.perf_counter()
        llm.generate([prompt.astype(np.int32)], one)
        end = time.perf_counter()
        prompts.append({"at_s": round(end - begin, 2), "tokens_per_s": round(length / (end - start))})
        time.sleep(pause_s)
has_flashinfer = importlib.util.find_spec("flashinfer") is not None
print(json.dumps({"ready_s": ready_s, "has_flashinfer": has_flashinfer, "prompts": prompts}))
"""


def start(home: Path, settings: dict[str, Any], length: int, watch_s: float, pause_s: float) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in CACHES} | {"HOME": str(home)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", CHILD, json.dumps([settings, length, watch_s, pause_s])]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the start failed:\n{done.stderr[-3000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stderr.splitlines()[-60:]}


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--watch-s", type=float, default=100.0)
    given = parser.parse_args()
    settings, length = (TINY, 64) if given.tiny else (FULL, 8192)
    command = f"python -m benchmarks.bare_start OUT.json COMMIT --watch-s {given.watch_s:g}"
    result = Record.of(given, command, *SERVER, "hiserve/llm")
    result["starts"] = {}
    with tempfile.TemporaryDirectory() as home:
        for name, watch_s in {"bare": given.watch_s, "next": 3.0}.items():
            made = start(Path(home), settings, length, min(1.0, watch_s) if given.tiny else watch_s, 0.5)
            result["starts"][name] = made
            result.save()
            rates = [each["tokens_per_s"] for each in made["prompts"]]
            told = f"prompts from {rates[0]} to {rates[-1]} tokens/s, FlashInfer {made['has_flashinfer']}"
            print(f"{name}: ready after {made['ready_s']:.1f} s, {told}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
