"""What every result file says about the run behind it."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.measured import measured
from hiserve.bench.record import hardware, versions

ROOT = Path(__file__).parent.parent
PACKAGES = ("numpy", "torch", "msgspec", "xxhash", "pyzmq", "transformers", "triton")


def commit(*paths: str) -> str:
    """Returns the checkout's commit, marked when tracked files under ``paths`` differ from it."""
    dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *paths], cwd=ROOT, check=False).returncode
    return _run("git", "rev-parse", "--short", "HEAD") + ("+changes" if dirty else "")


def about(command: str, *paths: str, at_commit: str | None = None, num_gpus: int = 0) -> dict[str, Any]:
    """Returns date, hardware, versions, commit and command, in that order, and what was measured if ``paths`` say it.

    Args:
        command: What to type to run it again.
        paths: The code that is measured, relative to the repository.
        at_commit: The commit, where there is no checkout to ask.
        num_gpus: GPUs that were used, of those that are here.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware(num_gpus),
        "versions": versions(PACKAGES),
        "commit": at_commit or commit(*paths),
        "command": command,
        **({"measured": measured(*paths)} if paths else {}),
    }


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
