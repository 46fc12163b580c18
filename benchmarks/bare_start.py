"""A start on a machine where nothing was compiled yet, beside the next one; and what prompts cost while compilers run.

Two more rows are of starts that find every kernel in the cache, in one process each and in turns: ``short`` looks at the first
shapes of steps alone, as any such start does; ``full`` runs all of them without launching any.

Usage: ``python -m benchmarks.bare_start OUT.json COMMIT [--watch-s 100] [--turns 2] [--tiny]`` on a CUDA device: Llama-8B's shape,
random weights, defaults. Each start is a process of its own whose home is an empty folder, the same for all: compilers keep
there what they make. Told are the seconds until it is ready, and of prompts that come one after the other from then on when each
came and how many of its tokens a second were computed; in the first start until ``--watch-s`` are over, for FlashInfer's compilers
take that long. ``--tiny`` runs it on the CPU, as a test of this file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, SERVER, Record, gpu_parser, medians

FULL: dict[str, Any] = {"shape": "llama-8b", "load_format": "dummy", "max_model_len": 16_384}
TINY: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "kv_pages": 64, "max_model_len": 256}
CACHES = ("TRITON_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR")
CHILD = """
import importlib.util, json, logging, sys, time
import numpy as np
import hiserve
from hiserve.engine import startup
settings, length, watch_s, pause_s, is_full = json.loads(sys.argv[1])
if settings.get("in_process"):
    logging.basicConfig(level=logging.INFO)
if is_full:
    startup._NUM_FIRST = None  # of shapes of steps, after which a start knows that all is in the cache
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


def start(
    home: Path,
    settings: dict[str, Any],
    length: int,
    watch_s: float,
    pause_s: float,
    is_full: bool = False,
) -> dict[str, Any]:
    """Starts an engine in a process of its own; ``compile_s`` is None without a compiler.

    Args:
        home: The folder in which compilers keep their work.
        settings: Of ``LLM``.
        length: Tokens of a prompt.
        watch_s: Seconds in which prompts are sent.
        pause_s: Seconds between two of them.
        is_full: All shapes of steps are run without launching any; the engine is in the process.
    """
    environment = {name: value for name, value in os.environ.items() if name not in CACHES} | {"HOME": str(home)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", CHILD, json.dumps([settings, length, watch_s, pause_s, is_full])]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the start failed:\n{done.stderr[-3000:]}")
    compiled = re.search(r"compiled kernels in ([\d.]+) s", done.stderr)
    told = {"compile_s": float(compiled[1]) if compiled else None, "log": done.stderr.splitlines()[-60:]}
    return json.loads(done.stdout.splitlines()[-1]) | told


def starts_in_turns(home: Path, settings: dict[str, Any], length: int, num_turns: int) -> dict[str, dict[str, Any]]:
    """Returns the seconds until ready, and those spent on compiling, of ``short`` and ``full`` starts: medians, samples."""
    settings = settings | {"in_process": True, "host_cache_gib": 0}
    samples: dict[str, dict[str, list[float]]] = {name: {"ready_s": [], "compile_s": []} for name in ("short", "full")}
    for _ in range(num_turns):
        for name, found in samples.items():
            made = start(home, settings, length, 0.0, 0.0, is_full=name == "full")
            for key, values in found.items():
                values.append(made[key] or 0.0)
    return {name: medians(found) | {"samples": found} for name, found in samples.items()}


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("--watch-s", type=float, default=100.0)
    parser.add_argument("--turns", type=int, default=2, help="of starts with all in the cache (2)")
    given = parser.parse_args()
    settings, length = (TINY, 64) if given.tiny else (FULL, 8192)
    command = f"python -m benchmarks.bare_start OUT.json COMMIT --watch-s {given.watch_s:g} --turns {given.turns}"
    result = Record.of(given, command, *SERVER, "hiserve/llm")
    result["starts"] = {}
    with tempfile.TemporaryDirectory() as home:
        for name, watch_s in {"bare": given.watch_s, "next": 3.0}.items():
            made = start(Path(home), settings, length, min(1.0, watch_s) if given.tiny else watch_s, 0.5)
            result["starts"][name] = made
            result.save()
            rates = [each["tokens_per_s"] for each in made["prompts"]]
            told = f"prompts from {rates[0]} to {rates[-1]} tokens/s, FlashInfer {made['has_flashinfer']}"
            compiling = f"compiled for {made['compile_s'] or 0:.1f} s"
            print(f"{name}: ready after {made['ready_s']:.1f} s, {compiling}, {told}", flush=True)
        result["in_turns"] = starts_in_turns(Path(home), settings, length, given.turns) if given.turns else {}
        result.save()
        for name, made in result["in_turns"].items():
            print(
                f"{name}: ready after {made['ready_s']:.1f} s, of which {made['compile_s']:.1f} s in the compiling pass"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
