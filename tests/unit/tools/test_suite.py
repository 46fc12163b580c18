"""The suite, the matrix and the log of GPU runs: each failure counts, and nothing tested is a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import gpu_suite, suite
from tools.matrix import TRITON_OF_TORCH, Cell, find_interpreters, run_cells
from tools.pytest_run import Outcome, Run, run_pytest, verdict

TESTS = """
import pytest

def test_passes(): pass

@pytest.mark.parametrize("value", [1, 2])
def test_fails(value): assert value == 1

@pytest.fixture
def broken():
    yield
    raise RuntimeError

def test_fails_and_its_teardown_too(broken): assert False

@pytest.mark.skip
def test_is_skipped(): pass
"""


INTERRUPTED = """
import os, signal

def test_ends(): pass

def test_is_interrupted():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.killpg(0, signal.SIGINT)
    signal.pause()
"""


def a_run(exit_code: int, **counts: int) -> Run:
    outcomes = [Outcome(f"{kind} {number}", kind, 0.0) for kind, count in counts.items() for number in range(count)]
    return Run(["pytest"], outcomes, exit_code)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """What the tests of the suite will give; its checks pass."""
    made: list[Run] = []
    monkeypatch.setattr(suite, "run_pytest", lambda arguments: made.pop())
    monkeypatch.setattr(suite, "run_checks", lambda names: [])
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return made


@pytest.fixture(autouse=True)
def plain_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pytest that a test starts has no plugin of others: to import them would take 1.3 s of CPU each time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_what_became_of_each_test_is_read_from_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    run = run_pytest(["-q", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"], cwd=tmp_path)
    assert run.exit_code == 1
    assert run.counts == {"passed": 2, "failed": 2, "skipped": 1}
    found = {each.name.partition("::")[2]: each.outcome for each in run.outcomes}
    assert found["test_fails[1]"] == "passed" and found["test_fails[2]"] == "failed"
    assert verdict(run.counts) == "2 passed, 2 failed, 1 skipped"


def test_an_interrupted_run_reports_the_tests_that_ended(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(INTERRUPTED)
    pytest_arguments = ["-q", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    program = f"""
import signal
from pathlib import Path
from tools.pytest_run import run_pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
run = run_pytest({pytest_arguments!r}, cwd=Path({str(tmp_path)!r}))
print("ended:", run.exit_code, [each.name for each in run.outcomes])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=suite.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        check=True,
    )
    assert "ended: 2 ['test_some::test_ends']" in done.stdout


