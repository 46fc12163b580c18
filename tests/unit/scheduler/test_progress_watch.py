"""A worker is charged the time that was its own: what it computed, or slept, but not what the machine kept from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hiserve.ipc.messages import Ready, WorkerStats
from hiserve.scheduler.worker_process import CpuUsage, ProgressWatch, WorkerProcess, usage_of

TICK_S = 0.25


def look_for(still: ProgressWatch, seconds: float, *, share: float, wants_cpu: bool) -> None:
    """Looks every ``TICK_S`` at a process that gets this share of a CPU."""
    for _ in range(round(seconds / TICK_S)):
        now_s = still.sampled_s + TICK_S
        cpu_s = 0.0 if still.cpu_s is None else still.cpu_s
        still.sample(now_s, CpuUsage(cpu_s + share * TICK_S, wants_cpu))


def begun() -> ProgressWatch:
    """At work since second 100; what its process had computed before that counts for nothing."""
    still = ProgressWatch(100.0)
    still.sample(100.0, CpuUsage(5000.0, wants_cpu=True))
    return still


@pytest.mark.parametrize(
    ("share", "wants_cpu", "own_s", "is_computing"),
    [
        (1.0, True, 20.0, True),  # alone on the machine, or in a loop without end
        (0.2, True, 4.0, True),  # among ten others on two cores
        (0.0, True, 0.0, False),  # nothing at all
        (0.0, False, 20.0, False),  # asleep
        (0.02, False, 20.0, False),  # asleep, but for a thread that looks around
        (3.0, True, 20.0, True),  # several threads
    ],
)
def test_what_is_charged_in_twenty_seconds(share: float, wants_cpu: bool, own_s: float, is_computing: bool) -> None:
    still = begun()
    look_for(still, 20, share=share, wants_cpu=wants_cpu)
    assert still.own_s == pytest.approx(own_s)
    assert still.is_computing is is_computing


def test_a_worker_that_computed_and_then_sleeps_is_charged_the_clock_from_there() -> None:
    still = begun()
    look_for(still, 10, share=0.1, wants_cpu=True)
    look_for(still, 10, share=0.0, wants_cpu=False)
    assert still.own_s == pytest.approx(1 + 10)
    assert not still.is_computing


def test_where_the_kernel_does_not_tell_the_clock_counts() -> None:
    still = begun()
    still.sample(103.0, None)
    still.sample(104.0, CpuUsage(5000.0, wants_cpu=True))
    assert still.own_s == pytest.approx(4.0)


def test_a_step_that_ended_clears_the_account() -> None:
    still = begun()
    look_for(still, 10, share=1.0, wants_cpu=True)
    still.end(110.1)
    assert (still.since_s, still.own_s, still.computed_s) == (110.1, 0.0, 0.0)
    still.sample(110.25, CpuUsage(9000.0, wants_cpu=False))
    assert still.own_s == pytest.approx(0.15), "what came before the end of the step was charged"


def test_time_in_which_nobody_looked_is_forgiven() -> None:
    still = begun()
    still.extend_deadline(7.0)
    still.sample(107.25, CpuUsage(5007.25, wants_cpu=True))
    assert (still.since_s, still.own_s) == (107.0, 0.25)


def test_time_in_which_nobody_looked_is_forgiven_since_the_last_look() -> None:
    still = begun()
    still.sample(102.0, None)
    still.extend_deadline(7.0)
    still.sample(109.5, None)
    assert (still.since_s, still.own_s) == (107.0, 2.5)


def test_steps_are_progress_whatever_else_waits_and_words_without_steps_are_none() -> None:
    worker = WorkerProcess(0, 1, process=None)  # type: ignore[arg-type]
    worker.mark_ready(
        Ready(1, 7, max_running=4, max_len=9, num_pages=9, page_size=1, namespace=b"", startup_s={}), 100.0
    )
    for now_s, steps, since_s in ((101.0, 1, 101.0), (102.0, 1, 101.0), (103.0, 2, 103.0)):
        worker.on_stats(WorkerStats(steps=steps, running=3), now_s)
        assert worker.progress.since_s == since_s
    worker.on_stats(WorkerStats(steps=2), 104.0)
    assert worker.progress.since_s == 104.0, "it has nothing to do"


# --- what the kernel says -------------------------------------------------------------------------


def written(proc: Path, pid: int, states: str, *, user: int, system: int) -> None:
    for number, state in enumerate(states):
        task = proc / str(pid) / "task" / str(pid + number)
        task.mkdir(parents=True)
        line = f"{pid} (a) b (c) {state} 1 1 1 0 -1 4194304 102 0 1 0 {user} {system} 0 0 20 0"
        (task / "stat").write_text(line)
    (proc / str(pid) / "stat").write_text((proc / str(pid) / "task" / str(pid) / "stat").read_text())


@pytest.mark.parametrize(("states", "wants_cpu"), [("SSR", True), ("R", True), ("SDS", False), ("T", False)])
def test_a_process_wants_a_cpu_if_one_of_its_threads_does(tmp_path: Path, states: str, wants_cpu: bool) -> None:
    written(tmp_path, 40, states, user=250, system=50)
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    assert usage_of(40, tmp_path) == CpuUsage(300 / ticks_per_s, wants_cpu)


def test_of_a_process_that_is_gone_nothing_is_known(tmp_path: Path) -> None:
    assert usage_of(40, tmp_path) is None


@contextmanager
def running(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


def test_of_real_processes_one_spins_one_sleeps_and_one_is_stopped() -> None:
    """CPU times are compared with each other, however little the machine has for them."""
    say = "print('ready', flush=True)\n"
    with running(say + "while True: pass") as spinning, running(f"import time\n{say}time.sleep(600)") as sleeping:
        first = usage_of(spinning)
        assert first is not None
        deadline = time.monotonic() + 60
        while (now := usage_of(spinning)) is not None and now.cpu_s < first.cpu_s + 0.1:
            assert time.monotonic() < deadline, f"{now} after {first}"
            time.sleep(0.01)
        assert now is not None and now.wants_cpu
        while (asleep := usage_of(sleeping)) is not None and asleep.wants_cpu:
            assert time.monotonic() < deadline, "it never slept"
            time.sleep(0.01)
        os.kill(spinning, signal.SIGSTOP)
        while (stopped := usage_of(spinning)) is not None and stopped.wants_cpu:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_thread_that_computes_beside_a_sleeping_one_is_seen() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
    thread.start()
    try:
        usage = usage_of(os.getpid())
        assert usage is not None and usage.wants_cpu
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("states", ["RSS", "SRS", "SSR"])
def test_any_thread_may_want_a_cpu(tmp_path: Path, states: str) -> None:
    written(tmp_path, 70, states, user=1, system=1)
    usage = usage_of(70, tmp_path)
    assert usage is not None and usage.wants_cpu
