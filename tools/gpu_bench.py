"""Runs the benchmarks of a GPU, one after the other, and keeps the results of each.

Usage: ``python -m tools.gpu_bench --out FOLDER [--commit COMMIT] [--only NAME ...] [--skip NAME ...] [--within S] [--list]``.
Each has a process of its own and a limit of time. One that fails, misses a bar or is stopped at its limit stops no other, and
its result file is kept. FOLDER has two files, written anew after each: ``results.json``, the outcome and the result file of
each, and ``log.txt``, all output. With ``--within`` those that would not end in so many seconds are left out and named. A table
comes last. ``--unpack`` writes the results in FOLDER to ``benchmarks/results``.
``--tiny`` runs all that can run on a CPU with tiny sizes, as a test of the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import commit

ROOT = Path(__file__).parents[1]
OUT, COMMIT = "OUT.json", "COMMIT"
END_S = 10.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Job:
    """One benchmark."""

    name: str  # of it, and of its file in ``benchmarks/results``
    command: tuple[str, ...]  # arguments of Python; ``OUT.json`` and ``COMMIT`` are replaced
    expected_s: float  # on one H200, files and compilers warm; some are estimates
    tiny: tuple[str, ...] | None = ("--tiny",)  # further arguments for a CPU; None where it needs a GPU

    @property
    def limit_s(self) -> float:
        """When it is stopped."""
        return 60 + 1.6 * self.expected_s


def _bench(module: str, *more: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{module}", OUT, COMMIT, *more)


def _suite(*files: str) -> tuple[str, ...]:
    """The GPU tests of some files, or of all others."""
    return ("-m", "tools.gpu_suite", "--commit", COMMIT, "--output", OUT, "--", "-m", "gpu", "-v", *files)


# The whole suite in parts, each far from the ten minutes that one command may have: a log is written at the end of each.
_PARTS = {
    "compiling": ("compiling",),
    "graphs": ("graphs", "graph_edges", "paired", "devices", "weights", "second_device"),
    "slow": ("readiness", "spec"),
    "large": ("large_pool", "faults", "graph_memory"),
    "jitter": ("graph_jitter", "spec_jitter"),
}
_FILES = {part: tuple(f"tests/gpu/test_{name}.py" for name in names) for part, names in _PARTS.items()}
_LEFT_OUT = tuple(f"--ignore={file}" for files in _FILES.values() for file in files)

# What is least known first: a machine may be taken away.
JOBS = (
    Job("suite_gpu_compiling", _suite(*_FILES["compiling"]), 185, None),
    Job("first_seconds", _bench("first_seconds"), 150),
    Job("copy", _bench("kernels.copy"), 90, None),
    Job("bare_start", _bench("bare_start"), 280),
    Job("weights_gpu", _bench("weights", "--gib", "8", "--device", "cuda", "--rounds", "3"), 120, None),
    Job(
        "spec_cold_gpu",
        (
            *("-m", "benchmarks.spec_cold", "--scale", "large", "--json", OUT, "--commit", COMMIT),
            *("--heads", "eagle3,mtp", "--batches", "32,64,128", "--rounds", "2"),
        ),
        390,
        None,
    ),
    Job("spec_arrivals", _bench("spec_arrivals", "--requests", "128"), 290, ("--tiny", "--requests", "8")),
    Job("grammars", _bench("grammars"), 270),
    Job("api_process_gpu", _bench("api_process"), 180),
    Job("first_constrained_gpu", _bench("first_constrained"), 120),
    Job("gpu_spec", _bench("gpu", "--parts", "spec"), 400),
    Job("gpu_parts", _bench("gpu", "--parts", "decode", "small-decode", "traffic", "long"), 120),
    Job("gpu_2", _bench("gpu", "--parts", "prefill", "peers", "chats", "conversations", "graphs", "overlap"), 150),
    Job("gpu", _bench("gpu", "--parts", "profile", "http", "crowd-http", "small-http", "small-profile"), 240),
    Job("cache", _bench("cache"), 120),
    Job("cache_gpt_oss", _bench("cache", "--shape", "gpt-oss-20b", "--parts", "hit", "write_through"), 40, None),
    Job("cache_gemma", _bench("cache", "--shape", "gemma-3-27b", "--parts", "hit", "write_through"), 70, None),
    Job("recovery_gpu", _bench("recovery"), 240),
    Job("attention", _bench("kernels.attention"), 300),
    Job("hybrid", _bench("hybrid"), 300, ("--tiny", "--parts", "latent_decode", "delta", "glm-4.7-flash")),
    Job("defaults_small", _bench("defaults", "--shapes", "qwen3-0.6b"), 120, ("--tiny", "--rounds", "1")),
    Job("defaults", _bench("defaults", "--shapes", "llama-8b"), 280, None),
    Job("suite_gpu_graphs", _suite(*_FILES["graphs"]), 230, None),
    Job("suite_gpu_rest", _suite("tests/gpu", "tests/contract", *_LEFT_OUT), 480, None),
    Job("suite_gpu_slow", _suite(*_FILES["slow"]), 330, None),
    Job("suite_gpu_large", _suite(*_FILES["large"]), 280, None),
    Job("suite_gpu_jitter", _suite(*_FILES["jitter"]), 220, None),
)


@dataclass(frozen=True)
class Ran:
    """What became of a benchmark."""

    # ``ended 0``, with its exit code: benchmarks end with 1 where a bar is missed; or why it did not run or end.
    ended: str
    seconds: float  # it took
    command: str  # that was run
    result: Any  # the content of its file; None without one


def run(job: Job, commit: str, log: Path, *, limit_s: float, tiny: bool) -> Ran:
    """Runs a benchmark; its output goes to the terminal and to the end of the log.

    Args:
        job: The benchmark.
        commit: That is measured.
        log: A file.
        limit_s: When it is stopped.
        tiny: On a CPU.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        places = {OUT: str(path), COMMIT: commit}
        command = [sys.executable, *(places.get(each, each) for each in job.command), *((tiny and job.tiny) or ())]
        with log.open("a") as file:
            file.write(f"--- {job.name}: {shlex.join(command)}\n")
            file.flush()
            # In a session of its own, so that what it started ends with it.
            child = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
            try:
                ended = f"ended {child.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                ended = f"stopped after {limit_s:.0f} s"
            finally:
                _end(child)
        result = None
        with suppress(OSError, ValueError):  # it ended before there was one, or while it wrote
            result = json.loads(path.read_text())
    return Ran(ended, round(time.monotonic() - begin, 1), shlex.join(job.command), result)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a process and its children."""
    for number, wait_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
            if number is signal.SIGTERM:
                time.sleep(0.1)


def run_all(jobs: Sequence[Job], out: Path, commit: str, *, within_s: float, tiny: bool) -> dict[str, Ran]:
    """Runs benchmarks; writes and returns their outcomes, each time one has ended.

    Args:
        jobs: In this order.
        out: A folder.
        commit: That is measured.
        within_s: Those that would not end in so many seconds from now are left out.
        tiny: On a CPU, without those that need a GPU.
    """
    out.mkdir(parents=True, exist_ok=True)
    log, end_s, ran = out / "log.txt", time.monotonic() + within_s, dict[str, Ran]()
    log.write_text("")
    for job in jobs:
        left_s = end_s - time.monotonic()
        if tiny and job.tiny is None:
            ran[job.name] = Ran("left out: it needs a GPU", 0.0, shlex.join(job.command), None)
        elif job.expected_s > left_s:
            ran[job.name] = Ran(f"left out: {left_s:.0f} s are left", 0.0, shlex.join(job.command), None)
        else:
            print(f"{job.name}: some {job.expected_s:.0f} s", flush=True)
            ran[job.name] = run(job, commit, log, limit_s=min(job.limit_s, left_s), tiny=tiny)
            print(f"{job.name}: {ran[job.name].ended}, {ran[job.name].seconds:.0f} s", flush=True)
        found = {name: asdict(each) for name, each in ran.items()}
        (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    return ran


def unpack(out: Path, target: Path) -> list[str]:
    """Writes each result that is there to a file of its own; returns their names."""
    names = []
    for name, each in json.loads((out / "results.json").read_text()).items():
        if each["result"] is not None:
            (target / f"{name}.json").write_text(json.dumps(each["result"], indent=1) + "\n")
            names.append(name)
    return names


def table(ran: dict[str, Ran], out: Path) -> str:
    """Returns a line for each benchmark, and the last output of those that failed."""
    lines = [f"{name:<20} {each.seconds:6.0f} s  {each.ended}" for name, each in ran.items()]
    parts = (out / "log.txt").read_text().split("--- ")
    for name, each in ran.items():
        if each.ended != "ended 0" and each.seconds:
            printed = next((part for part in parts if part.startswith(f"{name}: ")), "").splitlines()
            lines += [f"--- {name} printed last:", *printed[-8:]]
    return "\n".join(lines)


def main(jobs: Sequence[Job] = JOBS) -> int:
    """Runs the chosen benchmarks; returns 1 if a benchmark failed, missed a bar or was stopped."""
    names = [job.name for job in jobs]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="that is measured; needed where there is no checkout to ask")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="in this order")
    parser.add_argument("--skip", nargs="+", choices=names, default=[])
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--list", action="store_true", help="what would run, and how long that may take")
    parser.add_argument("--unpack", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.unpack:
        print(*unpack(given.out, ROOT / "benchmarks" / "results"))
        return 0
    chosen = [next(job for job in jobs if job.name == name) for name in given.only if name not in given.skip]
    if given.list:
        for job in chosen:
            print(
                f"{job.name:<20} {job.expected_s:6.0f} s, at most {job.limit_s:4.0f}  python {shlex.join(job.command)}"
            )
        print(f"{sum(job.expected_s for job in chosen):.0f} s")
        return 0
    if given.commit is None and not (ROOT / ".git").exists():
        parser.error("this is no checkout of git: pass --commit")
    at = given.commit or commit("hiserve", "benchmarks")
    ran = run_all(chosen, given.out, at, within_s=given.within, tiny=given.tiny)
    print(table(ran, given.out))
    return int(any(not each.ended.startswith(("ended 0", "left out")) for each in ran.values()))


if __name__ == "__main__":
    sys.exit(main())
