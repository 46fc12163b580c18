"""Nothing is compiled once an engine has started: a request that came upon it would wait for seconds."""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from hiserve import LLM, SamplingParams, kernels
from hiserve.config.options import AUTO_TIERS
from tests.helpers.cache_paths import SETTINGS
from tests.helpers.drafted import save_heads
from tests.helpers.tiered import engine_of

pytestmark = pytest.mark.gpu

SEED, MAX_LEN, MAX_ROWS = 23, 512, 40
SIZES: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "graphs": "all",
    "max_model_len": MAX_LEN,
    "max_running_requests": MAX_ROWS,
    "max_batched_tokens": 256,
    "kv_pages": 600,
    "page_size": 16,
    "host_cache_gib": 0,
}
HOW = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1},
)


class Changing:
    """As ``DraftController``; chooses another number of drafts every few steps, whatever pays."""

    times_own_drafts = False
    is_cold = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._chosen = 0

    def stays_cold(self, *_: Any) -> bool:
        return False

    def choose(self, *_: Any) -> int:
        if self._rng.random() < 0.4:
            self._chosen = self._rng.choice(AUTO_TIERS)
        return self._chosen

    def record(self, *_: Any) -> None:
        """Learns nothing."""


def variants() -> set[tuple[str, str]]:
    """What was compiled, or read from a cache of the compiler's, in this process: kernels and what they depend on."""
    found = set()
    for each in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{each.name}")
        for name, kernel in vars(module).items():
            if isinstance(kernel, triton.runtime.JITFunction):
                found |= {(name, str(key)) for caches in kernel.device_caches.values() for key in caches[0]}
    return found


def work(rng: random.Random, num_rows: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of any length, some of which begin alike, and answers that end early or at the end of the row."""
    common = [rng.randrange(1, 400) for _ in range(MAX_LEN)]
    prompts, sampling = [], []
    for _ in range(num_rows):
        length = rng.choice((1, 2, 3, 5, 9, 16, 17, 31, 48, 64, 65, 130, 300, MAX_LEN - 9))
        alike = rng.choice((0, 0, length // 2, length - 1))
        prompts.append(common[:alike] + [rng.randrange(1, 400) for _ in range(length - alike)])
        num_new = min(rng.choice((1, 2, 3, 7, 20, 45)), MAX_LEN - length)
        sampling.append(SamplingParams(seed=3, max_tokens=num_new, ignore_eos=True, **rng.choice(HOW)))
    return prompts, sampling


@pytest.mark.parametrize(
    ("spec", "backend", "quantize"),
    [
        *((spec, backend, "off") for spec in ("off", "ngram", "eagle3") for backend in ("auto", "triton")),
        *(("ngram", "triton", scheme) for scheme in ("fp8", "int4")),
    ],
)
def test_nothing_is_compiled_while_requests_wait(tmp_path: Path, spec: str, backend: str, quantize: str) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    named = f"{spec}:{save_heads(tmp_path, SEED)[spec]}" if spec == "eagle3" else spec
    with LLM(**SETTINGS | SIZES, spec=named, attention_backend=backend, quantize=quantize) as llm:
        choice: Any = engine_of(llm)._planner._drafting  # type: ignore[attr-defined]
        if spec != "off":
            choice._controller = Changing(rng)
        before = variants()
        assert before
        for num_rows in (1, 1, 1, 2, 3, 4, 8, 17, MAX_ROWS, 30, 64, 5, 1):
            prompts, sampling = work(rng, num_rows)
            llm.generate(prompts, sampling)
            llm.generate(prompts[-3:], sampling[-3:])  # of a cache
        after = variants()
    for each in sorted(after - before):
        print(*each)
    assert not after - before


COLD_START = """
import sys, time
import triton
from triton import knobs
from hiserve import LLM
from hiserve.engine import runner_factory

late, seconds, compiled_s = [], [], []
is_over = False

def note(*, src, times, cache_hit, **_):
    if not cache_hit:
        compiled_s.append((times.ir_initialization + sum(each for _, each in times.lowering_stages)) / 1e6)
        if is_over:
            late.append(src.name)

def compile_steps(*given, **settings):
    global is_over
    begin = time.perf_counter()
    compile_one_by_one(*given, **settings)
    seconds.append(time.perf_counter() - begin)
    is_over = True

compile_one_by_one, runner_factory.compile_steps = runner_factory.compile_steps, compile_steps
knobs.compilation.listener = note
begin = time.perf_counter()
with LLM(
    in_process=True, shape="qwen3-0.6b", load_format="dummy", spec=SPEC, attention_backend="triton", max_model_len=4096,
    max_running_requests=40, max_batched_tokens=1024, host_cache_gib=0, log_level="warning",
) as llm:
    print(f"start {time.perf_counter() - begin:.1f} s, of it {seconds[0]:.1f} s for {len(compiled_s)} kernels that took")
    print(f"{sum(compiled_s):.1f} s of compilers, the slowest {max(compiled_s):.1f} s; afterwards: {late}")
    assert len(compiled_s) > 20 and not late, late
    assert seconds[0] < 0.75 * sum(compiled_s), "compiled one after the other"
print("done")
"""


@pytest.mark.parametrize("spec", ["off", "ngram"])
def test_a_first_start_compiles_kernels_side_by_side_and_none_later(spec: str, tmp_path: Path) -> None:
    """Seconds are compared with those that compilers took in the same run, summed, on a machine of many cores."""
    program = COLD_START.replace("SPEC", repr(spec))
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    print(done.stdout, done.stderr[-3000:])
    assert done.returncode == 0 and done.stdout.endswith("done\n")
