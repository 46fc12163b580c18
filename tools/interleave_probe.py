"""One measurement of the ``hiserve`` and ``benchmarks`` that Python finds: ``python tools/interleave_probe.py NAME``.

Prints a JSON object: figure -> cost. Costs are CPU time, so that neighbours on the machine change them little, but for those
whose name ends in ``(wall)``. Only the public API of hiserve is used, and the functions of two benchmarks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
WALL = " (wall)"
COMMAND = (sys.executable, "-c", "import sys; from hiserve.cli import main; sys.exit(main())", "serve", "--port", "0")
STORY = "The customer asked for a small latte with oat milk and then changed the order to a large one. "
STREAMS, REQUESTS, TOKENS = 16, 48, 64
TURNS = 12

Figures = dict[str, float]


def planner() -> Figures:
    """Plan and commit of a decode step, and a node's publication and backup."""
    from benchmarks.planner import measure, measure_nodes  # noqa: PLC0415

    steps = {f"{rows} rows": measure(rows, 400, has_host=rows == 256) for rows in (32, 256)}
    figures = {f"step of {name}, us": each["median"]["plan_and_commit_us"] for name, each in steps.items()}
    return figures | {"node of 16 pages, us": measure_nodes(16, 400)["median"]["publish_and_store_us"]}


def radix() -> Figures:
    """Match, publication and eviction of the prefix index."""
    time.perf_counter = time.thread_time
    from benchmarks.radix import measure_evict, measure_match, measure_publish  # noqa: PLC0415

    return {
        "match of 100k tokens, us": measure_match(101)["median"]["match_lock_release_us"],
        "publication of 300 nodes, us": measure_publish(15, 300, 20)["median"]["publish_us"],
        "eviction of 100 leaves, ms": measure_evict(5)["median"]["evict_ms"],
    }


def offline() -> Figures:
    """Tokens of an engine of this process."""
    from hiserve import LLM, SamplingParams  # noqa: PLC0415

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "max_running_requests": 8}
    costs = []
    with LLM(in_process=True, disable_prefix_cache=True, log_level="warning", **settings) as llm:
        for first in range(5):
            prompts = [[7 + (31 * first + 17 * row + 5 * at) % 4000 for at in range(256)] for row in range(8)]
            begin_s = time.process_time()
            llm.generate(prompts, sampling)
            costs.append(1e3 * (time.process_time() - begin_s) / (8 * TOKENS))
    return {"a token offline, ms": sorted(costs[1:])[0]}


def serving() -> Figures:
    """Tokens over HTTP: the costs of all processes of the server, and of the API process alone."""
    with _serving("--disable-prefix-cache") as (pid, http), ThreadPoolExecutor(STREAMS) as pool:

        def ask(number: int) -> None:
            prompt = [7 + (13 * number + 5 * at) % 4000 for at in range(64)]
            body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                assert sum(line.startswith("data: ") for line in response.iter_lines()) > 1

        list(pool.map(ask, range(STREAMS)))
        before, begin_s = _cpu_s(pid), time.perf_counter()
        list(pool.map(ask, range(REQUESTS)))
        after, num_tokens = _cpu_s(pid), REQUESTS * TOKENS
        wall_s = time.perf_counter() - begin_s
    return {
        "a served token, ms": 1e3 * (sum(after.values()) - sum(before.values())) / num_tokens,
        "of the API process, ms": 1e3 * (after[pid] - before[pid]) / num_tokens,
        f"a served token, ms{WALL}": 1e3 * wall_s / num_tokens,
    }


def second_turn() -> Figures:
    """A second turn from the cache: the costs of all processes, and until its first text."""
    costs, waits = [], []
    with _serving() as (pid, http):
        for number in range(TURNS):
            messages = [{"role": "user", "content": f"Note {number}. " + 30 * STORY + "What did they order?"}]
            _, reply = _turn(http, messages)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And what else?"}]
            before = sum(_cpu_s(pid).values())
            wait_s, _ = _turn(http, messages)
            costs.append(sum(_cpu_s(pid).values()) - before)
            waits.append(wait_s)
    return {
        "a second turn, ms": 1e3 * sum(costs) / TURNS,
        f"its first text, ms{WALL}": 1e3 * sorted(waits)[TURNS // 2],
    }


PROBES: dict[str, Callable[[], Figures]] = {
    each.__name__: each for each in (planner, radix, offline, serving, second_turn)
}


def _turn(http: httpx.Client, messages: list[dict[str, str]]) -> tuple[float, str]:
    body = {"messages": messages, "stream": True, "max_tokens": 16, "temperature": 0}
    text, begin_s, first_s = "", time.perf_counter(), 0.0
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                piece = "".join(choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])
                first_s = first_s or (time.perf_counter() if piece else 0.0)
                text += piece
    return first_s - begin_s, text


@contextlib.contextmanager
def _serving(*flags: str) -> Iterator[tuple[int, httpx.Client]]:
    process = subprocess.Popen([*COMMAND, "--log-level", "warning", *flags], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("listening on ").strip()
        with httpx.Client(base_url=url, timeout=300, limits=httpx.Limits(max_connections=STREAMS)) as http:
            yield process.pid, http
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def _cpu_s(root: int) -> dict[int, float]:
    """Returns the CPU seconds that a process and those below it have taken."""
    parents, taken = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)], taken[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    ours = {root}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return {pid: taken[pid] * TICK_S for pid in ours if pid in taken}


if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
