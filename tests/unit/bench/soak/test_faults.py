"""Faults that a soak strikes with, on processes and files of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hiserve.bench.options import Fault
from hiserve.bench.soak.faults import MAX_FLIPPED, inject, possible
from hiserve.cache.storage.records import PageState
from hiserve.cache.storage.segment import Segment, SegmentLayout
from hiserve.config.options import Options, make_options
from hiserve.errors import ConfigError
from tests.helpers.waiting import PATIENCE_S

LIMIT_S = 60.0
RNG = np.random.default_rng(3)
SLEEP = (sys.executable, "-c", "import time; time.sleep(3600)")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def config(**settings: object) -> Options:
    return make_options(host_cache_gib=0.05, cache_verify="all", **settings)


def test_the_settings_say_what_can_strike(tmp_path: Path) -> None:
    kills, store = ["kill-worker", "kill-scheduler"], f"file:{tmp_path}"
    assert possible(make_options(), (), LIMIT_S) == kills
    assert possible(config(), (), LIMIT_S) == [*kills, "flip-host"]
    assert possible(config(store=store), (), LIMIT_S) == [*kills, "flip-host", "flip-store"]
    assert possible(make_options(step_timeout_s=5), (), LIMIT_S) == ["kill-worker", "hang-worker", "kill-scheduler"]
    assert possible(config(), ("flip-host",), LIMIT_S) == ["flip-host"]
    for late in (0, LIMIT_S, 300):
        with pytest.raises(ConfigError, match="--step-timeout-s"):
            possible(make_options(step_timeout_s=late), ("hang-worker",), LIMIT_S)
    for unnoticed in (make_options(host_cache_gib=0.05), make_options(host_cache_gib=0, cache_verify="all")):
        with pytest.raises(ConfigError, match="--cache-verify all"):
            possible(unnoticed, ("kill-worker", "flip-host"), LIMIT_S)
    with pytest.raises(ConfigError, match="needs --store"):
        possible(config(), ("flip-store",), LIMIT_S)


@pytest.mark.parametrize(("fault", "role"), [("kill-worker", "worker"), ("kill-scheduler", "scheduler")])
def test_a_process_of_that_role_is_killed(sleeper: subprocess.Popen[bytes], fault: Fault, role: str) -> None:
    assert inject(fault, config(), {sleeper.pid: "api"}, RNG).what == ""
    blow = inject(fault, config(), {sleeper.pid: role, os.getpid(): "api"}, RNG)
    assert blow.victim == sleeper.pid
    assert sleeper.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_hang_is_a_process_that_stands_still(sleeper: subprocess.Popen[bytes]) -> None:
    assert inject("hang-worker", config(), {sleeper.pid: "worker"}, RNG).victim == sleeper.pid
    assert state_of(sleeper.pid) == "T"


def state_of(pid: int) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return state


def test_bits_are_flipped_in_pages_that_have_a_checksum_and_in_no_others(sleeper: subprocess.Popen[bytes]) -> None:
    segment = Segment.anonymous(SegmentLayout(b"n" * 16, page_size=4, page_bytes=4096, num_pages=32))
    holder = subprocess.Popen(SLEEP, pass_fds=[segment.fd])  # this process may have segments of other tests
    try:
        sealed = [3, 5, 8, 13, 21]
        segment.records["state"][1:] = PageState.VALID
        segment.records["checksum"][sealed] = 99
        segment.records["state"][21] = PageState.WRITING  # and the checksum of what was there before
        blow = inject("flip-host", config(), {holder.pid: "scheduler", sleeper.pid: "worker"}, RNG)
        assert blow == (f"a bit in each of {MAX_FLIPPED} pages", 0)
        changed = np.bitwise_count(segment.pages).sum(axis=1)
        assert np.flatnonzero(changed).tolist() == [3, 5, 8, 13]
        assert set(changed[changed > 0].tolist()) == {1}
        assert Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T", "it was left stopped"
    finally:
        holder.kill()
        holder.wait()
        segment.close()
    assert inject("flip-host", config(), {sleeper.pid: "scheduler"}, RNG).what == ""


def test_bits_are_flipped_in_pages_of_a_store(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "hiserve-store").write_bytes(b"marker")
    page, draft = tmp_path / "ab" / ("ab" * 32), tmp_path / "ab" / ("ab" * 32 + ".0123abcd-1.new")
    for path in (page, draft):
        path.write_bytes(bytes(1000))
    blow = inject("flip-store", config(store=f"file:{tmp_path}"), {}, RNG)
    assert blow.what == "a bit in each of 1 files"
    assert int.from_bytes(page.read_bytes()).bit_count() == 1 and page.stat().st_size == 1000
    assert draft.read_bytes() == bytes(1000)
    assert (tmp_path / "hiserve-store").read_bytes() == b"marker"
