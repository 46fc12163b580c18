"""Runs programs where Triton interprets kernels. Triton decides that once, when it is imported: they have other processes."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PORTABLE = "tests.helpers.portable_interpreter"
ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with some arguments."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)


def run_interpreted(program: str) -> None:
    """Runs a program, which must not fail, and whose kernels must work on every supported Triton.

    It has a process of its own, a fork of one that has imported its modules: these imports take a second.
    """
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(f'{program}\nprint("done")') + "\n")
    process.stdin.flush()
    status, out, err = json.loads(process.stdout.readline())
    assert (status, out) == (0, "done\n"), err


@cache
def _process() -> subprocess.Popen[str]:
    """Starts the process that forks; it ends at the end of its input, with this process."""
    command = [sys.executable, "-m", "tests.helpers.interpreter_process"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)
    return process
