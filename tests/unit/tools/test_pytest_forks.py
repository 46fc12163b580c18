"""Forks of a session that has collected its tests: all are run once and reported, whatever becomes of a fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.pytest_forks import Fork, messages_of
from tools.pytest_run import ROOT, Run, read_report, run_pytest

FORKED = ("-q", "-c", "/dev/null", "-p", "no:cacheprovider", "-p", "tools.pytest_forks", "--forks", "2")

# Each of two files waits for the other: they run side by side.
TOGETHER = """
import os, pathlib, random, sys, time, warnings
import pytest

HERE = pathlib.Path(__file__)

def say(word):
    with HERE.with_suffix(".said").open("a") as file:
        print(word, os.getpid(), file=file)

@pytest.fixture(scope="module")
def shared():
    say("begins")
    yield
    say("ends")

def test_meets_the_other(shared):
    say(random.random())
    deadline = time.monotonic() + 60
    while len(list(HERE.parent.glob("*.said"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)

@pytest.mark.timeout(0.5)
def test_hangs(shared):
    time.sleep(100)

@pytest.mark.parametrize("value", [1, 2])
def test_fails(shared, value, tmp_path):
    print("this is", HERE.stem)
    assert value == 1 and os.environ["OMP_NUM_THREADS"] == "1"

@pytest.fixture
def broken():
    yield
    raise RuntimeError

def test_fails_and_its_teardown_too(broken): assert False

@pytest.mark.skip
def test_is_skipped(): pass

def test_warns():
    warnings.warn("of " + HERE.stem)
"""

DYING = """
import atexit, os, signal

def test_ends(): pass
def test_leaves(): os._exit(0)
def test_runs_all_the_same(): pass
def test_is_killed():
    child = os.fork()  # keeps the pipe
    if not child:
        signal.pause()
    with open("child", "w") as file:
        file.write(str(child))
    os.kill(os.getpid(), signal.SIGKILL)
def test_spoils_the_end_of_its_process(): atexit.register(os._exit, 7)
"""

EXPECTED = """
import pytest

@pytest.mark.xfail
def test_is_expected_to_fail(): assert False
"""

HELD = """
import os
import pytest

@pytest.fixture(scope="session", autouse=True)
def held():
    yield
    open("ended.{}".format(os.getpid()), "w").close()
"""

INTERRUPTED = """
import os, signal, time

def test_ends(): pass

def test_is_interrupted():
    while not os.path.exists("test_other.begun"):
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
"""

OTHER = """
import time

def test_takes_its_time():
    open("test_other.begun", "w").close()
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def plain_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugin of others, which would take 1.3 s of CPU to import; the plugin is found from any folder."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def run_forks(folder: Path, *arguments: str, **files: str) -> Run:
    """Runs tests of these files, by name."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return run_pytest([*FORKED, "--rootdir", str(folder), *arguments], cwd=folder)


def outcomes(run: Run) -> dict[str, str]:
    return {each.name: each.outcome for each in run.outcomes}


def test_two_forks_report_what_one_process_would(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_forks(tmp_path, "-p", "pytest_timeout", test_one=TOGETHER, test_two=TOGETHER)
    said = capfd.readouterr()
    assert run.exit_code == 1, said
    of_each = {
        "test_meets_the_other": "passed",
        "test_hangs": "failed",
        "test_fails[1]": "passed",
        "test_fails[2]": "failed",
        "test_fails_and_its_teardown_too": "failed",
        "test_is_skipped": "skipped",
        "test_warns": "passed",
    }
    assert outcomes(run) == {f"{file}::{name}": it for file in ("test_one", "test_two") for name, it in of_each.items()}
    assert said.out.count("Timeout (>0.5s)") == 4, "a failure, and its line of the summary, of each"
    for file in ("test_one", "test_two"):
        assert said.out.count(f"\nthis is {file}\n") == 1, "the output of a test that failed is its own"
        assert said.out.count(f"Warning: UserWarning: of {file}") == 1

    lines = [[line.split() for line in path.read_text().splitlines()] for path in tmp_path.glob("*.said")]
    (begins, one, ends), (_, two, _) = lines
    assert begins[0] == "begins" and ends[0] == "ends", "a fixture of a file is made once and torn down"
    assert one[0] != two[0], "two forks draw the same numbers"
    assert {pid for _, pid in lines[0]}.isdisjoint(pid for _, pid in lines[1])
    assert all(len({pid for _, pid in of_one}) == 1 for of_one in lines), "a file is run by one fork"


def test_a_fork_that_dies_fails_the_test_that_it_ran_and_no_other_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_forks(tmp_path, test_dying=DYING, test_other=EXPECTED)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    said = capfd.readouterr().out
    assert run.exit_code == 1, said
    assert outcomes(run) == {
        "test_dying::test_ends": "passed",
        "test_dying::test_leaves": "failed",
        "test_dying::test_runs_all_the_same": "passed",
        "test_dying::test_is_killed": "failed",
        "test_dying::test_spoils_the_end_of_its_process": "failed",
        "test_other::test_is_expected_to_fail": "skipped",
    }
    for words in ("exit code 0 in this test", "signal 9 in this test", "exit code 7 after this test"):
        assert f"the process ended with {words}\n" in said


@pytest.fixture
def piped() -> Iterator[tuple[Fork, int]]:
    """A fork, and the end of the pipe where it writes."""
    received, sent = os.pipe()
    os.set_blocking(received, False)
    yield Fork(0, 0, received), sent
    os.close(received)
    os.close(sent)


def test_half_a_message_is_none_before_the_rest_comes(piped: tuple[Fork, int]) -> None:
    """A child may keep the pipe of a fork that was killed, so that it does not end: nobody waits for it."""
    fork, sent = piped
    os.write(sent, b'["one", {}]\n["tw')
    assert list(messages_of(fork)) == [["one", {}]]
    os.write(sent, b'o", {}]\n["three", {}]\n["ha')
    assert next(messages_of(fork)) == ["two", {}]
    assert list(messages_of(fork)) == [["three", {}]], "an interrupt after the second loses the third"


def test_ctrl_c_while_a_fork_is_read_costs_no_message_but_that(
    piped: tuple[Fork, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, sent = piped
    os.write(sent, b'["one", {}]\n["two", {}]\n')

    def interrupted(handle: int, _: int) -> bytes:
        monkeypatch.undo()
        os.read(handle, 5)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(messages_of(fork))
    assert list(messages_of(fork)) == [["two", {}]]


def test_ctrl_c_ends_all_forks_and_their_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(INTERRUPTED)
    (tmp_path / "test_other.py").write_text(OTHER)
    (tmp_path / "conftest.py").write_text(HELD)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", *FORKED, f"--junitxml={report}", f"--rootdir={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2, done.stdout
    assert "KeyboardInterrupt" in done.stdout
    assert [each.name for each in read_report(report)] == ["test_some::test_ends"]
    assert len(list(tmp_path.glob("ended.*"))) == 2, "a fixture was not torn down"


def test_no_further_test_begins_after_as_many_failures_as_are_allowed(tmp_path: Path) -> None:
    later = "import time\ndef test_takes_its_time(): time.sleep(600)"
    run = run_forks(tmp_path, "-x", test_one="def test_fails(): assert False", test_two=later)
    assert run.exit_code == 1 and run.counts == {"failed": 1}


def test_a_number_of_forks_below_none_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_forks(tmp_path, "--forks", "-1", test_other=EXPECTED)
    assert run.exit_code == pytest.ExitCode.USAGE_ERROR, run
    assert "--forks is -1, at least 0" in capfd.readouterr().err
