"""Runs every mutant of the catalogue and reports those that no test noticed.

    python -m tests.mutants.run [--only WORD]

The package and its tests are copied to a temporary directory; each mutant is written there,
its test run there, and the file restored. First all named tests run unchanged: a test that
fails anyway kills nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import multiprocessing
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.mutants import catalogue
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
TESTS_PASSED, TESTS_FAILED = 0, 1  # pytest's exit codes; any other means that the tests did not run
FORK = multiprocessing.get_context("fork")
OUTPUT = "output.txt"
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
# What the package and its tests import and what takes long; none of them starts a thread by that.
HEAVY = (
    "torch",
    "transformers.models.llama",
    "numpy",
    "fastapi",
    "uvicorn",
    "httpx",
    "zmq",
    "tokenizers",
    "hypothesis",
)
CONFTEST = '''"""Refuses to test any package but the copy beside this file, and seeks no smaller examples of a failure."""

import pathlib

import hypothesis

import hiserve

hypothesis.settings.register_profile("mutants", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
hypothesis.settings.load_profile("mutants")
assert pathlib.Path(hiserve.__file__).parents[1] == pathlib.Path(__file__).parent, hiserve.__file__
'''


def load() -> list[Mutant]:
    """Returns the mutants of every room, checked against the source."""
    found: list[Mutant] = []
    for module in sorted(pkgutil.iter_modules(catalogue.__path__), key=lambda module: module.name):
        found += importlib.import_module(f"{catalogue.__name__}.{module.name}").MUTANTS
    names = [mutant.name for mutant in found]
    assert len(set(names)) == len(names), f"names occur twice: {sorted({n for n in names if names.count(n) > 1})}"
    for mutant in found:
        source = (ROOT / mutant.file).read_text()
        count = source.count(mutant.old)
        assert count == 1, f"{mutant.name}: its text occurs {count} times in {mutant.file}, not once"
        assert mutant.old != mutant.new, f"{mutant.name}: replaces its text by itself"
        if mutant.file.endswith(".py"):
            ast.parse(source.replace(mutant.old, mutant.new), mutant.name)  # a test of what is no Python kills nothing
    return found


def copy_to(place: Path) -> None:
    """Copies what a test run needs, without caches and compiled files."""
    junk = shutil.ignore_patterns("__pycache__", "*.pyc")
    for folder in ("hiserve", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, place / folder, ignore=junk)
    shutil.copy(ROOT / "pyproject.toml", place)
    (place / "conftest.py").write_text(CONFTEST)


def run_tests(place: Path, tests: list[str], timeout_s: float) -> tuple[int, str]:
    """Runs pytest in the copy; returns its exit code (failed when out of time) and its output."""
    child = FORK.Process(target=_test, args=(place, tests))
    child.start()
    child.join(timeout_s)
    is_late = child.exitcode is None
    assert child.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # and what it left behind
    child.join()
    output = (place / OUTPUT).read_text(errors="replace")
    return (TESTS_FAILED, f"out of time after {timeout_s:.0f} s") if is_late else (child.exitcode or 0, output)


def _test(place: Path, tests: list[str]) -> None:
    """What a child does: it takes the copy for its home, and runs pytest there."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
    os.chdir(place)
    with Path(OUTPUT).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "hiserve")]:
        del sys.modules[name]
    sys.path.insert(0, str(place))
    plugins = [option for name in PLUGINS for option in ("-p", name)]
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *plugins, *tests])
    sys.stdout.flush()
    os._exit(int(code))  # whatever threads a broken package left


def prepare(place: Path) -> None:
    """Readies this process, whose children run the tests: a start of Python takes longer than most of them."""
    os.environ |= {
        "PYTHONPATH": str(place),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    sys.dont_write_bytecode = True
    for name in HEAVY:
        importlib.import_module(name)


def is_killed(place: Path, mutant: Mutant) -> bool:
    """Writes the mutant into the copy, runs its test, and restores the file."""
    path = place / mutant.file
    source = path.read_text()
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        code, output = run_tests(place, mutant.test.split(), mutant.timeout_s)
    finally:
        path.write_text(source)
    assert code in (TESTS_PASSED, TESTS_FAILED), f"{mutant.name}: the tests did not run\n{output}"
    return code == TESTS_FAILED


def main() -> int:
    """Runs what was asked for; returns 1 when a mutant survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run mutants whose name or file contains this")
    options = parser.parse_args()
    mutants = [mutant for mutant in load() if options.only in mutant.name or options.only in mutant.file]
    assert mutants, f"no mutant's name or file contains {options.only!r}"
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder)
        copy_to(place)
        prepare(place)
        tests = sorted({test for mutant in mutants for test in mutant.test.split()})
        code, output = run_tests(place, tests, sum(mutant.timeout_s for mutant in mutants))
        assert code == TESTS_PASSED, f"the tests fail without any mutant\n{output}"
        survivors = []
        for mutant in mutants:
            start = time.monotonic()
            killed = is_killed(place, mutant)
            verdict = "killed  " if killed else "SURVIVED"
            print(f"{verdict} {time.monotonic() - start:6.1f} s  {mutant.file}: {mutant.name}", flush=True)
            survivors += [] if killed else [mutant.name]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed" + "".join(f"\nsurvived: {n}" for n in survivors))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
