"""Requests that wait for a resume point from a store: history and tail come whole, or the wait ends."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.cache.index.prefix_cache import TailSizes, Tier
from hiserve.core.transfers import CopyKind, StoreLookup
from hiserve.engine.store_prefetch import MAX_PAGES, MAX_WAIT_S
from tests.helpers.tiers import PAGE_SIZE, TENANT, backed, prompt, serve, store
from tests.unit.engine.store_desk import TIMEOUT_S, Desk

WINDOW_PAGES, FRAMES = 2, 3
NUM_FRAMES = WINDOW_PAGES * FRAMES
LONG = range(1, MAX_PAGES + 11)


def desk_of(**options: Any) -> Desk:
    """A tail of two window pages takes six frames."""
    sizes = TailSizes(window_pages=40, frames_per_page=FRAMES, window=WINDOW_PAGES * PAGE_SIZE)
    return Desk(tails=sizes, **options)


def resumable(desk: Desk, *pages: int) -> int:
    match = desk.cache.match(TENANT, prompt(*pages))
    return (match.num_tokens + match.num_host_tokens) // PAGE_SIZE


def test_history_comes_in_pieces_and_the_tail_with_the_last() -> None:
    desk = desk_of(num_host_pages=400)
    desk.fetch(1, *LONG)
    (first,) = desk.copies.values()
    assert (first.host_pages.size, first.image) == (MAX_PAGES, None)
    desk.end()
    assert desk.is_awaited(1) and resumable(desk, *LONG) == 0
    desk.send()
    (last,) = desk.copies.values()
    assert last.kind is CopyKind.PREFETCH and last.host_pages.size == 10 and last.image is not None
    assert last.image.frames.size == NUM_FRAMES and last.run is not None and last.image.digest == last.run.digests[-1]
    desk.end()
    desk.send()
    assert not desk.is_awaited(1) and resumable(desk, *LONG) == len(LONG)
    assert desk.prefetcher.num_stored_tokens(1) == len(LONG) * PAGE_SIZE
    assert desk.cache_counters.stats().prefetches.num_fulfilled == len(LONG) + NUM_FRAMES
    desk.prefetcher.drop(1)
    desk.check()


def test_a_tail_that_does_not_arrive_ends_the_wait_and_comes_alone_for_another() -> None:
    desk = desk_of()
    desk.fetch(1, 5, 6, 7)
    desk.end(num_pages=3)
    desk.send()
    assert not desk.is_awaited(1) and resumable(desk, 5, 6, 7) == 0 and not desk.copies
    assert desk.unfulfilled()["not_delivered"] == NUM_FRAMES
    for uid in (2, 3):
        desk.add(uid, 5, 6, 7)
    lookups, _ = desk.prefetcher.take()
    assert [(each.num_here, each.needs_tail, len(each.digests)) for each in lookups] == [(3, True, 3)] * 2
    for uid in (2, 3):
        desk.answer(uid, 3)
    desk.send()
    (copy,) = desk.copies.values()  # of both
    assert copy.run is None and copy.image is not None and copy.num_host_pages == NUM_FRAMES
    assert copy.image.digest == lookups[0].digests[-1]
    desk.end()
    desk.send()
    assert resumable(desk, 5, 6, 7) == 3 and not desk.is_awaited(2) and not desk.is_awaited(3)
    for uid in (1, 2, 3):
        desk.prefetcher.drop(uid)
    desk.check()


def test_a_resume_point_before_the_end_of_what_is_here_is_fetched() -> None:
    desk = desk_of()
    desk.fetch(1, 5, 6, 7)
    desk.end(num_pages=3)
    desk.fetch(2, 5, 6)
    desk.add(3, 5, 6, 7, 8)
    desk.send()
    desk.answer(3, 2)
    desk.send()
    (copy,) = desk.copies.values()
    assert copy.run is None
    desk.end()
    desk.send()
    assert resumable(desk, 5, 6, 7, 8) == 2 and not desk.is_awaited(3)
    for uid in (1, 2, 3):
        desk.prefetcher.drop(uid)
    desk.check()


@pytest.mark.parametrize(("fetch_s", "is_begun"), [(0.9 * TIMEOUT_S / 9, True), (1.1 * TIMEOUT_S / 9, False)])
def test_a_resume_point_that_cannot_be_in_time_as_a_whole_is_not_begun(fetch_s: float, is_begun: bool) -> None:
    desk = desk_of()
    desk.measure(fetch_s=fetch_s, prefill_s=1e3)
    desk.fetch(1, 5, 6, 7)
    assert bool(desk.copies) == is_begun == desk.is_awaited(1)
    if is_begun:
        desk.end()
    else:
        assert desk.unfulfilled() == {"too_late": 3 + NUM_FRAMES}
    desk.prefetcher.drop(1)
    desk.check()


@pytest.mark.parametrize(
    ("pages_in_time", "num_host_pages", "reason", "num_pages", "num_frames"),
    [(10, 600, "too_late", 2, 6), (600, 12, "host_full", 2, 6), (5, 600, "too_late", 1, 3)],
)
def test_the_resume_point_before_comes_in_place_of_one_that_cannot(
    pages_in_time: int, num_host_pages: int, reason: str, num_pages: int, num_frames: int
) -> None:
    """Five pages and six frames are too many. The tail behind one page has one window page."""
    desk = desk_of(num_host_pages=num_host_pages)
    desk.measure(fetch_s=TIMEOUT_S / (pages_in_time + 0.5), prefill_s=1e3)
    desk.add(1, 5, 6, 7, 8, 9)
    desk.send()
    desk.answer(1, 1, 2, 5)
    desk.send()
    desk.send()
    (copy,) = desk.copies.values()
    assert (copy.host_pages.size, copy.num_host_pages) == (num_pages, num_pages + num_frames) and desk.is_awaited(1)
    assert desk.unfulfilled() == {reason: 11 - copy.num_host_pages}
    assert desk.prefetcher.may_have_more(1, 4 * PAGE_SIZE)
    desk.end()
    desk.send()
    assert resumable(desk, 5, 6, 7, 8, 9) == num_pages and not desk.is_awaited(1) and not desk.copies
    desk.prefetcher.drop(1)
    desk.check()


def test_the_tail_before_comes_alone_where_its_history_is_here() -> None:
    desk = desk_of()
    desk.fetch(1, 5, 6, 7)
    desk.end(num_pages=3)
    for _ in range(9):  # the first fetch took no time
        desk.measure(fetch_s=TIMEOUT_S / 7.5, prefill_s=1e3)
    desk.add(2, 5, 6, 7, 8, 9)
    desk.send()
    desk.answer(2, 3, 5)
    desk.send()
    (copy,) = desk.copies.values()
    assert copy.run is None and copy.num_host_pages == NUM_FRAMES
    desk.end()
    assert resumable(desk, 5, 6, 7, 8, 9) == 3
    for uid in (1, 2):
        desk.prefetcher.drop(uid)
    desk.check()


def test_a_resume_point_that_came_meanwhile_is_not_stepped_back_to() -> None:
    desk = desk_of(policy="wait")
    desk.add(1, 5, 6, 7)
    desk.add(2, 5, 6, 7, 8, 9)
    desk.send()
    desk.answer(1, 2)
    desk.send()
    desk.end()
    for _ in range(9):  # the first fetch took no time
        desk.measure(fetch_s=MAX_WAIT_S / 8.5, prefill_s=1e-6)
    desk.answer(2, 1, 2, 5)
    desk.send()
    assert not desk.copies and not desk.is_awaited(2)
    assert desk.unfulfilled() == {"too_late": 3 + NUM_FRAMES}
    for uid in (1, 2):
        desk.prefetcher.drop(uid)
    desk.check()


def fetched(desk: Desk, uid: int) -> list[int]:
    """Lets the copies of a step end; returns the host pages of prefetches."""
    desk.send()
    copies = [copy for copy in desk.copies.values() if copy.kind is CopyKind.PREFETCH]
    for op in list(desk.copies):
        desk.end(op)
    assert desk.is_awaited(uid) or copies
    return [copy.num_host_pages for copy in copies]


@pytest.mark.parametrize("is_coming", [True, False])
def test_a_tail_whose_history_the_device_has_comes_behind_it(is_coming: bool) -> None:
    desk = desk_of()
    desk.cache.release(serve(desk.cache, 5, 6, 7))
    if not is_coming:  # as where a request does not offload what it computes
        store(desk.cache)
        desk.cache.flush(Tier.HOST)
        assert not desk.cache.has_offloads
    desk.add(1, 5, 6, 7, 8)
    desk.send()
    desk.answer(1, 3)
    assert fetched(desk, 1) == []
    copies = desk.cache.begin_offloads(100)
    assert [copy.host_pages.size for copy in copies] == [3] and fetched(desk, 1) == []
    desk.cache.complete(copies[0].op, ok=True)
    assert fetched(desk, 1) == [NUM_FRAMES]
    assert resumable(desk, 5, 6, 7, 8) == 3
    while desk.cache.store.has_uploads:
        desk.send()
        for op in list(desk.copies):
            desk.end(op)
    desk.prefetcher.drop(1)
    desk.check()


@pytest.mark.parametrize("has_earlier", [True, False])
def test_nobody_waits_for_a_tail_whose_history_finds_no_room_on_the_host(has_earlier: bool) -> None:
    """The host has two pages of the history, and no room for the third."""
    desk = desk_of(num_host_pages=11)  # one is reserved: room for nine
    backed(desk.cache, 5, 6)
    while desk.cache.store.has_uploads:
        desk.send()
        for op in list(desk.copies):
            desk.end(op)
    held = desk.cache.tiers.allocate_host(7 - NUM_FRAMES)
    desk.cache.release(serve(desk.cache, 5, 6, 7))
    lock = serve(desk.cache, 5, 6)
    desk.add(1, 5, 6, 7, 8)
    desk.send()
    desk.answer(1, *([2, 3] if has_earlier else [3]))
    desk.send()
    desk.send()
    assert desk.is_awaited(1) == has_earlier
    assert [copy.num_host_pages for copy in desk.copies.values() if copy.kind is CopyKind.PREFETCH] == (
        [NUM_FRAMES] if has_earlier else []
    )
    assert desk.unfulfilled() == ({} if has_earlier else {"not_backed": NUM_FRAMES})
    for op in list(desk.copies):
        desk.end(op)
    desk.prefetcher.drop(1)
    desk.cache.release(lock)
    desk.cache.tiers.free_host(held)


def test_no_history_is_waited_for_that_a_full_host_does_not_take() -> None:
    """Pages of the device alone come there as they are evicted."""
    desk = desk_of(num_host_pages=20)
    backed(desk.cache, *range(100, 117))
    while desk.cache.store.has_uploads:
        desk.send()
        for op in list(desk.copies):
            desk.end(op)
    assert desk.cache.host.num_unused == 0 and desk.cache.host.num_available > 3 + NUM_FRAMES
    lock = serve(desk.cache, 5, 6, 7)
    desk.add(1, 5, 6, 7, 8)
    desk.send()
    desk.answer(1, 3)
    desk.send()
    assert not desk.is_awaited(1) and desk.unfulfilled() == {"not_backed": NUM_FRAMES}
    desk.prefetcher.drop(1)
    desk.cache.release(lock)


@pytest.mark.parametrize(("prefill_s", "is_begun"), [(2.9, False), (3.1, True)])
def test_the_bytes_of_a_tail_weigh_against_the_tokens_that_it_saves(prefill_s: float, is_begun: bool) -> None:
    """Three pages of tokens take as long to compute as nine to fetch, or they are computed."""
    desk = desk_of()
    desk.measure(fetch_s=1e-3, prefill_s=prefill_s * 1e-3)
    desk.fetch(1, 5, 6, 7)
    assert bool(desk.copies) == is_begun
    if is_begun:
        desk.end()
    else:
        assert desk.unfulfilled() == {"not_worth_loading": 3 + NUM_FRAMES}
    desk.prefetcher.drop(1)
    desk.check()


def test_a_resume_point_that_is_too_large_for_the_host_is_not_begun() -> None:
    desk = desk_of(num_host_pages=9)
    desk.fetch(1, 5, 6, 7)
    desk.now_s += 0.1
    assert not desk.copies and not desk.is_awaited(1) and desk.unfulfilled() == {"host_full": 3 + NUM_FRAMES}
    desk.prefetcher.drop(1)
    desk.check()


def test_what_is_here_does_not_count_as_left_in_a_store_that_is_late() -> None:
    desk = desk_of()
    desk.fetch(1, 5, 6, 7)
    desk.end(num_pages=3)
    desk.add(2, 5, 6, 7)
    desk.send()
    desk.now_s += TIMEOUT_S
    assert not desk.is_awaited(2)
    desk.add(3, 5, 6, 7, 8)
    desk.answer(2, 3)
    assert desk.unfulfilled() == {"not_delivered": NUM_FRAMES, "store_behind": 1, "too_late": NUM_FRAMES}
    for uid in (1, 2, 3):
        desk.prefetcher.drop(uid)
    desk.check()


def test_a_tail_that_came_alone_is_not_the_next_to_leave_a_full_host() -> None:
    """Its history came before that of another prompt."""
    desk = desk_of(num_host_pages=21)  # two are reserved: room for eighteen
    desk.fetch(1, 5, 6, 7)
    desk.end(num_pages=3)
    for uid, pages in ((2, (8, 9)), (3, (5, 6, 7)), (4, (10,))):
        desk.fetch(uid, *pages)
        desk.end()
    assert [resumable(desk, *pages) for pages in ((5, 6, 7), (8, 9), (10,))] == [3, 0, 1]
    for uid in (1, 2, 3, 4):
        desk.prefetcher.drop(uid)
    desk.check()


def test_what_a_lookup_asks_says_what_is_here() -> None:
    desk = desk_of()
    desk.add(1, 5, 6, 7)
    ((lookup,), _) = desk.prefetcher.take()
    assert isinstance(lookup, StoreLookup) and (lookup.num_here, lookup.needs_tail) == (0, True)
    desk.answer(1, 0)
    assert not desk.is_awaited(1)
    desk.prefetcher.drop(1)
    desk.check()
