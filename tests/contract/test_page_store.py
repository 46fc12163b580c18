"""What every page store does, whatever it is made of."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hiserve.cache.storage import page_tags
from hiserve.cache.storage.file_store import FileStore
from hiserve.cache.storage.resp import Endpoint
from hiserve.cache.storage.store import HEADER_BYTES, PageStore
from hiserve.cache.storage.valkey_store import ValkeyStore
from tests.helpers.host import make_keys
from tests.helpers.sim_store import SimStore
from tests.helpers.stores import PAGE_BYTES, blanks, page, pages
from tests.helpers.valkey import SECRET, valkey
from tests.helpers.waiting import PATIENCE_S

MAKERS: dict[str, Callable[[Path], PageStore]] = {
    "file": lambda directory: FileStore(directory / "store", 10**9),
    "sim": lambda directory: SimStore(),
}
VALKEYS = ("valkey", "two valkeys")
KEYS = make_keys("x", 12)
STRANGE = make_keys("y", 12)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Endpoint]]:
    folder = tmp_path_factory.mktemp("valkey")
    with valkey(folder) as one, valkey(folder) as other:
        yield [one, other]


@pytest.fixture(params=[*MAKERS, *VALKEYS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PageStore]:
    made: PageStore
    if request.param in VALKEYS:
        servers = request.getfixturevalue("servers")
        made = ValkeyStore(servers[: 1 + VALKEYS.index(request.param)], SECRET, PATIENCE_S)
        made.clear()
    else:
        made = MAKERS[request.param](tmp_path)
    yield made
    made.close()


def test_a_new_store_holds_nothing(store: PageStore) -> None:
    assert store.exists(KEYS) == 0
    assert store.get(KEYS, blanks(12)) == 0
    assert store.stats().num_pages == store.stats().num_bytes == 0


def test_pages_come_back_as_they_were_put(store: PageStore) -> None:
    assert store.put(KEYS, pages(KEYS)) == 12
    buffers = blanks(12)
    assert store.exists(KEYS) == 12
    assert store.get(KEYS, buffers) == 12
    assert [bytes(buffer) for buffer in buffers] == [bytes(page(key)) for key in KEYS]


def test_what_was_put_may_change_afterwards(store: PageStore) -> None:
    given = pages(KEYS[:1])
    store.put(KEYS[:1], given)
    given[0][:] = bytes(PAGE_BYTES)
    buffers = blanks(1)
    assert store.get(KEYS[:1], buffers) == 1
    assert buffers[0] == page(KEYS[0])


def test_only_the_prefix_up_to_the_first_missing_page_counts(store: PageStore) -> None:
    there = KEYS[:3] + KEYS[4:]
    store.put(there, pages(there))
    buffers = blanks(12)
    assert store.exists(KEYS) == 3
    assert store.get(KEYS, buffers) == 3
    assert buffers[:3] == pages(KEYS[:3])
    assert store.exists(KEYS[4:]) == 8
    assert store.exists([STRANGE[0], *KEYS]) == 0


def test_nothing_asked_is_nothing_done(store: PageStore) -> None:
    assert store.exists([]) == store.get([], []) == store.put([], []) == 0


def test_a_page_that_is_there_is_not_written_again(store: PageStore) -> None:
    store.put(KEYS[:4], pages(KEYS[:4]))
    assert store.put(KEYS, pages(KEYS)) == 12
    assert store.stats().num_stored == 12
    assert store.stats().num_pages == 12


def test_pages_before_others_need_not_be_there(store: PageStore) -> None:
    assert store.put(KEYS[3:4], pages(KEYS[3:4]), KEYS[:3]) == store.exists(KEYS[3:4]) == 1
    assert store.get(KEYS[3:4], blanks(1), STRANGE) == 1 and store.exists(KEYS[:1]) == 0


def test_counts_are_of_pages(store: PageStore) -> None:
    store.put(KEYS[:5], pages(KEYS[:5]))
    store.get(KEYS[:7], blanks(7))
    stats = store.stats()
    assert (stats.num_stored, stats.num_hits, stats.num_misses) == (5, 5, 2)
    assert (stats.num_refused, stats.num_corrupt, stats.num_errors, stats.last_error) == (0, 0, 0, "")
    assert stats.num_bytes >= 5 * PAGE_BYTES


def test_a_buffer_of_another_size_is_a_miss(store: PageStore) -> None:
    """TC-61: the page size of whoever wrote it is not the reader's."""
    for num_bytes in (PAGE_BYTES - 1, PAGE_BYTES + 1, 2 * PAGE_BYTES):
        store.put(KEYS[:1], pages(KEYS[:1]))
        assert store.get(KEYS[:1], blanks(1, num_bytes)) == 0
    assert store.stats().num_corrupt == 3


def test_clear_removes_everything_and_says_how_much(store: PageStore) -> None:
    store.put(KEYS, pages(KEYS))
    assert store.clear() == 12
    assert store.exists(KEYS) == store.stats().num_pages == store.stats().num_bytes == store.clear() == 0
    assert store.put(KEYS[:2], pages(KEYS[:2])) == 2
    assert store.exists(KEYS) == 2


def test_a_closed_store_misses(store: PageStore) -> None:
    store.put(KEYS[:4], pages(KEYS[:4]))
    store.close()
    assert store.exists(KEYS) == 0
    assert store.get(KEYS, blanks(12)) == 0
    assert store.put(KEYS[4:], pages(KEYS[4:])) == 0
    store.close()


def test_threads_may_use_it_at_once(store: PageStore) -> None:
    """Each page is written by several threads and read by others; nobody ever gets wrong bytes."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    wrong: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(seed + number)
        for _ in range(60):
            start = rng.randrange(12)
            keys = KEYS[start : start + rng.randrange(1, 5)]
            if rng.random() < 0.4:
                if store.put(keys, pages(keys)) != len(keys):
                    wrong.append("put")
            else:
                buffers = blanks(len(keys))
                count = store.get(keys, buffers)
                if buffers[:count] != pages(keys[:count]):
                    wrong.append("get")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = store.stats()
    assert (stats.num_corrupt, stats.num_errors) == (0, 0)
    assert stats.num_pages >= store.exists(KEYS)
    header = page_tags.HEADER_BYTES if isinstance(store, ValkeyStore) else HEADER_BYTES
    assert stats.num_bytes == stats.num_pages * (header + PAGE_BYTES)
