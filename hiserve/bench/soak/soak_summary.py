"""The figures of a soak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from hiserve.bench.options import SoakOptions
from hiserve.bench.soak.fault_injector import FaultRecovery
from hiserve.bench.soak.process_memory import Growth, ProcessHistory, growth
from hiserve.bench.soak.questions import SentQuestion
from hiserve.bench.soak.stream_oracle import StreamOracle, judge_bad
from hiserve.bench.summary import Spread, spread, tpot_s, ttft_s, values_of
from hiserve.bench.workload import Sample

MAX_VIOLATIONS = 50


class RecoveryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, as the report shows it.

    Attributes:
        what: What was done, in words.
        at_s: When, from the start of the run.
        num_open: Requests in flight at that moment.
        ready_s: Until all processes were ready again; None where none was struck, or it never was.
        recovery_s: Until the first new token, likewise.
    """

    fault: str
    what: str
    at_s: float
    num_open: int
    ready_s: float | None
    recovery_s: float | None


class SoakLatencies(msgspec.Struct, frozen=True, kw_only=True):
    """Time to first token, and time per output token, of requests that were answered."""

    ttft_ms: Spread
    tpot_ms: Spread


class SoakFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a server lived through, and how.

    Attributes:
        duration_s: From the first request to the end of the last.
        is_exact: Replies had to be those recorded.
        num_questions: Different requests, each repeated.
        outcomes: Requests by what became of them.
        beside_faults: Latencies of what was open between a fault and the first token after it.
        num_processes: Processes of each role that lived, one after the other or at once.
        growth: Of each process that lived long enough.
        counters: By how much the server's counters grew, since the last start of each process.
        violations: What must not be, the first of them.
        num_violations: All of them.
    """

    duration_s: float
    is_exact: bool
    num_questions: int
    outcomes: dict[str, int]
    faults: list[RecoveryFigures]
    calm: SoakLatencies
    beside_faults: SoakLatencies
    num_processes: dict[str, int]
    growth: list[Growth]
    counters: dict[str, float]
    violations: list[str]
    num_violations: int


def figures(
    *,
    asked: Sequence[SentQuestion],
    nonsense: Sequence[Sample],
    struck: Sequence[FaultRecovery],
    lives: Sequence[ProcessHistory],
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
    grown = [found for life in lives if (found := growth(life)) is not None]
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
        num_processes=dict(Counter(life.role for life in lives)),
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
