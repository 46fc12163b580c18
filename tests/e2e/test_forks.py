"""Forks that stand for processes of tests do what their command lines say, and what they end with is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.live import COMMAND
from tests.helpers import forks
from tests.helpers.forks import Fork

PYTHON = (sys.executable, "-c")
# A thread that the end of a process must wait for: a server that leaves one hangs when it should end.
LATE = "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()"
# A process of the engine's kind starts one of the next: their parents, sessions, arguments, files and variables.
PARENT = """
import asyncio, json, os, sys
from hiserve.ipc.child import ChildProcess
sys.stdout.write("before ")
async def main():
    read, write = os.pipe()
    child = await ChildProcess.start(
        [sys.executable, "-m", "hiserve.ipc.launcher", "tests.e2e.test_forks", str(write)],
        lambda messages: None, pass_fds=(write,), environment={"A": "1", "TMPDIR": os.environ["TMPDIR"]},
    )
    os.close(write)
    how = await child.wait()
    told = json.loads(os.read(read, 9999))
    assert told["parent"] == os.getpid() and told["session"] == child.pid != os.getsid(0)
    print(json.dumps([how, told["arguments"], told["variables"], set(told["files"]) >= {0, 1, 2, write}, read in told["files"]]))
asyncio.run(main())
"""


def main(number: str, endpoint: str) -> int:
    """Runs in the child of ``PARENT``."""
    told = {
        "parent": os.getppid(),
        "session": os.getsid(0),
        "arguments": [sys.argv[-1] == endpoint, "torch" in sys.modules],
        "variables": sorted(os.environ.keys() - {"LC_CTYPE"}),
        "files": [int(name) for name in os.listdir("/proc/self/fd")],
    }
    os.write(int(number), json.dumps(told).encode())
    return 7


@pytest.mark.parametrize(
    ("program", "code", "out", "err"),
    [
        ("import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['B'])", 0, "['x', '']", ""),
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('why')", 1, "", "why\n"),
        ("import atexit; atexit.register(print, 'at the end'); 1 / 0", 1, "at the end\n", "ZeroDivisionError"),
        ("import sys; sys.exit([1])", 1, "", "[1]\n"),
        (
            "import atexit; atexit.register(print, 'at the end'); raise KeyboardInterrupt",
            -2,
            "at the end\n",
            "KeyboardInterrupt",
        ),
        (f"import threading, time; {LATE}", 0, "late\n", ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "", ""),
    ],
)
def test_a_fork_is_as_a_process(program: str, code: int, out: str, err: str, tmp_path: Path) -> None:
    done = forks.run([*PYTHON, program, "x", ""], os.environ | {"B": "2"})
    assert done.returncode == code
    assert done.stdout == (f"{out} {os.getcwd()} 2\n" if "argv" in program else out)
    assert err in done.stderr and bool(err) == bool(done.stderr)


def test_a_fork_of_the_test_itself_ends_as_its_program_does() -> None:
    program = (
        "import os, sys\nprint(sorted(os.environ), __name__)\nprint('why', file=sys.stderr)\nassert 'A' in os.environ"
    )
    done = forks.run_here(program, {"A": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "['A'] __main__\n", "why\n")
    done = forks.run_here(program, {"B": "1"})
    assert (done.returncode, done.stdout) == (1, "['B'] __main__\n")
    assert done.stderr.startswith("why\nTraceback") and done.stderr.endswith("AssertionError\n")


async def test_a_program_that_stands_for_one_of_a_soak_has_its_variable_and_its_files(tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['A'], flush=True); print('why', file=sys.stderr); input()"
    with (tmp_path / "log").open("wb") as log, forks.forked_programs():
        child = await asyncio.create_subprocess_exec(
            "env", "A=1=2", *PYTHON, program, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"1=2\n"
    assert await child.wait() == child.returncode == 1
    assert (tmp_path / "log").read_text().startswith("why\nTraceback")


def test_a_fork_can_be_asked_and_told() -> None:
    (read, write), begun = os.pipe(), "import time; print('begun', flush=True); time.sleep(600)"
    fork = Fork([*PYTHON, begun], write, write, os.environ)
    os.close(write)
    with os.fdopen(read) as output:
        assert output.readline() == "begun\n"
        assert fork.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            fork.wait(0.01)
        fork.send_signal(signal.SIGINT)
        assert fork.wait() == fork.poll() == -signal.SIGINT
        fork.kill()  # as of one that has ended


def test_children_of_a_fork_are_forks_with_what_they_were_given(tmp_path: Path) -> None:
    done = forks.run([*PYTHON, textwrap.dedent(PARENT)], os.environ | {"TMPDIR": str(tmp_path)})
    assert done.stderr == ""
    assert json.loads(done.stdout.removeprefix("before ")) == [
        "exit code 7",
        [True, True],
        ["A", "TMPDIR"],
        True,
        False,
    ]


def test_a_command_says_the_same_as_by_itself() -> None:
    told = [forks.run([*COMMAND, "serve", "--port", "x"], os.environ)]
    told += [subprocess.run([*COMMAND, "serve", "--port", "x"], capture_output=True, text=True, check=False)]
    assert told[0].returncode == told[1].returncode == 1
    assert told[0].stderr == told[1].stderr != ""
