"""Runs the GPU suite and writes its log: ``python -m tools.gpu_suite [--commit COMMIT] [--output FILE] [-- PYTEST ARGUMENTS]``.

The log says date, commit, hardware, versions, command, counts, and the outcome and seconds of each test. A run that ended before all
tests had run, as by a limit of time, says so (``ended_early``); in logs without that field it counted as one failed test.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import about
from tools.pytest_run import ROOT, Run, run_pytest, verdict

SUITE = ("-m", "gpu", "-v", "tests/gpu", "tests/contract")
LOG = ROOT / "benchmarks" / "results" / "suite_gpu.json"


def log_of(run: Run, commit: str | None) -> dict[str, Any]:
    """Returns the log of a run."""
    command = shlex.join(["python", *run.command[1:]])
    return about(command, at_commit=commit, num_gpus=torch.cuda.device_count()) | {
        "verdict": verdict_of(run),
        "exit_code": run.exit_code,
        "ended_early": run.has_ended_early,
        "counts": {name: run.outcome_counts[name] for name in ("passed", "failed", "skipped")},
        "tests": [asdict(each) for each in run.outcomes],
    }


def verdict_of(run: Run) -> str:
    """Returns the closing line; a run that ended early says so, with pytest's exit code."""
    return verdict(run.outcome_counts) + (f", ended early (exit code {run.exit_code})" if run.has_ended_early else "")


def main() -> int:
    """Runs the suite; returns 0 if all of it ran, nothing failed and something passed. The log is written in either case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="that is tested; needed where there is no checkout to ask")
    parser.add_argument("--output", type=Path, default=LOG, help=f"default: {LOG.relative_to(ROOT)}")
    parser.add_argument("pytest", nargs="*", help="instead of: " + shlex.join(SUITE))
    given = parser.parse_args()
    if given.commit is None and not (ROOT / ".git").exists():
        parser.error("this is no checkout of git: pass --commit")
    run = run_pytest(given.pytest or SUITE)
    given.output.write_text(json.dumps(log_of(run, given.commit), indent=1) + "\n")
    print(f"wrote {given.output}")
    for each in run.outcomes:
        if each.outcome == "failed":
            print(f"failed: {each.name}")
    print(verdict_of(run))
    return int(run.has_ended_early or bool(run.counts["failed"]) or not run.counts["passed"])


if __name__ == "__main__":
    sys.exit(main())
