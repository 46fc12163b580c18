"""Runs everything that CI runs and ends with one verdict: ``python -m tools.suite``.

The tests run three at a time. Checks run while one process collects them, and say at once what they found. The last line
counts tests, and each check that failed as a failed test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.pytest_run import ROOT, run_pytest, verdict

# In the order of the folders: engines and servers come first, short files last, so that all forks end together.
# Three of them for two cores: a test that waits for a server of its own uses 0.6 of a core.
TESTS = ("-p", "tools.pytest_forks", "--forks", "3")
CHECKS = {
    "format": ("ruff", "format", "--check", "."),
    "lint": ("ruff", "check", "."),
    "types": ("mypy",),
    "floors": ("lint-imports",),
    "graphs": ("python", "-m", "tools.graph_lint"),
}


def run_checks(names: list[str]) -> list[str]:
    """Runs some of ``CHECKS``, all at once, and prints what they say, one after the other; returns those that failed."""
    tools = Path(sys.executable).parent
    running = {}
    for name in names:
        tool, *arguments = CHECKS[name]
        running[name] = subprocess.Popen([tools / tool, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    failed = []
    for name, process in running.items():
        print(process.communicate()[0], end="", flush=True)
        if process.returncode:
            failed.append(name)
    return failed


def main(arguments: list[str]) -> int:
    """Runs the checks and the tests; with ``--checks``, the checks alone.

    Args:
        arguments: ``--checks``, or further arguments of pytest.

    Returns:
        0 if nothing failed and something was tested.
    """
    if arguments == ["--checks"]:
        return int(bool(run_checks(list(CHECKS))))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that a test starts compiles the sources again
    with ThreadPoolExecutor(1) as pool:
        checks = pool.submit(run_checks, list(CHECKS))
        run = run_pytest([*TESTS, *arguments])
    failed_checks = checks.result()
    counts = run.counts + Counter({"failed": len(failed_checks)})
    print()
    for each in run.outcomes:
        if each.outcome == "failed":
            print(f"failed: {each.name}")
    for name in failed_checks:
        print(f"failed: {name}")
    print(verdict(counts))
    return int(bool(counts["failed"]) or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
