"""Runs programs, each in a fork of this process, which has imported torch, Triton's interpreter and the kernels.

    python -m tests.helpers.interpreter_process

A line of the input is a program, as JSON; the line of the output is its exit status, and its output and errors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import IO

import torch.testing

import hiserve.attention.triton  # noqa: F401
import tests.helpers.attention
import tests.helpers.portable_interpreter  # noqa: F401


def run(program: str, *outputs: IO[str]) -> int:
    """Runs a program in a fork, whose output and errors go to these files; returns its exit status."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking modules apart takes longer than most programs


def main() -> None:
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # the first comparison imports 600 modules
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            status = run(json.loads(line), out, err)
            for output in (out, err):
                output.seek(0)
            print(json.dumps([status, out.read(), err.read()]), flush=True)


if __name__ == "__main__":
    main()
