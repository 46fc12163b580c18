"""What every result file says about the run behind it."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("numpy", "torch", "msgspec", "xxhash", "pyzmq", "transformers", "triton")


def hardware() -> str:
    """Returns the processor's name, how many of its cores are here, and the GPUs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    gpus = _run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") if shutil.which("nvidia-smi") else ""
    return ", ".join([names[0] if names else platform.machine(), f"{len(names)} cores", *gpus.splitlines()])


def commit(*paths: str) -> str:
    """Returns the checkout's commit, marked when tracked files under ``paths`` differ from it."""
    dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *paths], cwd=ROOT, check=False).returncode
    return _run("git", "rev-parse", "--short", "HEAD") + ("+changes" if dirty else "")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that are installed and matter."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def about(command: str, *paths: str, at_commit: str | None = None) -> dict[str, Any]:
    """Returns date, hardware, versions, commit and command, in that order.

    Args:
        command: What to type to run it again.
        paths: The code that is measured, relative to the repository.
        at_commit: The commit, where there is no checkout to ask.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "commit": at_commit or commit(*paths),
        "command": command,
    }


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
