"""The supervisor believes only the living incarnation, and replaces a worker that breaks the protocol."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hiserve.config.options import make_options
from hiserve.core.devices import VISIBLE_DEVICES
from hiserve.errors import ConfigError, HiserveError, ResourceError
from hiserve.ipc.child import wait_for_event
from hiserve.ipc.codec import Received
from hiserve.ipc.lifecycle import Crash
from hiserve.ipc.messages import FromWorker, Ready, StepReport
from hiserve.scheduler import supervisor as supervisor_module
from hiserve.scheduler.supervisor import Supervisor
from hiserve.scheduler.worker_process import CpuUsage, usage_of
from tests.helpers.fake_processes import FAKE_WORKER
from tests.helpers.processes import wait_dead
from tests.helpers.settings import identified, settings_of
from tests.helpers.waiting import PATIENCE_S, until

HOST = {
    "dtype": "float32",
    "max_model_len": 256,
    "kv_pages": 60,
    "max_running_requests": 4,
    "host_cache_gib": 0.01,
}
NANO = "hiserve-nano"  # a model whose pages are known
IDENTITY = identified(make_options(**HOST)).identity
ROGUE = (sys.executable, "-m", "tests.helpers.rogue_worker")


class Witness:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.reports: list[StepReport] = []
        self.readies: list[Ready] = []
        self.crashes: list[Crash] = []
        self.held = [4, 5]

    def worker_ready(self, replica: int, ready: Ready) -> None:
        self.events.append(f"ready {ready.incarnation}")
        self.readies.append(ready)

    def worker_sent(self, replica: int, received: Received[FromWorker]) -> None:
        assert isinstance(received.message, StepReport)
        self.reports.append(received.message)

    def worker_idle(self) -> None:
        pass

    def worker_lost(self, replica: int) -> list[int]:
        self.events.append("lost")
        return self.held

    def worker_reaped(self, crash: Crash) -> None:
        self.crashes.append(crash)

    def worker_abandoned(self, replica: int, error: HiserveError) -> None:
        self.events.append(f"abandoned: {error.message}")

    async def until(self, event: str) -> None:
        await until(lambda: any(event in seen for seen in self.events))


@asynccontextmanager
async def supervised(
    model: str,
    command: tuple[str, ...] = ROGUE,
    usage: Callable[[int], CpuUsage | None] = usage_of,
    **settings: object,
) -> AsyncIterator[tuple[Supervisor, Witness]]:
    witness = Witness()
    config = msgspec.structs.replace(
        settings_of(**({"model": model, "host_cache_gib": 0} | settings)), identity=IDENTITY
    )
    supervisor = Supervisor(config, command, witness, usage)
    run = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, witness
    finally:
        pids = [facts.pid for facts in supervisor.facts()]
        for pid in pids:  # the rogue obeys nobody
            os.kill(pid, signal.SIGKILL)
        await supervisor.stop()
        await run
        wait_dead(pids)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(supervisor_module, "EXIT_GRACE_S", 0.2)
    monkeypatch.setattr(supervisor_module, "STACK_S", 0.1)


async def test_messages_of_another_incarnation_are_counted_and_ignored() -> None:
    async with supervised("stale") as (supervisor, witness):
        await supervisor.started
        await until(lambda: witness.reports)
        assert [report.updates.uids for report in witness.reports] == [[1]]
        assert witness.events == ["ready 1"]
        assert supervisor.num_stale == 3
        assert supervisor.facts()[0].stats.steps == 1


@pytest.mark.parametrize("model", ["garbage", "twice"])
async def test_a_worker_that_talks_nonsense_is_replaced(model: str) -> None:
    async with supervised(model) as (supervisor, witness):
        await witness.until("ready 2")
        assert witness.events[0] == "ready 1"
        assert witness.events[1].startswith("lost")
        assert supervisor.num_malformed == 1
        assert [facts.incarnation for facts in supervisor.facts()] == [2]


async def test_a_worker_that_says_farewell_is_replaced() -> None:
    async with supervised("farewell") as (_, witness):
        await witness.until("ready 2")


async def test_a_report_before_ready_fails_the_start() -> None:
    async with supervised("early") as (supervisor, _):
        with pytest.raises(HiserveError, match="StepReport before Ready"):
            await asyncio.wait_for(supervisor.started, PATIENCE_S)


async def test_a_successor_that_never_comes_up_is_abandoned_after_a_few_tries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor_module, "RESTART_DELAYS_S", (0.0, 0.0))
    flag = tmp_path / "started"
    flag.touch()
    script = (
        "import os, runpy, sys; first = os.path.exists(sys.argv[1]); first and os.remove(sys.argv[1]);"
        "first or sys.exit(3); sys.argv = sys.argv[1:]; runpy.run_module('tests.helpers.rogue_worker', run_name='__main__')"
    )
    async with supervised("farewell", (sys.executable, "-c", script, str(flag))) as (_, witness):
        await witness.until("abandoned")
    assert [event.split(":")[0] for event in witness.events] == ["ready 1", "lost", "lost", "lost", "abandoned"]
    assert "exit code 3" in witness.events[-1]


@pytest.mark.parametrize(
    ("model", "held", "is_useful"),
    [("last words", [4, 5], True), ("farewell", [4, 5], False), ("farewell", [], True)],
    ids=["output", "no output", "no request"],
)
async def test_a_worker_without_output_of_the_requests_it_held_delays_its_successor(
    model: str, held: list[int], is_useful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = (0.0, 0.01, 0.02, 0.03)
    monkeypatch.setattr(supervisor_module, "RESTART_DELAYS_S", delays)
    waited: list[float] = []

    async def wait(event: asyncio.Event, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return await wait_for_event(event, timeout_s)

    monkeypatch.setattr(supervisor_module, "wait_for_event", wait)
    async with supervised(model) as (_, witness):
        witness.held = held
        await witness.until("ready 2")
        assert waited == [delays[not is_useful]]


# --- processes that cannot be started ----------------------------------------------------------------


def refuse(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Lets the kernel refuse these processes, counted from 1, as it does when it has no more."""
    start, count = asyncio.create_subprocess_exec, itertools.count(1)

    async def start_or_refuse(*command: str, **settings: Any) -> Any:
        if next(count) in numbers:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(*command, **settings)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_refuse)


