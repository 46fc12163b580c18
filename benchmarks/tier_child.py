"""An engine that serves what it is sent, and tells what each request found and took; of whichever tree is on the path.

    PYTHONPATH=TREE python benchmarks/tier_child.py SETTINGS [HOST_PAGES]

Only what trees of long ago have, too, is used here. Requests come as lines of JSON, and so do the answers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import hiserve
from hiserve import LLM, SamplingParams
from hiserve.engine.loop import Engine
from hiserve.ipc.updates import RequestUpdates

GIB = 1 << 30
READY_TIMEOUT_S = 30.0


class Watch:
    """Tells what each step of an engine took.

    Attributes:
        first: In the order in which they came: seconds from the beginning to the first token of a request, CPU of all
            threads until then, and the seconds until the engine began to compute anything.
        decode_s: Of each step in which all rows decoded.
        decode_cpu_s: CPU of all threads in those steps.
        num_decoded: Tokens of those steps.
    """

    def __init__(self, engine: Engine) -> None:
        executor: Any = engine._executor
        self._step, self._submit = engine.step, executor.submit
        engine.step, executor.submit = self.step, self.submit  # type: ignore[method-assign]
        self.begin(0)

    def begin(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._began = time.perf_counter(), time.process_time()
        self._waited_s: float | None = None
        self._seen: dict[int, None] = {}
        self._ended: set[int] = set()
        self.first: list[tuple[float, float, float]] = []
        self.decode_s: list[float] = []
        self.decode_cpu_s = 0.0
        self.num_decoded = 0

    def step(self) -> RequestUpdates | None:
        is_decode = len(self._seen) == self._num_rows and len(self._ended) < self._num_rows
        wall, cpu = time.perf_counter(), time.process_time()
        updates = self._step()
        wall_now, cpu_now = time.perf_counter(), time.process_time()
        if updates is None:
            return updates
        if is_decode:
            self.decode_s.append(wall_now - wall)
            self.decode_cpu_s += cpu_now - cpu
            self.num_decoded += len(updates.tokens)
        for uid, count, finish in zip(updates.uids, updates.counts, updates.finishes, strict=True):
            if count and uid not in self._seen:
                self._seen[uid] = None
                assert self._waited_s is not None, "a token came before anything was computed"
                self.first.append((wall_now - self._began[0], cpu_now - self._began[1], self._waited_s))
            if finish:
                self._ended.add(uid)
        return updates

    def submit(self, plan: Any) -> Any:
        if self._waited_s is None and plan.num_new.sum():
            self._waited_s = time.perf_counter() - self._began[0]
        return self._submit(plan)


def open_llm(settings: dict[str, Any], host_pages: int) -> LLM:
    """Opens an engine of this process with so many host pages, page 0 not counted, and waits until they are ready."""
    gib = 0.0
    if host_pages:
        with LLM(in_process=True, host_cache_gib=0.01, **settings) as llm:
            gib = 0.01 * (host_pages + 1.5) / pages_of(llm).num_pages
    llm = LLM(in_process=True, host_cache_gib=gib, **settings)
    end = time.monotonic() + READY_TIMEOUT_S
    while host_pages and pages_of(llm).num_ready < pages_of(llm).num_pages:
        assert time.monotonic() < end, "the host pages are not ready"
        engine_of(llm).step()
    return llm


def engine_of(llm: LLM) -> Engine:
    engine: Engine = llm._backend.engine  # type: ignore[attr-defined]
    return engine


def pages_of(llm: LLM) -> Any:
    return engine_of(llm)._planner._cache.host.pages


def answer(llm: LLM, watch: Watch, asked: dict[str, Any]) -> dict[str, Any]:
    if asked.get("flush"):
        llm.flush()
    each = [SamplingParams(temperature=0.0, seed=0, max_tokens=count, ignore_eos=True) for count in asked["num_new"]]
    watch.begin(len(each))
    results = llm.generate(asked["prompts"], each)
    stats = engine_of(llm).stats().cache
    return {
        "replies": [result.outputs[0].token_ids for result in results],
        "found": [[result.cached.device, result.cached.host, result.cached.store] for result in results],
        "first": watch.first,
        "decode_s": watch.decode_s,
        "decode_cpu_s": watch.decode_cpu_s,
        "num_decoded": watch.num_decoded,
        "tree": str(Path(hiserve.__file__).parent.parent),
        "host_pages": pages_of(llm).num_pages - 1,
        "evicted": engine_of(llm)._planner._cache.device.num_evicted,
        "unfulfilled": {"prefetches": stats.prefetches.unfulfilled, "uploads": stats.uploads.unfulfilled},
    }


def main() -> None:
    host_pages = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with open_llm(json.loads(sys.argv[1]), host_pages) as llm:
        watch = Watch(engine_of(llm))
        for line in sys.stdin:
            print(json.dumps(answer(llm, watch, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
