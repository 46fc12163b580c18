"""The checksum thread: every VALID page once, at a bounded rate."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from hiserve.cache.storage import checksums as module
from hiserve.cache.storage.checksums import Checksums, page_checksum
from hiserve.cache.storage.records import NO_CHECKSUM, Records, record_type
from tests.helpers.host import PAGE_BYTES, PAGE_SIZE, fill, make_run
from tests.helpers.waiting import PATIENCE_S

NUM_PAGES = 16


@pytest.fixture
def pages() -> np.ndarray:
    return np.zeros((NUM_PAGES, PAGE_BYTES), dtype=np.uint8)


@pytest.fixture
def records() -> Records:
    return Records(np.zeros(NUM_PAGES, dtype=record_type(PAGE_SIZE)), PAGE_SIZE)


def valid(records: Records, pages: np.ndarray, numbers: list[int]) -> np.ndarray:
    run = make_run(numbers, numbers)
    records.begin(run)
    fill(pages, run)
    records.finish(run.pages)
    return run.pages


def test_every_finished_page_gets_its_checksum(records: Records, pages: np.ndarray) -> None:
    checksums = Checksums(records, pages, max_bytes_per_s=1e12)
    checksums.add(valid(records, pages, [3, 1, 2]))
    assert checksums.wait(PATIENCE_S)
    for page in (1, 2, 3):
        assert records.checksum(page) == page_checksum(pages[page].data, records.digest(page))
    checksums.close()


def test_pages_freed_or_rewritten_while_they_wait_are_skipped(records: Records, pages: np.ndarray) -> None:
    checksums = Checksums(records, pages, max_bytes_per_s=1.0)  # a page takes two minutes
    numbers = valid(records, pages, [1, 2, 3])
    checksums.add(numbers)
    while records.checksum(1) == NO_CHECKSUM:
        pass  # the first page has its turn at once
    records.free(numbers[1:])
    records.begin(make_run([2], [9]))
    assert not records.unsealed(numbers[1:])[0].size
    assert checksums.num_queued == 2
    checksums.close()
    assert records.checksum(2) == NO_CHECKSUM


def test_a_page_freed_while_it_is_read_gets_no_checksum(
    records: Records, pages: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(page: memoryview, digest: bytes) -> int:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        return page_checksum(page, digest)

    monkeypatch.setattr(module, "page_checksum", slow)
    checksums = Checksums(records, pages, max_bytes_per_s=1e12)
    checksums.add(valid(records, pages, [1]))
    assert reading.wait(PATIENCE_S)
    records.free(np.array([1]))
    valid(records, pages, [1])
    go_on.set()
    assert checksums.wait(PATIENCE_S)
    assert records.checksum(1) == NO_CHECKSUM
    checksums.close()


def test_pages_are_taken_together_as_many_as_are_read_in_a_few_milliseconds(
    records: Records, pages: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on, taken = threading.Event(), threading.Event(), []
    unsealed = records.unsealed

    def note(some: np.ndarray) -> Any:
        taken.append(some.tolist())
        reading.set()
        assert go_on.wait(PATIENCE_S)
        return unsealed(some)

    monkeypatch.setattr(records, "unsealed", note)
    checksums = Checksums(records, pages, max_bytes_per_s=PAGE_BYTES / (module.BATCH_S / 4))
    checksums.add(valid(records, pages, [15]))
    assert reading.wait(PATIENCE_S)
    checksums.add(valid(records, pages, [3, 1, 2, 7, 6, 4, 9, 8, 5]))
    go_on.set()
    assert checksums.wait(PATIENCE_S)
    assert taken == [[15], [3, 1, 2, 7], [6, 4, 9, 8], [5]]
    checksums.close()


def test_the_queue_never_holds_a_page_twice(records: Records, pages: np.ndarray) -> None:
    checksums = Checksums(records, pages, max_bytes_per_s=1.0)
    numbers = np.arange(1, NUM_PAGES, dtype=np.int32)
    for _ in range(50):
        checksums.add(numbers)
    assert checksums.num_queued <= NUM_PAGES
    checksums.close()


def test_the_rate_is_kept_and_idle_time_is_not_saved_up(records: Records, pages: np.ndarray) -> None:
    checksums = Checksums(records, pages, max_bytes_per_s=PAGE_BYTES / 0.01)
    for numbers in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]):
        time.sleep(0.05)
        start = time.monotonic()
        checksums.add(valid(records, pages, numbers))
        assert checksums.wait(PATIENCE_S)
        assert time.monotonic() - start >= 4 * 0.01
    checksums.close()


def test_closing_does_not_wait_for_the_queue(records: Records, pages: np.ndarray) -> None:
    checksums = Checksums(records, pages, max_bytes_per_s=0.001)
    checksums.add(valid(records, pages, [1, 2]))
    assert not checksums.wait(0.02)
    checksums.close()