async def test_a_successor_that_cannot_be_started_is_a_failed_start_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays = (0.0, 0.01, 0.02, 0.03)
    monkeypatch.setattr(supervisor_module, "RESTART_DELAYS_S", delays)
    refuse(monkeypatch, 2, 3)
    waited: list[float] = []

    async def wait(event: asyncio.Event, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return await wait_for_event(event, timeout_s)

    monkeypatch.setattr(supervisor_module, "wait_for_event", wait)
    async with supervised("farewell") as (supervisor, witness):
        witness.held = []
        await witness.until("ready 4")
        assert witness.events == ["ready 1", "lost", "lost", "lost", "ready 4"]
        assert waited == [delays[0], *delays[1:3]], "no back-off"
        crash = supervisor.crash
        assert crash is not None
        assert (crash.incarnation, crash.pid, crash.end) == (3, 0, "not started")
        assert "Resource temporarily unavailable" in crash.error
        assert [each.incarnation for each in witness.crashes] == [1, 2, 3], "not told as they came"


async def test_a_worker_that_can_never_be_started_again_is_abandoned_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "RESTART_DELAYS_S", (0.0, 0.0))
    refuse(monkeypatch, *range(2, 9))
    async with supervised("farewell") as (_, witness):
        await witness.until("abandoned")
    assert [event.split(":")[0] for event in witness.events] == ["ready 1", "lost", "lost", "lost", "abandoned"]
    assert "worker 0 could not be started" in witness.events[-1]


