"""The benchmark of recoveries runs from end to end at the size of a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.recovery import TINY, pause_s
from tests.helpers.processes import output_of, wait_dead
from tests.helpers.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_the_silence_after_a_kill_is_the_longest_that_ends_behind_it() -> None:
    chunk_s = [0.0, 1.0, 5.0, 5.5, 6.0, 9.0, 9.1]
    assert pause_s(chunk_s, 6.1) == (3.0, pytest.approx(2.9))
    assert pause_s(chunk_s, 5.2) == (3.0, pytest.approx(3.8))
    assert pause_s(chunk_s, 0.5) == (4.0, 4.5)


def test_at_the_limit_of_a_command_the_processes_that_it_started_end_too() -> None:
    for limit_s in (0.5, 10, PATIENCE_S):  # on a busy machine the shell may need longer to start one
        with pytest.raises(subprocess.TimeoutExpired) as stopped:
            output_of(["sh", "-c", f"sleep {3 * PATIENCE_S} & echo $!; wait"], limit_s, ROOT)
        if stopped.value.stdout:
            break
    wait_dead([int(stopped.value.stdout)], timeout_s=PATIENCE_S)


@pytest.mark.wide
def test_a_worker_that_is_killed_under_load_is_replaced_in_time_and_finds_its_prefixes_on_the_host(
    tmp_path: Path,
) -> None:
    out = tmp_path / "recovery.json"
    command = [sys.executable, "-m", "benchmarks.recovery", str(out), "test", "--tiny"]
    for is_last in (False, False, True):  # on a busy machine all may be said before the worker is killed
        try:
            print(output_of(command, 2 * PATIENCE_S, ROOT))
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(error.stdout)
            if is_last:
                raise
        else:
            break
    result = json.loads(out.read_text())
    (found,) = result["rounds"]
    phases = found["phases"]
    assert {"detect", "exit", "start process", "load weights", "first token"} <= phases.keys()
    assert found["total_s"] == pytest.approx(sum(phases.values()), abs=0.1)
    assert found["first_new_token_s"] <= 4 * found["ready_s"]  # a start of the whole server, on the same machine
    assert found["replayed_requests"] == TINY.streams
    assert found["host_share"] >= result["bars"]["host_share"]
    assert result["supervision"]["ticks"] > 0
    assert 0 <= result["supervision"]["share"] < 0.1
