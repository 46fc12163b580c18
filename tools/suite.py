"""Runs everything that CI runs and ends with one verdict: ``python -m tools.suite``.

Checks come first, then the tests that share the machine, two at a time, then those that are marked ``alone``. Each of
them runs whatever became of the others. The last line counts tests, and each check that failed as a failed test.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from tools.pytest_run import ROOT, run_pytest, verdict

IN_CI = "not gpu and not long and not clients"
HALVES = (
    # In the order of the folders: engines and servers come first, short files last, so that both processes end together.
    ("-m", f"{IN_CI} and not alone", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"),
    ("-m", f"{IN_CI} and alone"),
)
CHECKS = {
    "format": ("ruff", "format", "--check", "."),
    "lint": ("ruff", "check", "."),
    "types": ("mypy",),
    "floors": ("lint-imports",),
    "graphs": ("python", "-m", "tools.graph_lint"),
}


def run_checks(names: list[str]) -> list[str]:
    """Runs some of ``CHECKS``; returns those that failed."""
    tools = Path(sys.executable).parent
    failed = []
    for name in names:
        tool, *arguments = CHECKS[name]
        if subprocess.run([tools / tool, *arguments], cwd=ROOT, check=False).returncode:
            failed.append(name)
    return failed


def main(arguments: list[str]) -> int:
    """Runs the checks and both halves; with ``--checks``, the checks alone.

    Args:
        arguments: ``--checks``, or further arguments of pytest for both halves.

    Returns:
        0 if nothing failed and something was tested.
    """
    failed_checks = run_checks(list(CHECKS))
    if arguments == ["--checks"]:
        return int(bool(failed_checks))
    runs = [run_pytest([*half, *arguments]) for half in HALVES]
    counts: Counter[str] = sum((run.counts for run in runs), Counter({"failed": len(failed_checks)}))
    print()
    for run in runs:
        for each in run.outcomes:
            if each.outcome == "failed":
                print(f"failed: {each.name}")
    for name in failed_checks:
        print(f"failed: {name}")
    print(verdict(counts))
    return int(bool(counts["failed"]) or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
