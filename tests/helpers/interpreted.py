"""Runs programs in processes of their own where Triton interprets kernels: it decides that once, when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PORTABLE = "tests.helpers.portable_interpreter"


def interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with some arguments."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def run_interpreted(program: str) -> None:
    """Runs a program, which must not fail, and whose kernels must work on every supported Triton."""
    done = interpreted("-c", f'import {PORTABLE}\n{program}\nprint("done")')
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