async def test_a_first_worker_that_cannot_be_started_fails_the_start_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse(monkeypatch, 2)
    async with supervised("stale", replicas=2) as (supervisor, _):
        with pytest.raises(ResourceError, match=r"Resource temporarily unavailable.*limits of processes"):
            await asyncio.wait_for(supervisor.started, PATIENCE_S)


# --- devices ---------------------------------------------------------------------------------------------


def seen_by(pid: int) -> str | None:
    """The devices that the environment of a process shows it."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = dict(line.partition(b"=")[::2] for line in file.read().split(b"\0"))
    value = variables.get(VISIBLE_DEVICES.encode())
    return None if value is None else value.decode()


async def test_each_replica_is_started_on_its_own_device_and_so_is_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "4,5,6")
    async with supervised("stale", replicas=2, device="cuda", devices="2,0") as (supervisor, witness):
        await supervisor.started
        assert [seen_by(facts.pid) for facts in supervisor.facts()] == ["6", "4"]
        os.kill(supervisor.facts()[0].pid, signal.SIGKILL)
        await witness.until("ready 2")
        assert [seen_by(facts.pid) for facts in supervisor.facts()] == ["6", "4"]


async def test_on_cpu_workers_have_the_environment_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "4,5,6")
    async with supervised("stale") as (supervisor, _):
        await supervisor.started
        assert [seen_by(facts.pid) for facts in supervisor.facts()] == ["4,5,6"]


# --- workers that hang, and workers that are kept from their work ----------------------------------------


class Kernel:
    """Says of every process what a test wants it to say, and counts how often it was asked."""

    def __init__(self, cpu_s_per_look: float, *, wants_cpu: bool = True) -> None:
        self.cpu_s_per_look = cpu_s_per_look
        self.wants_cpu = wants_cpu
        self.num_looks = 0
        self._cpu_s = 0.0

    def usage(self, pid: int) -> CpuUsage:
        self.num_looks += 1
        self._cpu_s += self.cpu_s_per_look
        return CpuUsage(self._cpu_s, self.wants_cpu)

    async def look(self, num_looks: int) -> None:
        """Returns after so many more looks."""
        end = self.num_looks + num_looks
        await until(lambda: self.num_looks >= end)


async def test_a_worker_that_gets_no_cpu_is_not_taken_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last word was that it has a request; by the clock, its time is over ten times."""
    monkeypatch.setattr(supervisor_module, "WATCH_INTERVAL_S", 0.005)
    kernel = Kernel(cpu_s_per_look=0.0001)
    async with supervised("mute", step_timeout_s=0.05, usage=kernel.usage) as (supervisor, witness):
        await supervisor.started
        begin = time.monotonic()
        await kernel.look(110)
        assert time.monotonic() - begin > 10 * 0.05
        assert witness.events == ["ready 1"]


async def test_a_worker_killed_while_it_computed_leaves_more_time_to_the_next_and_one_that_slept_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor_module, "WATCH_INTERVAL_S", 0.02)
    kernel = Kernel(cpu_s_per_look=10.0)  # all the time there is
    async with supervised("mute", step_timeout_s=0.3, usage=kernel.usage) as (supervisor, witness):
        await witness.until("ready 2")
        crash = supervisor.crash
        assert crash is not None
        assert "ended no step for" in crash.error
        assert supervisor._limit_factors == {0: 2}
        assert "the next one gets 0.6 s" in caplog.text
        for _ in range(5):
            supervisor._adjust_limit(0, is_computing=True)
        assert supervisor._limit_factors == {0: supervisor_module.MAX_LIMIT_FACTOR}
        supervisor._adjust_limit(0, is_computing=False)
        assert supervisor._limit_factors == {0: 1}


async def test_a_worker_whose_limit_was_doubled_has_so_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "WATCH_INTERVAL_S", 0.02)
    kernel = Kernel(cpu_s_per_look=10.0)
    async with supervised("mute", step_timeout_s=0.1, usage=kernel.usage) as (supervisor, witness):
        supervisor._limit_factors[0] = 8
        await witness.until("ready 2")
        assert supervisor.crash is not None
        own_s = re.search(r"\(([\d.]+) s its own", supervisor.crash.error)
        assert own_s is not None and float(own_s[1]) >= 8 * 0.1
        assert supervisor._limit_factors == {0: 16}


