"""Runs the mutants of the catalogue and names those that no test notices.

    python -m tests.mutants.run [--only WORD] [--changed-since COMMIT] [--jobs N]

Each job has a copy of the package and its tests. First all named tests run unchanged, because a test that fails anyway
kills nothing; then each mutant is written into a copy, its tests run there, and the file is restored.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.mutants.entries import ROOT, load
from tests.mutants.mutant import Mutant

__all__ = ["load"]

FORK = multiprocessing.get_context("fork")
OUTPUT = "output.txt"
# Tests take longest MAX_S, and under a mutant FACTOR times what they took without it, and LEAST_S. A machine on which
# that has grown GROWTH times since they were timed is another one.
MAX_S, FACTOR, LEAST_S, GROWTH = 1200.0, 5, 30, 1.5
FOLDERS = ("hiserve", "tests", "benchmarks", "tools")
WORDS = {"failed": "killed", "late": "killed, late", "passed": "SURVIVED", "broken": "BROKEN"}
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
# Imports of the package and its tests that take long; none of them starts a thread.
HEAVY = (
    "torch",
    "transformers.models.llama",
    "numpy",
    "starlette.applications",
    "uvicorn",
    "httpx",
    "zmq",
    "tokenizers",
    "hypothesis",
)
CONFTEST = '''"""Refuses to test any package but the copy beside this file, and shrinks no failing example."""

import pathlib

import hypothesis

import hiserve

hypothesis.settings.register_profile("mutants", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
hypothesis.settings.load_profile("mutants")
assert pathlib.Path(hiserve.__file__).parents[1] == pathlib.Path(__file__).parent, hiserve.__file__
'''


@dataclass(frozen=True, slots=True)
class Job:
    """Tests to run, with one file replaced.

    Attributes:
        tests: Node ids.
        limit_s: Longest they may take, in seconds.
        path: File to replace, relative to the copy; empty for none.
        text: What it holds meanwhile.
    """

    tests: tuple[str, ...]
    limit_s: float
    path: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """What a job came to.

    Attributes:
        verdict: ``passed``, ``failed``, ``late`` (out of time) or ``broken`` (pytest ran no test).
        seconds: How long it took.
        output: What pytest wrote.
    """

    verdict: str
    seconds: float
    output: str


class Copy:
    """A copy of the package in which one job runs at a time.

    Args:
        place: Its directory, made here.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        junk = shutil.ignore_patterns("__pycache__", "*.pyc")
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, place / folder, ignore=junk)
        shutil.copy(ROOT / "pyproject.toml", place)
        (place / "conftest.py").write_text(CONFTEST)

    def start(self, job: Job) -> None:
        """Replaces the file and starts the tests in a child."""
        if job.path:
            (self._place / job.path).write_text(job.text)
        self._job = job
        self._start_s = time.monotonic()
        self.child = FORK.Process(target=_test, args=(self._place, job.tests))
        self.child.start()

    def has_ended(self) -> bool:
        """Says whether the tests, or their time, are over."""
        return self.child.exitcode is not None or not self.left_s()

    def left_s(self) -> float:
        """Returns how many seconds the job has left."""
        return max(self._start_s + self._job.limit_s - time.monotonic(), 0)

    def end(self) -> Done:
        """Ends the child with all its processes, restores the file and returns what came out."""
        code = self.child.exitcode
        assert self.child.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.join()
        if self._job.path:
            shutil.copy(ROOT / self._job.path, self._place / self._job.path)
        verdict = "late" if code is None else {0: "passed", 1: "failed"}.get(code, "broken")
        output = self._place / OUTPUT
        return Done(
            verdict, time.monotonic() - self._start_s, output.read_text(errors="replace") if output.exists() else ""
        )


def run(jobs: Sequence[Job], copies: list[Copy]) -> Iterator[tuple[int, Done]]:
    """Runs jobs, one in each copy at a time; yields the index of each as it ends."""
    waiting, idle, busy = list(enumerate(jobs))[::-1], list(copies), dict[int, Copy]()
    while waiting or busy:
        while idle and waiting:
            index, job = waiting.pop()
            busy[index] = idle.pop()
            busy[index].start(job)
        wait([copy.child.sentinel for copy in busy.values()], min(copy.left_s() for copy in busy.values()))
        for index in [index for index, copy in busy.items() if copy.has_ended()]:
            copy = busy.pop(index)
            idle.append(copy)
            yield index, copy.end()


