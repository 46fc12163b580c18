"""The store that fails on demand, so that what follows can be tested."""

from __future__ import annotations

import itertools
import threading

import pytest

from tests.helpers.host import make_keys
from tests.helpers.sim_store import Fault, SimStore, Step
from tests.helpers.stores import blanks, pages
from tests.helpers.waiting import PATIENCE_S

KEYS = make_keys("x", 6)
FINE = Step()


def test_a_failing_call_does_nothing_after_the_given_page() -> None:
    store = SimStore([FINE, *[Step(Fault.FAIL, after=2)] * 3])
    store.put(KEYS[:4], pages(KEYS[:4]))
    assert store.exists(KEYS[:4]) == 2
    assert store.get(KEYS[:4], blanks(4)) == 2
    assert store.put(KEYS[2:], pages(KEYS[2:])) == 2
    assert store.stats().num_errors == 3
    assert store.get(KEYS, blanks(6)) == 4


def test_garbled_bytes_are_found_and_the_page_forgotten() -> None:
    store = SimStore([FINE, Step(Fault.LIE, after=1)])
    store.put(KEYS, pages(KEYS))
    buffers = blanks(6)
    assert store.get(KEYS, buffers) == 1
    assert buffers[0] == pages(KEYS)[0]
    assert store.stats().num_corrupt == 1
    assert store.exists(KEYS) == 1


def test_a_lie_about_storing_is_found_when_reading() -> None:
    store = SimStore([Step(Fault.LIE, after=4)])
    assert store.put(KEYS, pages(KEYS)) == 6
    assert store.get(KEYS, blanks(6)) == 4
    assert store.stats().num_corrupt == 1


def test_a_lie_about_what_is_there_is_found_when_reading() -> None:
    store = SimStore([Step(Fault.LIE)])
    assert store.exists(KEYS) == 6
    assert store.get(KEYS, blanks(6)) == 0


def test_a_full_store_takes_nothing_and_gives_what_it_has() -> None:
    store = SimStore([FINE, *[Step(Fault.FULL)] * 2])
    store.put(KEYS[:3], pages(KEYS[:3]))
    assert store.put(KEYS, pages(KEYS)) == 0
    assert store.get(KEYS, blanks(6)) == 3
    assert store.stats().num_refused == 6


def test_delays_are_spent_by_the_given_clock() -> None:
    slept: list[float] = []
    store = SimStore(itertools.cycle([Step(delay_s=0.25), FINE]), sleep=slept.append)
    for _ in range(2):
        store.put(KEYS, pages(KEYS))
        store.get(KEYS, blanks(6))
    assert slept == [0.25, 0.25]


@pytest.mark.parametrize("end", ["release", "close"])
def test_a_call_that_hangs_returns_nothing_when_let_go(end: str) -> None:
    store = SimStore([FINE, Step(Fault.HANG)])
    store.put(KEYS, pages(KEYS))
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.append(store.get(KEYS, blanks(6))))
    reader.start()
    reader.join(0.05)
    assert reader.is_alive()
    assert store.stats().num_pages == 6
    getattr(store, end)()
    reader.join(PATIENCE_S)
    assert got == [0]
    assert store.get(KEYS, blanks(6)) == (6 if end == "release" else 0)