async def test_a_worker_that_spins_for_ever_is_found_too() -> None:
    async with supervised("spin", step_timeout_s=0.5) as (supervisor, witness):
        await witness.until("ready 2")  # for which it needs half a second of CPU
        crash = supervisor.crash
        assert crash is not None
        assert "ended no step for" in crash.error


# --- what is known of a death ----------------------------------------------------------------------


async def test_the_last_words_of_a_worker_are_kept_with_how_its_process_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "EXIT_GRACE_S", PATIENCE_S)
    async with supervised("last words") as (supervisor, witness):
        await witness.until("ready 2")
        crash = supervisor.crash
        assert crash is not None
        assert (crash.replica, crash.incarnation, crash.end) == (0, 1, "exit code 71"), (
            "it was not given the time to end"
        )
        assert (crash.error, crash.uids, crash.num_steps) == ("CUDA error: gone", [4, 5], 1)
        assert crash.snapshot is not None
        assert (crash.snapshot.steps[0].uids, crash.snapshot.decision, crash.snapshot.pending_ops) == (
            [1, 2],
            "replay of 4: decode",
            [3],
        )


async def test_a_worker_whose_work_does_not_get_on_is_replaced_after_its_time(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which it may write where it hangs lasts until it has."""
    sleep, written = asyncio.sleep, []

    def has_written() -> bool:
        written.append(capfd.readouterr().err)
        return "in main" in "".join(written)

    async def sleep_until_written(seconds: float) -> None:
        await sleep(seconds)
        if seconds == supervisor_module.STACK_S:
            await until(has_written)

    monkeypatch.setattr(asyncio, "sleep", sleep_until_written)
    monkeypatch.setattr(supervisor_module, "STACK_S", 0.0123)
    monkeypatch.setattr(supervisor_module, "WATCH_INTERVAL_S", 0.02)
    async with supervised("mute", step_timeout_s=0.3) as (supervisor, witness):
        await witness.until("ready 2")
        assert has_written(), "it was not asked where it hangs, or killed at once"
        crash = supervisor.crash
        assert crash is not None
        stood_s = re.search(r"ended no step for ([\d.]+) s", crash.error)
        assert stood_s is not None and float(stood_s[1]) >= 0.3
        await asyncio.sleep(0.7)
        assert witness.events == ["ready 1", "lost", "ready 2"], "the second one rests"


async def test_without_a_limit_no_worker_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "WATCH_INTERVAL_S", 0.02)
    async with supervised("mute", step_timeout_s=0) as (supervisor, witness):
        await supervisor.started
        await asyncio.sleep(0.3)
        assert witness.events == ["ready 1"]
        assert supervisor.facts()[0].step_age_s > 0.1


async def test_time_in_which_the_supervisor_stood_still_is_not_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands but for what the test adds: a minute between two looks, and then a little at each."""
    monkeypatch.setattr(supervisor_module, "WATCH_INTERVAL_S", 0.02)
    kernel, clock = Kernel(cpu_s_per_look=0, wants_cpu=False), SimpleNamespace(now_s=time.monotonic(), s_per_look=0.0)
    times = SimpleNamespace(monotonic=lambda: clock.now_s, time=time.time)
    monkeypatch.setattr(supervisor_module, "time", times)

    def look(pid: int) -> CpuUsage:
        clock.now_s += clock.s_per_look
        return kernel.usage(pid)

    async with supervised("mute", step_timeout_s=2, usage=look) as (supervisor, witness):
        await supervisor.started
        await until(lambda: supervisor.facts()[0].stats.running)
        clock.now_s += 60
        await kernel.look(5)
        assert witness.events == ["ready 1"]
        clock.s_per_look = 2 * supervisor_module.WATCH_INTERVAL_S
        await witness.until("lost")


async def test_the_way_back_is_measured_by_phase() -> None:
    async with supervised("last words") as (supervisor, witness):
        await witness.until("ready 2")
        assert supervisor.recovery_times.last is None, "nothing was told yet"
    async with supervised("mute", step_timeout_s=0.3) as (supervisor, witness):
        await until(lambda: supervisor.recovery_times.last)
        recovery = supervisor.recovery_times.last
        assert recovery is not None
        assert (recovery.replica, recovery.incarnation, recovery.num_requests) == (0, 2, 2)
        assert list(recovery.phases) == ["detect", "exit", "wait", "start process", "first token"]
        assert recovery.phases["detect"] >= 0.3
        assert recovery.total_s == pytest.approx(sum(recovery.phases.values()), abs=0.02)


async def test_what_the_first_worker_chose_is_handed_to_each_successor() -> None:
    async with supervised(NANO, FAKE_WORKER, **HOST) as (supervisor, witness):
        await supervisor.started
        os.kill(supervisor.facts()[0].pid, signal.SIGKILL)
        await witness.until("ready 2")
        os.kill(supervisor.facts()[0].pid, signal.SIGKILL)
        await witness.until("ready 3")
        assert [ready.measurements.free_bytes for ready in witness.readies] == [1, 2, 2]


# --- the host segment of each replica --------------------------------------------------------------


def inode(pid: int, fd: int) -> int:
    return os.stat(f"/proc/{pid}/fd/{fd}").st_ino


def memfds(pid: int) -> dict[int, int]:
    """Inodes of the host segments that a process has open, by descriptor."""
    found = {}
    for entry in os.scandir(f"/proc/{pid}/fd"):
        if "hiserve-host-cache" in os.readlink(entry.path):
            found[int(entry.name)] = inode(pid, int(entry.name))
    return found


async def test_each_replica_has_a_segment_that_its_incarnations_share() -> None:
    async with supervised(NANO, FAKE_WORKER, **HOST, replicas=2) as (supervisor, witness):
        await supervisor.started
        first = [memfds(facts.pid) for facts in supervisor.facts()]
        assert [len(each) for each in first] == [1, 1]
        assert first[0] != first[1]
        os.kill(supervisor.facts()[0].pid, signal.SIGKILL)
        await witness.until("ready 2")
        assert [memfds(facts.pid) for facts in supervisor.facts()] == first


async def test_without_a_host_cache_workers_get_no_descriptor() -> None:
    async with supervised("stale") as (supervisor, _):
        await supervisor.started
        assert [memfds(facts.pid) for facts in supervisor.facts()] == [{}]


async def test_the_next_worker_is_born_when_the_last_one_is_reaped() -> None:
    """Or both would write to the segment."""
    async with supervised(NANO, FAKE_WORKER, **HOST) as (supervisor, witness):
        await supervisor.started
        pid = supervisor.facts()[0].pid
        os.kill(pid, signal.SIGKILL)
        while supervisor.facts() and supervisor.facts()[0].pid == pid:
            await asyncio.sleep(0)
        assert not os.path.exists(f"/proc/{pid}")
        await witness.until("ready 2")


async def test_a_segment_that_cannot_be_had_fails_the_start_with_its_error() -> None:
    async with supervised(NANO, FAKE_WORKER, **HOST | {"host_cache_name": "not/a/name"}) as (supervisor, witness):
        with pytest.raises(ConfigError, match="--host-cache-name is 'not/a/name'"):
            await asyncio.wait_for(supervisor.started, PATIENCE_S)
        assert supervisor.facts() == []
        assert witness.events == []


async def test_nothing_is_left_of_a_segment_when_the_supervisor_has_ended() -> None:
    before = {*memfds(os.getpid()).values()}  # an engine of another test may live on in a traceback, and end meanwhile
    async with supervised(NANO, FAKE_WORKER, **HOST) as (supervisor, _):
        await supervisor.started
        assert len({*memfds(os.getpid()).values()} - before) == 1
    assert {*memfds(os.getpid()).values()} <= before
