"""Window pages: free ones and held ones partition the pool, and tails go least recently used first."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hiserve.cache.index.nodes import Tail, make_root
from hiserve.cache.index.tail_pool import TailMemory, TailPool, TailSizes
from hiserve.core.window_pool import WindowLimits, tail_interval

ANY = 0


class Pools:
    """The device part of tails alone."""

    def __init__(self, pool: TailPool) -> None:
        self.pool = pool

    def leave_device(self, tail: Tail) -> None:
        pages, tail.pages = tail.pages, None
        assert pages is not None
        self.pool.forget(tail, pages)

    def leave_host(self, tail: Tail) -> None:
        raise AssertionError("no tail is on the host")


def keep(pool: TailPool, pages: np.ndarray, last_used: int) -> Tail:
    tail = Tail(make_root(b""), 1, last_used, Pools(pool))
    tail.pages = pages.copy()
    pool.keep(tail, pages)
    return tail


def touch(pool: TailPool, tail: Tail, last_used: int) -> None:
    tail.last_used = last_used
    pool.reorder(tail)


def wish(count: int) -> np.ndarray:
    return np.full(count, ANY, dtype=np.int32)


@pytest.mark.parametrize("seed", range(4))
def test_free_and_held_pages_partition_the_pool_whatever_rows_and_tails_do(seed: int) -> None:
    """H1, against lists of every holder."""
    rng = np.random.default_rng(seed)
    pool = TailPool(40, page_size=4)
    rows: list[np.ndarray] = []
    tails: list[tuple[Tail, list[int]]] = []
    for _ in range(600):
        match int(rng.integers(5)):
            case 0:
                if sum(row.size for row in rows) <= 28:
                    rows.append(pool.allocate(wish(int(rng.integers(1, 10)))))
            case 1 if rows:
                pool.drop(rows.pop(int(rng.integers(len(rows)))))
            case 2 if rows:
                row = rows[int(rng.integers(len(rows)))]
                tails.append((keep(pool, row[-3:], int(rng.integers(1, 90))), row[-3:].tolist()))
            case 3 if tails:
                tail, pages = tails[int(rng.integers(len(tails)))]
                if tail.pages is not None:
                    pool.hold(tail.pages)
                    rows.append(np.array(pages, dtype=np.int32))
            case 4 if tails:
                tails[int(rng.integers(len(tails)))][0].close()
        held = Counter(page for row in rows for page in row.tolist())
        held.update(page for tail, pages in tails if tail.is_open for page in pages)
        assert {page: int(pool.num_refs[page]) for page in np.flatnonzero(pool.num_refs)} == dict(held)
        of_tails = {page for tail, pages in tails if tail.is_open for page in pages}
        of_rows = {page for row in rows for page in row.tolist()}
        stats = pool.stats()
        assert (stats.num_pages, stats.num_free, stats.num_evictable) == (39, pool.num_free, len(of_tails - of_rows))
        assert (stats.num_tails, stats.num_evicted_tails > 0) == (pool.num_tails, stats.num_evicted > 0)
        assert pool.num_free == 39 - len(held) and pool.num_tails == sum(tail.is_open for tail, _ in tails)
        pool.check()


def test_the_least_recently_used_tails_go_first_and_only_when_pages_are_short() -> None:
    pool = TailPool(10, page_size=4)
    tails = []
    for last_used in (3, 1, 2):
        row = pool.allocate(wish(3))
        tails.append(keep(pool, row, last_used))
        pool.drop(row)
    assert pool.num_free == 0
    touch(pool, tails[1], 4)
    pool.allocate(wish(2))
    assert [tail.is_open for tail in tails] == [True, True, False] and pool.num_free == 1
    touch(pool, tails[1], 0)  # the cold end
    pool.allocate(wish(2))
    assert [tail.is_open for tail in tails] == [True, False, False]
    assert (pool.stats().num_evicted_tails, pool.stats().num_evicted) == (2, 6)
    tails[0].close()
    assert (pool.stats().num_evicted_tails, pool.stats().num_tails) == (2, 0), "closed, and for no row"


def test_sweeps_keep_the_order_and_lose_no_tail() -> None:
    pool = TailPool(10, page_size=4)
    tails = []
    for last_used in range(3):
        row = pool.allocate(wish(3))
        tails.append(keep(pool, row, last_used))
        pool.drop(row)
    for last_used in range(1024, 3, -1):  # falling: entries out of date are last; the last use sweeps them
        touch(pool, tails[last_used % 3], last_used)
    for num_closed, coldest in enumerate((1, 2, 0), 1):
        pool.allocate(wish(3))
        assert not tails[coldest].is_open and pool.num_tails == 3 - num_closed


def test_a_pool_that_rows_exceed_says_so() -> None:
    pool = TailPool(6, page_size=4)
    pool.allocate(wish(4))
    with pytest.raises(AssertionError, match="2 pages wanted, 1 free beside those of rows"):
        pool.allocate(wish(2))
    with pytest.raises(AssertionError, match="have no holder"):
        pool.hold(np.array([5], dtype=np.int32))


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_the_bound_of_a_row_is_attained_and_not_exceeded(page_size: int) -> None:
    """H12, by every length of a row that decodes: from the first page that its next token sees to its last draft."""
    for num_draft in range(6):
        for depth in (0, 1):
            left = []
            for window in range(1, 5 * page_size + 4):
                limits = WindowLimits(
                    window=window, page_size=page_size, num_draft=num_draft, depth=depth, max_batched_tokens=1
                )
                held = []
                for settled in range(8 * page_size + 2 * window, 10 * page_size + 2 * window):
                    first = (settled // page_size * page_size - window + 1) // page_size
                    last = settled + (depth + 1) * (num_draft + 1) + num_draft - 1
                    held.append(last // page_size - first + 1)
                left.append(limits.row_pages - max(held))
            ahead = (depth + 1) * (num_draft + 1) + num_draft
            assert min(left) == max(left) == (ahead % page_size == 1 % page_size), (num_draft, depth)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_draft", [0, 3])
@pytest.mark.parametrize("depth", [0, 1])
def test_two_rows_that_share_the_prompt_tokens_in_flight_keep_within_their_bounds(
    page_size: int, num_draft: int, depth: int
) -> None:
    """H12, by every start of both and every split of the tokens between them."""
    for window in (1, 5, 9):
        for batched in (4, 7, 16):
            limits = WindowLimits(
                window=window, page_size=page_size, num_draft=num_draft, depth=depth, max_batched_tokens=batched
            )
            total = (depth + 1) * batched
            most = [
                max(
                    -(-(start + count + num_draft) // page_size)
                    - (start // page_size * page_size - window + 1) // page_size
                    for start in range(4 * (window + page_size), 4 * (window + page_size) + page_size)
                )
                for count in range(1, total)
            ]
            promised = 2 * limits.promised_pages(10**6) + limits.step_pages
            assert max(map(sum, zip(most, reversed(most), strict=True))) <= promised, (window, batched)


def test_rows_whose_prompt_tokens_start_and_end_within_pages_keep_within_their_bounds() -> None:
    """H12: four rows share the tokens of a step evenly; each begins in the last place of a page, and drafts behind its part."""
    window, page_size, num_draft, count, num_rows = 5, 16, 7, 11, 4
    limits = WindowLimits(
        window=window, page_size=page_size, num_draft=num_draft, depth=0, max_batched_tokens=num_rows * count
    )
    held = -(-(page_size - 1 + count + num_draft) // page_size) - (1 - window) // page_size
    assert num_rows * held <= num_rows * limits.promised_pages(10**6) + limits.step_pages
    assert num_rows * held > num_rows * limits.row_pages + limits.step_pages  # what a row that decodes holds is too few


def test_tails_of_a_prompt_are_as_far_apart_as_their_bytes_ask_for() -> None:
    assert tail_interval(3 * 2**20, 24_576, 16) == 1024
    assert tail_interval(1, 10**6, 16) == 16


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        (TailSizes(window_pages=9, frames_per_page=2), {0: 0, 3: -1, 4: 2}),
        (TailSizes(snapshot_slots=9, frames_per_snapshot=3), {0: -1, 2: -1, 3: 0, 4: -1}),
        (
            TailSizes(window_pages=9, frames_per_page=2, snapshot_slots=9, frames_per_snapshot=3),
            {2: -1, 3: 0, 4: -1, 7: 2},
        ),
    ],
)
def test_frames_that_are_no_tail_are_known_by_their_number(sizes: TailSizes, counts: dict[int, int]) -> None:
    """H10: those of a former process are adopted whole."""
    memory = TailMemory(sizes, 4, has_host=True)
    assert {count: memory.num_pages_in(count) for count in counts} == counts
