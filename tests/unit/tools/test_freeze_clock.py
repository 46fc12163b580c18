"""The clock of the recorded workloads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tools.freeze.clock import BEGIN_S, VirtualClock


def test_a_time_of_the_driver_is_over_for_its_threads_though_the_machine_has_just_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that may write from its begin on refused each page: its threads were to wait for the driver's 1000 s."""
    for name in ("monotonic", "perf_counter", "thread_time"):
        monkeypatch.setattr(time, name, lambda: 5.0)
    VirtualClock().install()
    clocks = time.monotonic, time.perf_counter
    with ThreadPoolExecutor(1) as threads:
        elsewhere = [threads.submit(clock).result() for clock in clocks]
    here = [clock() for clock in clocks]
    monkeypatch.undo()
    assert here == elsewhere == [BEGIN_S, BEGIN_S]
