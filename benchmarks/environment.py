"""What every result file starts with: date, commit, hardware, versions, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch


def describe(commit: str | None = None) -> dict[str, Any]:
    """Returns the header of a result file; ``commit`` is needed where there is no git checkout."""
    names = ("torch", "numpy", "msgspec", "pyzmq", "transformers", "triton")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or _git("rev-parse", "--short", "HEAD"),
        "command": " ".join(["python", *(os.path.relpath(arg) if Path(arg).exists() else arg for arg in sys.argv)]),
        "hardware": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in names},
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