def _test(place: Path, tests: tuple[str, ...]) -> None:
    """Runs pytest in the copy; this is the body of a child."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    os.chdir(place)
    os.environ |= {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.dont_write_bytecode = True
    with Path(OUTPUT).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for name in [name for name in sys.modules if name.split(".")[0] in FOLDERS]:
        del sys.modules[name]
    sys.path.insert(0, str(place))
    plugins = [option for name in PLUGINS for option in ("-p", name)]
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *plugins, *tests])
    sys.stdout.flush()
    os._exit(int(code))  # threads of a broken package may never end


def prepare() -> None:
    """Imports what all children need: a start of Python takes longer than most tests."""
    for name in HEAVY:
        importlib.import_module(name)


def limits(mutants: list[Mutant], copies: list[Copy]) -> dict[str, float]:
    """Runs the unchanged tests, one file a job.

    Returns:
        By file of tests, the seconds after which a test of it is taken to hang.

    Raises:
        AssertionError: A test fails without any mutant.
    """
    tests: dict[str, set[str]] = {}
    for test in (test for mutant in mutants for test in mutant.tests):
        tests.setdefault(_file(test), set()).add(test)
    files = list(tests)
    found = {}
    for index, done in run([Job(tuple(sorted(tests[file])), MAX_S) for file in files], copies):
        assert done.verdict == "passed", f"{files[index]}: {done.verdict} without any mutant\n{done.output}"
        found[files[index]] = LEAST_S + FACTOR * done.seconds
    return found


def judge(mutants: list[Mutant], copies: list[Copy], tell: Callable[[str], None]) -> list[str]:
    """Runs each mutant; returns the titles of those that no test noticed, and tells each verdict.

    The machine may have become slower since the tests were timed. The tests of those that are late are therefore timed
    again, and where they take longer now, the mutants run again.
    """
    left, survivors, limit_s = mutants, list[str](), limits(mutants, copies)
    while left:
        late = []
        for index, done in run([_job(mutant, limit_s) for mutant in left], copies):
            if done.verdict == "late":
                late.append((left[index], done))
                continue
            tell(_line(left[index], done))
            survivors += [left[index].title] if done.verdict in ("passed", "broken") else []
        before_s, limit_s = limit_s, limits([mutant for mutant, _ in late], copies)
        left = [mutant for mutant, _ in late if any(limit_s[file] > GROWTH * before_s[file] for file in _files(mutant))]
        for mutant, done in late:
            if mutant not in left:
                tell(_line(mutant, done))
    return survivors


def _job(mutant: Mutant, limit_s: dict[str, float]) -> Job:
    text = mutant.apply((ROOT / mutant.path).read_text())
    return Job(mutant.tests, sum(limit_s[file] for file in _files(mutant)), mutant.path, text)


def _line(mutant: Mutant, done: Done) -> str:
    line = f"{WORDS[done.verdict]:12} {done.seconds:6.1f} s  {mutant.target}: {mutant.title}"
    return f"{line}\n{done.output}" if done.verdict == "broken" else line


def choose(mutants: list[Mutant], word: str, changed: set[str] | None) -> list[Mutant]:
    """Returns the mutants whose title, target or test contains a word and whose file or test is among the changed ones."""
    return [
        mutant
        for mutant in mutants
        if any(word in text for text in (mutant.title, mutant.target, mutant.path, *mutant.tests))
        and (changed is None or changed & {mutant.path, *_files(mutant)})
    ]


def changed_since(commit: str) -> set[str]:
    """Returns the files that differ from a commit, relative to the repository."""
    command = ["git", "diff", "--name-only", "--relative", commit, "--"]
    return set(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines())


def _file(test: str) -> str:
    return test.split("::")[0]


def _files(mutant: Mutant) -> set[str]:
    return {_file(test) for test in mutant.tests}


def main() -> int:
    """Runs the mutants asked for; returns 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose title, function or test contains this")
    parser.add_argument("--changed-since", metavar="COMMIT", help="mutants whose file or test differs from this commit")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many run at a time (%(default)s)")
    options = parser.parse_args()
    changed = changed_since(options.changed_since) if options.changed_since else None
    mutants = choose(load(), options.only, changed)
    if not mutants:
        print("no mutant is concerned")
        return 0 if changed is not None else 2
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        prepare()
        copies = [Copy(Path(folder, str(number))) for number in range(min(options.jobs, len(mutants)))]
        survivors = judge(mutants, copies, lambda line: print(line, flush=True))
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed" + "".join(f"\nsurvived: {n}" for n in survivors))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
