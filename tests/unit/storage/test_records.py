"""Records of host pages: their life, and what a restart finds."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.storage.checksums import page_checksum
from hiserve.cache.storage.records import NO_CHECKSUM, PageState, Records, record_type
from hiserve.core.transfers import PageRun
from tests.helpers.host import PAGE_BYTES, PAGE_SIZE, TENANTS, content, fill, make_run, seal, store, told


@pytest.fixture
def table() -> np.ndarray:
    return np.zeros(16, dtype=record_type(PAGE_SIZE))


@pytest.fixture
def pages() -> np.ndarray:
    return np.zeros((16, PAGE_BYTES), dtype=np.uint8)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_counters_of_a_record_are_aligned(page_size: int) -> None:
    kind = record_type(page_size)
    assert kind.itemsize % 8 == 0
    assert [kind.fields[name][1] % 8 for name in ("state", "checksum", "retained_until_s")] == [0, 0, 0]


def test_a_page_is_free_then_writing_then_valid_then_free(table: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    run = make_run([3, 5], [7, 8])
    assert records.state(3) is PageState.FREE
    records.begin(run)
    assert records.state(3) is records.state(5) is PageState.WRITING
    records.finish(run.pages)
    assert records.state(3) is records.state(5) is PageState.VALID
    assert records.digest(5) == run.digests[1]
    records.free(run.pages)
    assert records.state(3) is records.state(5) is PageState.FREE


def test_pages_in_use_are_counted_from_the_start_of_a_process(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    run = make_run([3, 5, 7], [7, 8, 9])
    store(records, pages, run)
    records.begin(make_run([9], [1]))
    assert records.num_used == 4
    records.free(run.pages[2:])
    assert records.num_used == 3
    after = Records(table, PAGE_SIZE)
    after.recover()
    assert after.num_used == 2
    after.clear()
    assert after.num_used == 0


def test_a_failed_copy_frees_its_pages(table: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    run = make_run([3], [7])
    records.begin(run)
    records.free(run.pages)
    records.begin(run)


def test_no_page_is_begun_finished_or_freed_twice(table: np.ndarray) -> None:
    """TC-42."""
    records = Records(table, PAGE_SIZE)
    run = make_run([3, 5], [7, 8])
    with pytest.raises(AssertionError):
        records.finish(run.pages)
    with pytest.raises(AssertionError):
        records.free(run.pages)
    records.begin(run)
    with pytest.raises(AssertionError):
        records.begin(make_run([5], [1]))
    records.finish(run.pages)
    with pytest.raises(AssertionError):
        records.finish(run.pages[:1])
    with pytest.raises(AssertionError):
        records.begin(make_run([5], [1]))


def test_page_zero_is_never_used(table: np.ndarray) -> None:
    with pytest.raises(AssertionError, match="page 0"):
        Records(table, PAGE_SIZE).begin(make_run([0], [7]))


def test_a_restart_gets_back_what_was_begun(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    run = store(records, pages, make_run([9, 2, 4], [1, 2, 3], draft_revision=2**64 - 1))
    (found,) = Records(table.copy(), PAGE_SIZE).recover()
    assert found.pages.tolist() == [9, 2, 4]
    assert found.pages.dtype == np.int32
    assert (found.namespace, found.parent, found.digests, found.key) == (
        run.namespace,
        run.parent,
        run.digests,
        run.key,
    )
    assert found.draft_revision == 2**64 - 1


@pytest.mark.parametrize("page_size", [1, 3])
def test_a_restart_knows_pages_of_odd_sizes(page_size: int, pages: np.ndarray) -> None:
    table = np.zeros(16, dtype=record_type(page_size))
    run = store(Records(table, page_size), pages, make_run([2, 1], [5, 6], page_size=page_size))
    assert told(Records(table, page_size).recover()) == told([run])


def test_a_restart_gets_parents_before_children_and_every_branch(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    trunk = store(records, pages, make_run([15, 14], [1, 2]))
    left = store(records, pages, make_run([3, 2], [3, 4], parent=trunk.digests[1]))
    right = store(records, pages, make_run([1], [5], parent=trunk.digests[1]))
    other = store(records, pages, make_run([8], [1], namespace=TENANTS[1]))
    runs = Records(table.copy(), PAGE_SIZE).recover()
    assert told(runs) == told([trunk, left, right, other])
    assert {tuple(run.pages.tolist()) for run in runs} == {(15, 14), (3, 2), (1,), (8,)}
    seen = set(TENANTS)
    for run in runs:
        assert run.parent in seen
        seen.update(run.digests)


def test_a_run_ends_where_the_draft_revision_changes(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    first = store(records, pages, make_run([1], [1], draft_revision=1))
    second = store(records, pages, make_run([2], [2], parent=first.digests[0], draft_revision=2))
    assert told(Records(table, PAGE_SIZE).recover()) == told([first, second])


def test_a_restart_gets_back_until_when_pages_are_retained(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    store(records, pages, make_run([9, 2, 4], [1, 2, 3]))
    records.retain(np.array([9, 2], dtype=np.int32), np.array([50, 50]))
    assert [(run.pages.tolist(), run.retained_until_s) for run in Records(table.copy(), PAGE_SIZE).recover()] == [
        ([9, 2], 50),
        ([4], 0),
    ]
    records.free(np.array([9, 2, 4], dtype=np.int32))
    store(records, pages, make_run([9], [5]))
    (run,) = Records(table, PAGE_SIZE).recover()
    assert run.retained_until_s == 0, "the page holds another prefix"


def test_a_restart_drops_what_has_no_checksum_and_what_hangs_below_it(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    kept = store(records, pages, make_run([1], [1]))
    middle = make_run([2], [2], parent=kept.digests[0])
    records.begin(middle)
    fill(pages, middle)
    records.finish(middle.pages)
    store(records, pages, make_run([3], [3], parent=middle.digests[0]))
    found = Records(table, PAGE_SIZE)
    assert told(found.recover()) == told([kept])
    assert [found.state(page) for page in (1, 2, 3)] == [PageState.VALID, PageState.FREE, PageState.FREE]


def test_a_restart_frees_pages_that_were_being_written(table: np.ndarray) -> None:
    Records(table, PAGE_SIZE).begin(make_run([6], [1]))
    found = Records(table, PAGE_SIZE)
    assert found.recover() == []
    found.begin(make_run([6], [2]))


def test_a_restart_keeps_one_of_two_copies(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    store(records, pages, make_run([4], [1]))
    store(records, pages, make_run([7], [1]))
    (run,) = Records(table, PAGE_SIZE).recover()
    assert run.pages.tolist() == [4]
    assert table["state"][7] == PageState.FREE


@pytest.mark.parametrize("field", ["namespace", "parent", "digest", "tokens"])
def test_a_restart_drops_a_record_with_a_flipped_bit(table: np.ndarray, pages: np.ndarray, field: str) -> None:
    records = Records(table, PAGE_SIZE)
    run = store(records, pages, make_run([1, 2], [1, 2]))
    table[field][2][1] ^= 4
    (found,) = Records(table, PAGE_SIZE).recover()
    assert told([found]) == {1: told([run])[1]}


def test_clear_forgets_everything(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    store(records, pages, make_run([1, 2], [1, 2]))
    records.clear()
    assert Records(table.copy(), PAGE_SIZE).recover() == []
    records.begin(make_run([2], [9]))


def store_unsealed(records: Records, pages: np.ndarray, run: PageRun) -> PageRun:
    """Takes a run through its life to VALID."""
    records.begin(run)
    fill(pages, run)
    records.finish(run.pages)
    return run


def test_a_checksum_computed_for_an_earlier_life_of_a_page_is_dropped(table: np.ndarray, pages: np.ndarray) -> None:
    """The page is freed and used again, even for the same prefix, while its bytes are read."""
    records = Records(table, PAGE_SIZE)
    run = make_run([3], [7])
    records.begin(run)
    records.finish(run.pages)
    unsealed, generations, _ = records.unsealed(np.array([2, 3], dtype=np.int32))
    assert unsealed.tolist() == [3]
    records.free(run.pages)
    records.begin(run)
    fill(pages, run)
    records.finish(run.pages)
    other = store_unsealed(records, pages, make_run([5], [8]))
    ours, others_lives, _ = records.unsealed(other.pages)
    both = np.concatenate((unsealed, ours))
    assert records.seal(both, np.concatenate((generations, others_lives)), [12345, 6789]).tolist() == [5]
    assert (records.checksum(3), records.checksum(5)) == (NO_CHECKSUM, 6789)
    assert seal(records, pages, 3)


def test_a_page_begun_again_has_no_checksum(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    run = store(records, pages, make_run([3], [7]))
    records.free(run.pages)
    records.begin(make_run([3], [8]))
    records.finish(run.pages)
    assert records.checksum(3) == NO_CHECKSUM
    assert Records(table, PAGE_SIZE).recover() == []


def test_only_valid_pages_without_checksum_want_one(table: np.ndarray, pages: np.ndarray) -> None:
    records = Records(table, PAGE_SIZE)
    run = make_run([3], [7])
    assert not records.unsealed(run.pages)[0].size
    records.begin(run)
    assert not records.unsealed(run.pages)[0].size
    records.finish(run.pages)
    assert records.unsealed(run.pages)[0].tolist() == [3] and records.unsealed(run.pages)[2] == run.digests
    assert seal(records, pages, 3)
    assert not records.unsealed(run.pages)[0].size


def test_a_checksum_is_of_the_bytes_and_of_the_prefix() -> None:
    one, two = make_run([1], [1]).digests[0], make_run([1], [2]).digests[0]
    page = content(one)
    assert page_checksum(page.data, one) == page_checksum(page.copy().data, one) != NO_CHECKSUM
    assert page_checksum(page.data, one) != page_checksum(page.data, two)
    garbled = page.copy()
    garbled[-1] ^= 1
    assert page_checksum(garbled.data, one) != page_checksum(page.data, one)
