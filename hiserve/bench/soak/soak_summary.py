"""The verdict on each stream of a soak, and the figures of all, among them memory and files of each process over time."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from hiserve.bench.options import SoakOptions
from hiserve.bench.soak.faults import FaultRecovery, Window
from hiserve.bench.soak.users import Reference, SentQuestion
from hiserve.bench.summary import Spread, spread, tpot_s, ttft_s, values_of
from hiserve.bench.workload import Sample

# A refusal is no failure: the server says when to come again.
REFUSALS = {
    "http 429": "refused, the queue was full (429)",
    "http 503": "refused, the engine was not ready (503)",
}
MIB = 2**20
SAMPLE_S = 1.0
WARM_UP = 0.3  # of a history
MAX_WARM_UP_S = 300.0
JUDGED_S = 600.0  # after the warm-up; a shorter run is reported and not judged
MIN_SAMPLES = 5
MAX_VIOLATIONS = 50


class StreamVerdict(msgspec.Struct, frozen=True):
    """The verdict on a request."""

    outcome: str  # in a word or two, for counting
    violation: str = ""  # what must not be; empty if all is well


class StreamOracle:
    """Judges requests that have ended."""

    def __init__(self, references: Sequence[Reference], *, is_exact: bool) -> None:
        self._references = references
        self._is_exact = is_exact

    def judge(self, asked: SentQuestion, windows: Sequence[Window]) -> StreamVerdict:
        """Returns the verdict on a request that has ended: its outcome, and whether these faults allow it."""
        sample, reference = asked.sample, self._references[asked.question]
        is_same = sample.output_ids == reference.ids[: len(sample.output_ids)]
        if not is_same and self._is_exact:
            return StreamVerdict("other tokens", f"{sample.output_ids} where {reference.ids} was expected")
        if sample.num_ends > 1:
            return StreamVerdict("ended again", f"the stream ended {sample.num_ends} times")
        if sample.error:
            return _failed(asked, any(window.may_fail and window.overlaps(sample) for window in windows))
        if not sample.finish:
            assert asked.way == "cancelled", f"neither an end nor an error: {sample}"
            return StreamVerdict("left by the user")
        if not is_same:
            return StreamVerdict("answered, other tokens")
        if sample.finish == "abort":
            return StreamVerdict("cut at the server's time limit")
        if self._is_exact and (len(sample.output_ids), sample.finish) != (len(reference.ids), reference.finish):
            got = f"{len(sample.output_ids)} tokens ({sample.finish})"
            return StreamVerdict("cut short", f"{got} where {len(reference.ids)} ({reference.finish}) were expected")
        return StreamVerdict("answered")


def judge_bad(sample: Sample) -> StreamVerdict:
    if sample.error:
        return StreamVerdict("malformed, lost", f"{sample.error}: {sample.detail}")
    if refusal := REFUSALS.get(f"http {sample.status}"):
        return StreamVerdict(refusal)
    if 400 <= sample.status < 500:
        return StreamVerdict("malformed, told so")
    return StreamVerdict("malformed, mistaken", f"a malformed request was answered {sample.status}")


def _failed(asked: SentQuestion, is_excused: bool) -> StreamVerdict:
    sample = asked.sample
    if sample.error in REFUSALS and not sample.output_ids:
        return StreamVerdict(REFUSALS[sample.error])
    if sample.error == "error event" and is_excused:
        return StreamVerdict("failed by a fault")
    if asked.way == "slow" and sample.error in ("connection", "incomplete"):
        return StreamVerdict("slow reader cut off")
    return StreamVerdict(sample.error, f"{sample.error}: {sample.detail}")


class ProcessHistory(msgspec.Struct, kw_only=True):
    """One process, from when it was first seen to when it was last seen."""

    role: str
    pid: int
    times_s: list[float] = []  # when samples were taken
    memory_bytes: list[int] = []  # resident memory that is not shared, at each of them
    num_files: list[int] = []  # open descriptors, at each of them


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """The growth of a process's memory after its warm-up, by a line through the samples."""

    role: str
    pid: int
    seconds: float  # between first and last sample after the warm-up
    last_mib: float
    mib_per_min: float  # slope
    is_judged: bool  # it lived long enough for the slope to mean something


