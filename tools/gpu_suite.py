"""Runs the GPU suite and writes its log: ``python -m tools.gpu_suite [--commit COMMIT] [--output FILE] [-- PYTEST ARGUMENTS]``.

The log says date, commit, hardware, versions, command, counts, and the outcome and seconds of each test.
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
        "verdict": verdict(run.counts),
        "exit_code": run.exit_code,
        "counts": {name: run.counts[name] for name in ("passed", "failed", "skipped")},
        "tests": [asdict(each) for each in run.outcomes],
    }


def main() -> int:
    """Runs the suite; returns 0 if nothing failed and something passed. The log is written in either case."""
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
    if run.exit_code not in (0, 1):
        print(f"pytest ended early, with {run.exit_code}: a run in which no test failed counts as one that failed")
    print(verdict(run.counts))
    return int(bool(run.counts["failed"]) or not run.counts["passed"])


if __name__ == "__main__":
    sys.exit(main())