def test_a_run_that_could_not_report_has_failed_and_one_that_selects_nothing_has_not(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import nothing_of_that_name")
    common = ("-q", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider")
    assert run_pytest(common, cwd=tmp_path).counts["failed"] == 1
    assert run_pytest([*common, "--no-such-option"], cwd=tmp_path).counts == {"failed": 1}
    (tmp_path / "test_some.py").write_text(TESTS)
    assert run_pytest([*common, "-k", "nobody"], cwd=tmp_path).counts == {}


@pytest.mark.parametrize(
    ("run", "said", "code"),
    [
        (a_run(0, passed=3), "3 passed, 0 failed", 0),
        (a_run(1, passed=3, failed=1, skipped=1), "3 passed, 1 failed, 1 skipped", 1),
        (a_run(3), "0 passed, 1 failed", 1),
        (a_run(5), "0 passed, 0 failed", 1),
    ],
)
def test_the_last_line_is_one_verdict(
    runs: list[Run], capsys: pytest.CaptureFixture[str], run: Run, said: str, code: int
) -> None:
    runs.append(run)
    assert suite.main([]) == code
    assert not runs, "nothing was run"
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_a_check_that_fails_is_named_and_keeps_no_test_from_running(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.append(a_run(0, passed=5))
    monkeypatch.setattr(suite, "run_checks", lambda names: ["types"])
    assert suite.main([]) == 1
    assert not runs
    assert capsys.readouterr().out.splitlines()[-2:] == ["failed: types", "5 passed, 1 failed"]


# --- the matrix ---------------------------------------------------------------------------------


def interpreter(folder: Path, version: str, said: str) -> str:
    """Makes something that looks like an interpreter; returns its path."""
    path = folder / f"{version}.1" / "bin" / f"python{version}"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{said}\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_that_does_not_run_is_none(tmp_path: Path) -> None:
    one = interpreter(tmp_path, "2.7", "echo 2.7")
    interpreter(tmp_path, "2.6", "exit 127")
    assert find_interpreters(("2.5", "2.6", "2.7"), tmp_path) == {"2.5": None, "2.6": None, "2.7": one}
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert find_interpreters((own,), tmp_path) == {own: sys.executable}


def test_missing_interpreters_are_named_and_the_others_are_tested(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"2.6": None, "2.7": "/bin/python2.7"}
    cells: list[Cell] = []

    def prepare(cell: Cell) -> str:
        cells.append(cell)
        if cell.torch == "2.12":
            raise subprocess.CalledProcessError(1, "pip")
        return cell.interpreter

    assert run_cells(found, ["2.11", "2.12"], prepare, lambda python: a_run(0, passed=3)) == 1
    assert [(cell.interpreter, cell.torch) for cell in cells] == [
        ("/bin/python2.7", "2.11"),
        ("/bin/python2.7", "2.12"),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert "Python 2.6: not tested, no python2.6 was found" in lines
    assert "Python 2.7, torch 2.11, triton 3.6.0: 3 passed, 0 failed" in lines
    assert lines[-1] == "3 passed, 1 failed"


def test_a_matrix_that_found_no_interpreter_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def never(argument: object) -> Run:
        raise AssertionError(argument)

    assert run_cells({"2.6": None}, ["2.11"], never, never) == 1  # type: ignore[arg-type]
    assert "none of Python 2.6 was found" in capsys.readouterr().out


def test_the_matrix_has_all_that_pyproject_allows() -> None:
    text = (suite.ROOT / "pyproject.toml").read_text()
    assert '"torch>=2.11,<2.14"' in text and 'requires-python = ">=3.11"' in text
    assert list(TRITON_OF_TORCH) == ["2.11", "2.12", "2.13"]


# --- the log of the GPU suite -------------------------------------------------------------------


def test_the_log_of_a_gpu_run_says_what_ran_where_and_what_became_of_each_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, runs = tmp_path / "log.json", [a_run(1, passed=2, failed=1, skipped=3)]
    monkeypatch.setattr(gpu_suite, "run_pytest", lambda arguments: runs.pop(0))
    monkeypatch.setattr("sys.argv", ["gpu_suite", "--commit", "abc1234", "--output", str(log)])
    assert gpu_suite.main() == 1
    said = json.loads(log.read_text())
    keys = {
        "date",
        "tool",
        "hardware",
        "versions",
        "commit",
        "command",
        "verdict",
        "exit_code",
        "ended_early",
        "counts",
    }
    assert set(said) == keys | {"tests"} and not said["ended_early"]
    assert (said["commit"], said["counts"]) == ("abc1234", {"passed": 2, "failed": 1, "skipped": 3})
    assert said["tests"][0] == {"name": "passed 0", "outcome": "passed", "seconds": 0.0} and len(said["tests"]) == 6
    assert said["versions"]["torch"] and said["hardware"]
    _, failed, verdict = capsys.readouterr().out.splitlines()
    assert failed == "failed: failed 0" and verdict == said["verdict"] == "2 passed, 1 failed, 3 skipped"


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (a_run(2, passed=2), "2 passed, 0 failed, ended early (exit code 2)"),
        (a_run(2, passed=2, failed=1), "2 passed, 1 failed, ended early (exit code 2)"),
        (a_run(1), "0 passed, 0 failed, ended early (exit code 1)"),
        (a_run(-9, passed=1), "1 passed, 0 failed, ended early (exit code -9)"),
    ],
)
def test_a_gpu_run_that_was_ended_has_failed_and_counts_no_test_that_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Run, verdict: str
) -> None:
    log = tmp_path / "log.json"
    monkeypatch.setattr(gpu_suite, "run_pytest", lambda arguments: run)
    monkeypatch.setattr("sys.argv", ["gpu_suite", "--commit", "abc1234", "--output", str(log)])
    assert gpu_suite.main() == 1
    said = json.loads(log.read_text())
    assert said["verdict"] == capsys.readouterr().out.splitlines()[-1] == verdict
    assert said["ended_early"] and said["counts"] == {"skipped": 0, "passed": 0, "failed": 0} | run.outcome_counts


# --- make ---------------------------------------------------------------------------------------


def test_an_install_shows_what_pip_does() -> None:
    make = ["make", "--dry-run", "--always-make", "VENV=nowhere", "demo"]
    mine = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "PIP_ARGS")}
    said = subprocess.run(make, cwd=suite.ROOT, env=mine, capture_output=True, text=True, check=True).stdout
    assert "installing hiserve and PyTorch into nowhere; a first time takes some minutes" in said
    (install,) = [line for line in said.splitlines() if "-m pip install" in line]
    assert install.endswith("-e .") and "quiet" not in install and " -q" not in install
