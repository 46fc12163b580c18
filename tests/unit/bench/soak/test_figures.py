"""What a soak counts: latencies beside faults, memory, what is left."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hiserve.bench.options import SoakOptions
from hiserve.bench.soak.faults import FaultRecovery
from hiserve.bench.soak.soak_run import has_same_tokens
from hiserve.bench.soak.soak_summary import (
    MIB,
    ProcessHistory,
    ProcessMonitor,
    SoakFigures,
    StreamOracle,
    figures,
    growth,
)
from hiserve.bench.soak.users import Reference, SentQuestion
from hiserve.bench.workload import Sample


def answered(begin_s: float, ttft_s: float, end_s: float) -> SentQuestion:
    sample = Sample(begin_s=begin_s, chunk_s=[begin_s + ttft_s, end_s], end_s=end_s, output_ids=[1, 2], finish="length")
    sample.num_output, sample.num_ends = 2, 1
    return SentQuestion(question=0, way="read", sample=sample)


def struck(fault: Any, struck_s: float, back_s: float | None = None, token_s: float | None = None) -> FaultRecovery:
    return FaultRecovery(fault=fault, what="it", num_open=3, struck_s=struck_s, back_s=back_s, token_s=token_s)


def told(**given: Any) -> SoakFigures:
    whole = {
        "asked": [answered(100, 0.5, 101)],
        "nonsense": [],
        "struck": [],
        "histories": [],
        "left": [],
        "counters": {},
        "judge": StreamOracle([Reference([1, 2], "length")], is_exact=True),
        "soak": SoakOptions(),
        "begin_s": 100.0,
        "is_exact": True,
    }
    return figures(**(whole | given))


def test_latencies_are_apart_where_a_process_was_away() -> None:
    found = told(
        asked=[answered(100, 0.5, 101), answered(104, 3, 108), answered(109, 0.5, 110)],
        struck=[struck("kill-worker", 105, 107, 107.5), struck("flip-host", 109.5)],
    )
    assert (found.calm.ttft_ms.count, found.calm.ttft_ms.median) == (2, pytest.approx(500))
    assert (found.beside_faults.ttft_ms.count, found.beside_faults.ttft_ms.median) == (1, pytest.approx(3000))
    killed, flipped = found.faults
    assert (killed.at_s, killed.ready_s, killed.recovery_s) == (5, 2, 2.5)
    assert flipped.recovery_s is None
    assert found.num_violations == 0 and found.duration_s == 10


def test_a_server_that_does_not_come_back_is_a_violation() -> None:
    assert told(struck=[struck("hang-worker", 105)]).num_violations == 1
    assert told(struck=[struck("flip-store", 105)]).num_violations == 0


def life(role: str, minutes: float, mib_per_min: float) -> ProcessHistory:
    made = ProcessHistory(role=role, pid=5)
    for second in range(round(60 * minutes)):
        made.times_s.append(float(second))
        made.memory_bytes.append(round((100 + mib_per_min * second / 60) * MIB))
        made.num_files.append(3)
    return made


def test_memory_that_grows_is_a_violation_where_it_was_seen_for_long() -> None:
    assert told(histories=[life("worker", 20, 0.5)]).num_violations == 0
    assert told(histories=[life("worker", 20, 1.5)]).num_violations == 1
    found = told(histories=[life("worker", 5, 1.5), life("api", 5, 0)])
    assert found.num_violations == 0
    assert found.num_processes == {"worker": 1, "api": 1}
    assert [round(each.mib_per_min, 2) for each in found.growth] == [1.5, 0]


def test_what_is_left_behind_is_a_violation() -> None:
    assert told(left=["process 5 outlived the server"]).violations == ["process 5 outlived the server"]


def test_a_server_that_answers_nothing_has_not_survived() -> None:
    refused = SentQuestion(question=0, way="read", sample=Sample(begin_s=100, end_s=101, error="http 503"))
    found = told(asked=[refused])
    assert found.outcomes == {"refused, the engine was not ready (503)": 1}
    assert found.violations == ["no request was answered"]


def test_a_slope_is_of_what_follows_the_warm_up() -> None:
    grown = ProcessHistory(role="api", pid=1)
    for second in range(1001):
        grown.times_s.append(50.0 + second)
        mib = 10 + second if second < 300 else 310 + (second - 300) * 2 / 60
        grown.memory_bytes.append(round(mib * MIB))
        grown.num_files.append(3)
    found = growth(grown)
    assert found is not None and found.is_judged
    assert found.mib_per_min == pytest.approx(2, abs=0.01)
    assert found.seconds == 700
    assert growth(ProcessHistory(role="api", pid=1, times_s=[1.0, 2.0], memory_bytes=[1, 1], num_files=[1, 1])) is None


def test_a_watch_sees_memory_and_open_files_of_living_processes() -> None:
    watch = ProcessMonitor(lambda: {os.getpid(): "api", 2**22 + 1: "worker"})
    before = watch.open_files()["api"]
    with open(os.devnull), open(os.devnull):
        assert watch.open_files() == {"api": before + 2}
    assert watch.histories[os.getpid()].memory_bytes[0] > 10 * MIB


@pytest.mark.parametrize(
    ("dtype", "runner", "is_exact"),
    [
        ("float64", {}, True),
        ("bfloat16", {}, False),
        ("bfloat16", {"exact": False}, False),
        ("bfloat16", {"exact": True}, True),
    ],
)
def test_replies_are_compared_token_by_token_where_nothing_else_changes_them(
    dtype: str, runner: dict[str, Any], is_exact: bool
) -> None:
    assert has_same_tokens({"model": {"dtype": dtype}, "runner": runner}) == is_exact