class ProcessMonitor:
    """Samples the processes that a function returns with their roles, again and again; ``histories`` holds them by process."""

    def __init__(self, processes: Callable[[], dict[int, str]]) -> None:
        self._processes = processes
        self.histories: dict[int, ProcessHistory] = {}

    def look(self) -> None:
        for pid, role in self._processes().items():
            try:
                resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
                num_files = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue  # it has just died
            if not int(resident):
                continue  # a zombie
            history = self.histories.setdefault(pid, ProcessHistory(role=role, pid=pid))
            history.times_s.append(time.perf_counter())
            history.memory_bytes.append((int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE"))
            history.num_files.append(num_files)

    def open_files(self) -> dict[str, int]:
        """Returns how many descriptors each role has open now, all its processes together."""
        self.look()
        found: dict[str, int] = {}
        for pid, role in self._processes().items():
            if pid in self.histories:
                found[role] = found.get(role, 0) + self.histories[pid].num_files[-1]
        return found


def growth(history: ProcessHistory) -> Growth | None:
    """Returns how a process grew; None where it was seen too seldom."""
    seconds = np.array(history.times_s) - history.times_s[0]
    begin_s = min(WARM_UP * float(seconds[-1]), MAX_WARM_UP_S)
    is_later = seconds >= begin_s
    if int(is_later.sum()) < MIN_SAMPLES:
        return None
    mib = np.array(history.memory_bytes)[is_later] / MIB
    seconds = seconds[is_later]
    span_s = float(seconds[-1] - seconds[0])
    return Growth(
        role=history.role,
        pid=history.pid,
        seconds=span_s,
        last_mib=float(mib[-1]),
        mib_per_min=60 * float(np.polyfit(seconds, mib, 1)[0]),
        is_judged=span_s >= JUDGED_S,
    )


class RecoveryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, as the report shows it."""

    fault: str
    what: str  # what was done, in words
    at_s: float  # when, from the start of the run
    num_open: int  # requests in flight at that moment
    ready_s: float | None  # until all processes were ready again; None where none was struck, or it never was
    recovery_s: float | None  # until the first new token, likewise


class SoakLatencies(msgspec.Struct, frozen=True, kw_only=True):
    """Time to first token, and time per output token, of requests that were answered."""

    ttft_ms: Spread
    tpot_ms: Spread


class SoakFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a soak."""

    duration_s: float  # from the first request to the end of the last
    is_exact: bool  # replies had to be those recorded
    num_questions: int  # different requests, each repeated
    outcomes: dict[str, int]  # requests by what became of them
    faults: list[RecoveryFigures]
    calm: SoakLatencies
    beside_faults: SoakLatencies  # latencies of what was open between a fault and the first token after it
    num_processes: dict[str, int]  # processes of each role that lived, one after the other or at once
    growth: list[Growth]  # of each process that lived long enough
    counters: dict[str, float]  # by how much the server's counters grew, since the last start of each process
    violations: list[str]  # what must not be, the first of them
    num_violations: int  # all of them


def figures(
    *,
    asked: Sequence[SentQuestion],
    nonsense: Sequence[Sample],
    struck: Sequence[FaultRecovery],
    histories: Sequence[ProcessHistory],
    left: Sequence[str],
    counters: dict[str, float],
    judge: StreamOracle,
    soak: SoakOptions,
    begin_s: float,
    is_exact: bool,
) -> SoakFigures:
    """Judges ended requests, faults, processes and left-over files, in words."""
    windows = [each.window() for each in struck]
    verdicts = [judge.judge(each, windows) for each in asked] + [judge_bad(each) for each in nonsense]
    samples = [each.sample for each in asked] + list(nonsense)
    violations = [
        f"{sample.begin_s - begin_s:.2f} s: {verdict.violation}"
        for sample, verdict in zip(samples, verdicts, strict=True)
        if verdict.violation
    ]
    grown = [found for history in histories if (found := growth(history)) is not None]
    violations += [f"{each.what}: no token within {soak.recovery_limit:g} s" for each in struck if each.is_lost]
    violations += [
        f"{each.role} {each.pid} grew by {each.mib_per_min:.2f} MiB a minute over {each.seconds:.0f} s"
        for each in grown
        if each.is_judged and each.mib_per_min > soak.memory_limit
    ]
    violations += left
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    if not outcomes["answered"] + outcomes["answered, other tokens"]:
        violations.append("no request was answered")
    answered = [each.sample for each in asked if not each.sample.error and each.sample.finish and each.way != "slow"]
    felt = [window for window in windows if window.end_s > window.begin_s]
    beside = [sample for sample in answered if any(window.overlaps(sample) for window in felt)]
    known = {id(sample) for sample in beside}
    return SoakFigures(
        duration_s=max((sample.end_s for sample in samples), default=begin_s) - begin_s,
        is_exact=is_exact,
        num_questions=len({each.question for each in asked}),
        outcomes=dict(outcomes.most_common()),
        faults=[_told(each, begin_s) for each in struck],
        calm=_latencies(sample for sample in answered if id(sample) not in known),
        beside_faults=_latencies(beside),
        num_processes=dict(Counter(history.role for history in histories)),
        growth=grown,
        counters=counters,
        violations=violations[:MAX_VIOLATIONS],
        num_violations=len(violations),
    )


def _told(struck: FaultRecovery, begin_s: float) -> RecoveryFigures:
    return RecoveryFigures(
        fault=struck.fault,
        what=struck.what,
        at_s=struck.struck_s - begin_s,
        num_open=struck.num_open,
        ready_s=None if struck.back_s is None else struck.back_s - struck.struck_s,
        recovery_s=struck.recovery_s,
    )


def _latencies(samples: Iterable[Sample]) -> SoakLatencies:
    found = list(samples)
    return SoakLatencies(ttft_ms=spread(values_of(ttft_s, found)), tpot_ms=spread(values_of(tpot_s, found)))
