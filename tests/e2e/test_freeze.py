"""Plans, results and the wire are what was recorded. ``python -m tools.freeze record`` after a change that is wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.freeze.logs import Logs, difference
from tools.freeze.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]


def check(*arguments: str, seed: str, program: tuple[str, ...] = ("tools.freeze", "check")) -> str:
    command = [sys.executable, "-m", *program, *arguments]
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    remedy = "if this change is wanted: python -m tools.freeze record"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{remedy}"
    assert "Exception ignored" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.timeout(900)  # some 15 s of CPU, whoever else wants it
def test_a_few_workloads_and_the_session_are_as_recorded() -> None:
    said = check("--quick", seed="1")
    num_same = said.count("the same")
    assert num_same == 4
    assert f"{num_same} of {num_same} are as recorded" in said


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_no_delay_of_memory_copies_store_or_steps_reaches_a_plan() -> None:
    said = check("1", "mtp on the host", "store", seed="4", program=("tests.helpers.late_freeze",))
    assert "2 of 2 are as recorded" in said


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", ["2", "3", "4", "5"])
def test_no_random_delay_reaches_a_plan(seed: str) -> None:
    lower = [workload.name for workload in WORKLOADS if "host_cache_gib" in workload.settings]
    said = check(seed, *lower, "session", seed=seed, program=("tests.helpers.late_freeze",))
    assert said.count("the same") == 1 + len(lower) == 8


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", ["2", "3"])
def test_everything_is_as_recorded(seed: str) -> None:
    assert check(seed=seed).count("the same") == 22


def test_a_difference_shows_the_first_step_that_differs() -> None:
    old = ["step 1:", "  row 1", "step 2:", "  row 1", "  row 2", "step 3:", "  row 1"]
    new = ["step 1:", "  row 1", "step 2:", "  row 1", "  row 3", "step 3:", "  row 7"]
    shown = difference(old, new)
    assert "-  row 2" in shown and "+  row 3" in shown and "step 2:" in shown
    assert "step 3:" not in shown and "row 7" not in shown
    assert difference(old, old) == ""


def test_a_log_that_ends_early_differs() -> None:
    old = ["step 1:", "  row 1", "step 2:", "  row 1"]
    assert "-step 2:" in difference(old, old[:2])
    assert "+step 2:" in difference(old[:2], old)


def test_what_was_recorded_is_whole(tmp_path: Path) -> None:
    logs = Logs.load()
    assert len(logs.lines) == 22
    logs.save(tmp_path)
    assert Logs.load(tmp_path) == logs
    (tmp_path / "hashes.json").write_text("{}")
    with pytest.raises(AssertionError, match="record anew"):
        Logs.load(tmp_path)
