"""Records of tails: recovered whole, and behind their history."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.storage.checksums import page_checksum
from hiserve.cache.storage.records import PageState, Records, record_type
from hiserve.core.transfers import TailImage
from tests.helpers.host import PAGE_BYTES, PAGE_SIZE, TENANTS, make_run, seal, store, told

FRAMES = [4, 9, 6]


@pytest.fixture
def table() -> np.ndarray:
    return np.zeros(16, dtype=record_type(PAGE_SIZE))


@pytest.fixture
def pages() -> np.ndarray:
    return np.zeros((16, PAGE_BYTES), dtype=np.uint8)


def leave_tail(records: Records, pages: np.ndarray, digest: bytes, frames: list[int]) -> None:
    """Writes a tail as a process does that then dies."""
    image = TailImage(np.array(frames, dtype=np.int32), TENANTS[0], digest)
    records.begin_tail(image)
    records.finish(image.frames)
    assert all(seal(records, pages, frame) for frame in frames)


def found(table: np.ndarray) -> list[tuple[list[int], bytes]]:
    """The tails that the next process recovers."""
    records = Records(table, PAGE_SIZE)
    records.recover()
    return [(tail.frames.tolist(), tail.digest) for tail in records.tails()]


def test_a_tail_is_recovered_whole_and_behind_its_history(table: np.ndarray, pages: np.ndarray) -> None:
    """H10."""
    records = Records(table, PAGE_SIZE)
    run = store(records, pages, make_run([3, 5], [7, 8]))
    leave_tail(records, pages, run.digests[1], FRAMES)
    assert records.num_used == 5
    after = table.copy()
    assert found(after) == [(FRAMES, run.digests[1])]
    adopted = Records(table.copy(), PAGE_SIZE)
    assert told(adopted.recover()) == told([run])
    assert adopted.in_use(np.array(FRAMES)).all() and adopted.num_used == 5
    for frame in FRAMES:  # each alone suffices to lose it
        for field, value in (("state", PageState.WRITING), ("checksum", 0)):
            torn = table.copy()
            torn[frame][field] = value
            assert found(torn) == []
            assert (torn["state"][FRAMES] == PageState.FREE).all() and torn["state"][3] == PageState.VALID
    orphan = table.copy()
    orphan[5]["state"] = PageState.WRITING  # the page before its boundary
    assert found(orphan) == [] and (orphan["state"][FRAMES] == PageState.FREE).all()


def test_a_frame_that_becomes_a_page_of_history_again_is_one(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    run = store(records, pages, make_run([3], [7]))
    leave_tail(records, pages, run.digests[0], FRAMES)
    records.free(np.array(FRAMES, dtype=np.int32))
    again = store(records, pages, make_run([9], [11]))
    assert found(table.copy()) == []
    assert told(Records(table.copy(), PAGE_SIZE).recover()) == told([run, again])


def test_the_checksum_of_a_frame_is_seeded_by_the_boundary(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    run = store(records, pages, make_run([3], [7]))
    leave_tail(records, pages, run.digests[0], FRAMES)
    assert records.checksum(4) == page_checksum(pages[4].data, run.digests[0])


def test_a_restart_gets_back_until_when_a_tail_is_retained(table: np.ndarray, pages: np.ndarray) -> None:
    """A process that dies has recorded the first of its frames; its frames of another tail are not retained."""
    records, frames = Records(table, PAGE_SIZE), np.array(FRAMES, dtype=np.int32)
    run = store(records, pages, make_run([3], [7]))
    for num_recorded, until_s in ((2, 0), (3, 50)):
        leave_tail(records, pages, run.digests[0], FRAMES)
        records.retain(frames[:num_recorded], np.full(num_recorded, 50))
        after = Records(table.copy(), PAGE_SIZE)
        after.recover()
        assert [tail.retained_until_s for tail in after.tails()] == [until_s]
        records.free(frames)
