"""A worker waits for the memory of the one before it: until it is there, or no more of it comes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hiserve.engine.device_memory import MAX_WAIT_S, PERIOD_S, SETTLED_S, await_memory

GIB = 1 << 30


def waited(wanted: int, free: Iterable[int]) -> float:
    """Seconds waited; the last amount stays."""
    amounts = iter(free)
    last = 0

    def ask() -> int:
        nonlocal last
        last = next(amounts, last)
        return last

    return await_memory(wanted * GIB // 10, lambda: ask() * GIB // 10, sleep=lambda seconds: None)


def test_memory_that_is_there_is_not_waited_for() -> None:
    assert waited(100, [100]) == 0
    assert waited(0, [5]) == 0, "a first worker"
    assert waited(100, [0]) == 0, "a device that cannot be asked"


def test_a_worker_waits_until_memory_has_come_back() -> None:
    assert waited(100, [20, 20, 60, 60, 100]) == pytest.approx(4 * PERIOD_S)


def test_what_others_have_taken_is_not_waited_for_long() -> None:
    assert waited(100, [20, 50]) == pytest.approx(SETTLED_S + PERIOD_S, abs=2 * PERIOD_S)


def test_no_worker_waits_for_ever() -> None:
    assert waited(10**9, range(1, 10**6)) == pytest.approx(MAX_WAIT_S, abs=2 * PERIOD_S)
