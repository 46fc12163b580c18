"""Requests that wait for a store: who waits how long, what is asked and fetched, and that nothing leaks."""

from __future__ import annotations

import pytest

from hiserve.cache.index.uploads import MAX_LOOKED
from hiserve.config.caching import StorePrefetch
from hiserve.core.transfers import CopyAck, CopyKind
from hiserve.engine.host_loads import MAX_SKIPPED
from hiserve.engine.store_prefetch import (
    GROWTH_S,
    MAX_LOOKUPS,
    MAX_PAGES,
    MAX_PREFETCHES,
    MAX_WAIT_S,
    POLL_S,
    STALL_S,
)
from tests.helpers.tiers import PAGE_SIZE, backed, cached, serve, squeeze, store
from tests.unit.engine.store_desk import NOT_DELIVERED, TIMEOUT_S, Desk


def test_without_a_store_nobody_is_asked_and_nobody_waits() -> None:
    desk = Desk(policy=None)
    desk.add(1, 5, 6)
    desk.send()
    assert not desk.asked
    assert not desk.is_awaited(1)
    desk.check()


def test_a_prefix_is_asked_for_then_fetched_then_found() -> None:
    desk = Desk()
    desk.add(1, 5, 6, 7)
    assert desk.is_awaited(1)
    desk.send()
    assert desk.asked == {1: 3}
    desk.answer(1, 2)
    assert desk.is_awaited(1)
    desk.send()
    (copy,) = desk.copies.values()
    assert copy.kind is CopyKind.PREFETCH
    assert copy.host_pages.size == 2
    assert copy.device_pages.size == 0
    assert desk.is_awaited(1)
    desk.end()
    desk.send()
    assert not desk.is_awaited(1)
    assert desk.prefetcher.num_stored_tokens(1) == 2 * PAGE_SIZE
    assert cached(desk.cache, 5, 6, 7) == (0, 2)
    desk.prefetcher.drop(1)
    assert desk.prefetcher.num_stored_tokens(1) == 0
    desk.check()


def test_only_what_is_not_here_is_asked_for() -> None:
    desk = Desk()
    backed(desk.cache, 5, 6)
    desk.add(1, 5, 6, 7, 8)
    desk.add(2, 5, 6)
    desk.send()
    assert desk.asked == {1: 2}
    assert not desk.is_awaited(2)


def test_a_store_that_has_nothing_keeps_nobody() -> None:
    desk = Desk("wait")
    desk.add(1, 5, 6)
    desk.send()
    desk.answer(1, 0)
    assert not desk.is_awaited(1)
    desk.send()
    desk.check()


@pytest.mark.parametrize(("policy", "limit_s"), [("timeout", TIMEOUT_S), ("wait", MAX_WAIT_S), ("best_effort", 0.0)])
@pytest.mark.parametrize("step", ["unasked", "asked", "found", "fetching"])
def test_tc_44_a_request_is_let_go_by_its_deadline_whatever_the_store_does(
    policy: StorePrefetch, limit_s: float, step: str
) -> None:
    desk = Desk(policy)
    desk.add(1, 5, 6)
    if step != "unasked":
        desk.send()
    if step in ("found", "fetching"):
        desk.answer(1, 2)
    if step == "fetching":
        desk.send()
    if limit_s:
        desk.now_s += limit_s - 0.01
        assert desk.is_awaited(1)
        desk.now_s += 0.02
    assert not desk.is_awaited(1)
    desk.prefetcher.drop(1)
    if step == "asked":
        desk.answer(1, 2)
    desk.send()
    if step == "fetching":
        desk.end()
    desk.check()


def test_best_effort_takes_what_has_come() -> None:
    desk = Desk("best_effort")
    desk.fetch(1, *range(5, 5 + MAX_PAGES + 3))
    assert not desk.is_awaited(1)
    desk.end()
    desk.send()  # the rest is on its way
    assert not desk.is_awaited(1)
    assert desk.prefetcher.num_stored_tokens(1) == MAX_PAGES * PAGE_SIZE
    desk.prefetcher.drop(1)
    desk.end()
    assert cached(desk.cache, *range(5, 5 + MAX_PAGES + 3)) == (0, MAX_PAGES)
    desk.check()


@pytest.mark.parametrize("step", ["unasked", "asked", "found", "fetching", "here"])
def test_tc_42_an_abort_at_any_step_gives_every_page_back_once(step: str) -> None:
    desk = Desk("wait")
    desk.add(1, 5, 6)
    if step != "unasked":
        desk.send()
    if step in ("found", "fetching", "here"):
        desk.answer(1, 2)
    if step in ("fetching", "here"):
        desk.send()
    if step == "here":
        desk.end()
    desk.prefetcher.drop(1)
    desk.send()
    if step == "unasked":
        assert not desk.asked
    if step == "asked":
        desk.answer(1, 2)
        desk.send()
    if step == "fetching":
        desk.end()
        assert cached(desk.cache, 5, 6) == (0, 0)
    assert not desk.copies
    desk.check()


def test_a_long_prefix_comes_in_pieces_that_can_be_used_at_once() -> None:
    pages = range(5, 5 + MAX_PAGES + 10)
    desk = Desk("wait")
    desk.fetch(1, *pages)
    assert next(iter(desk.copies.values())).host_pages.size == MAX_PAGES
    desk.end()
    assert cached(desk.cache, *pages) == (0, MAX_PAGES)
    desk.send()
    assert next(iter(desk.copies.values())).host_pages.size == 10
    assert desk.is_awaited(1)
    desk.end()
    desk.send()
    assert not desk.is_awaited(1)
    assert desk.prefetcher.num_stored_tokens(1) == (MAX_PAGES + 10) * PAGE_SIZE
    desk.check()


def test_what_the_store_has_lost_meanwhile_is_not_asked_for_again() -> None:
    desk = Desk("wait")
    desk.fetch(1, 5, 6, 7)
    desk.end(num_pages=1)
    desk.send()
    assert not desk.copies
    assert not desk.is_awaited(1)
    assert desk.prefetcher.num_stored_tokens(1) == PAGE_SIZE
    desk.check()


def test_requests_of_one_prefix_share_its_prefetch() -> None:
    desk = Desk("wait")
    desk.add(1, 5, 6, 7)
    desk.add(2, 5, 6, 8)
    desk.send()
    desk.answer(1, 3)
    desk.answer(2, 3)
    desk.send()
    assert [copy.host_pages.size for copy in desk.copies.values()] == [3]
    desk.prefetcher.drop(1)  # the other still wants it
    desk.end()
    assert cached(desk.cache, 5, 6, 7) == (0, 3)
    desk.send()
    assert [copy.host_pages.size for copy in desk.copies.values()] == [1]
    desk.end()
    desk.send()
    assert not desk.is_awaited(2)
    assert desk.prefetcher.num_stored_tokens(2) == 3 * PAGE_SIZE
    desk.check()


def two_that_want_one_prefetch() -> Desk:
    desk = Desk("wait")
    for uid in (1, 2):
        desk.add(uid, 5, 6, 7)
    desk.send()
    for uid in (1, 2):
        desk.answer(uid, 3)
    desk.send()
    return desk


def test_a_prefetch_that_fails_is_over_for_its_request_and_begun_again_for_another() -> None:
    desk = two_that_want_one_prefetch()
    desk.end(num_pages=0)
    assert not desk.is_awaited(1) and desk.is_awaited(2)
    desk.send()
    desk.end()
    desk.send()
    assert not desk.is_awaited(2) and desk.prefetcher.num_stored_tokens(2) == 3 * PAGE_SIZE
    desk.check()


def test_a_prefetch_that_brings_nothing_says_nothing_of_the_stores_speed() -> None:
    desk = Desk()
    desk.measure(fetch_s=0.3 * TIMEOUT_S, prefill_s=10 * TIMEOUT_S)
    before = desk.costs.num_in_time(100 * PAGE_SIZE, 0, TIMEOUT_S)
    desk.fetch(1, 5, 6)
    (op,) = desk.copies
    desk.copies.clear()
    desk.prefetcher.complete([CopyAck(op, NOT_DELIVERED, seconds=100 * TIMEOUT_S, num_pages=0)])
    assert desk.costs.num_in_time(100 * PAGE_SIZE, 0, TIMEOUT_S) == before > 0
    desk.check()


@pytest.mark.parametrize("num_found", [0, 1, 3])
def test_an_answer_that_comes_after_the_wait_is_counted_and_begins_nothing(num_found: int) -> None:
    """The request is still there: it computes its prompt, and nobody fetches pages beside it."""
    desk = Desk()
    desk.add(1, 5, 6, 7)
    desk.send()
    desk.now_s += TIMEOUT_S
    assert not desk.is_awaited(1)
    desk.answer(1, num_found)
    desk.send()
    assert not desk.copies and not desk.is_awaited(1)
    assert desk.unfulfilled() == ({"too_late": num_found} if num_found else {})
    desk.add(2, 8, 9)
    assert desk.is_awaited(2), "the store owes no answer any more"
    desk.prefetcher.drop(1)
    desk.prefetcher.drop(2)
    assert desk.unfulfilled() == ({"too_late": num_found} if num_found else {}), "counted once"
    desk.check()


def test_the_last_that_wants_a_prefetch_drops_it() -> None:
    desk = two_that_want_one_prefetch()
    desk.prefetcher.drop(1)
    desk.prefetcher.drop(2)
    desk.end()
    assert cached(desk.cache, 5, 6, 7) == (0, 0)
    desk.check()


def test_what_others_computed_meanwhile_is_not_fetched() -> None:
    desk = Desk("wait")
    desk.add(1, 5, 6, 7)
    desk.send()
    desk.cache.release(serve(desk.cache, 5, 6, 7))
    desk.answer(1, 3)
    desk.send()
    assert not desk.copies
    assert not desk.is_awaited(1)


def test_a_prefix_that_was_evicted_meanwhile_ends_the_wait() -> None:
    desk = Desk("wait")
    backed(desk.cache, 5)
    desk.send()
    desk.end()  # its upload
    desk.add(1, 5, 6, 7)
    desk.send()
    squeeze(desk.cache)
    desk.cache.flush()
    desk.answer(1, 2)
    desk.send()
    assert not desk.copies
    assert not desk.is_awaited(1)
    desk.check()


def test_a_prefetch_that_cannot_be_placed_ends_at_once() -> None:
    desk = Desk("wait", num_host_pages=4)  # three and page 0
    held = desk.cache.tiers.allocate_host(3)
    desk.fetch(1, 5, 6)
    assert not desk.copies
    assert not desk.is_awaited(1)
    assert desk.unfulfilled() == {"host_full": 2}
    assert desk.prefetcher.may_have_more(1, 0)
    desk.cache.tiers.free_host(held)
    desk.send()
    assert not desk.copies
    desk.check()


def test_a_host_that_has_no_page_ready_yet_is_waited_for() -> None:
    """As for the first request after a start, while the host's memory is being touched."""
    desk = Desk("wait", num_host_pages=4)
    pages, held = desk.cache.host.pages, desk.cache.tiers.allocate_host(3)
    pages.num_ready = 1
    desk.fetch(1, 5, 6)
    assert not desk.copies and desk.is_awaited(1)
    pages.num_ready = 4
    desk.cache.tiers.free_host(held)
    desk.send()
    assert desk.copies and desk.is_awaited(1)


def test_a_host_that_never_has_a_page_ready_keeps_nobody() -> None:
    """As where its memory cannot be had."""
    desk = Desk("wait", num_host_pages=4)
    pages, held = desk.cache.host.pages, desk.cache.tiers.allocate_host(3)
    pages.num_ready = 1
    desk.fetch(1, 5, 6)
    assert desk.is_awaited(1)
    desk.now_s += GROWTH_S
    desk.send()
    assert not desk.is_awaited(1) and desk.unfulfilled() == {"host_full": 2}
    desk.fetch(2, 5, 6)
    assert not desk.is_awaited(2)
    pages.num_ready = 4
    desk.cache.tiers.free_host(held)
    desk.check()


def test_of_a_prefix_that_is_too_long_for_the_host_comes_what_has_a_place() -> None:
    desk = Desk("wait", num_host_pages=4)  # three and page 0; one is left for uploads
    held = desk.cache.tiers.allocate_host(1)
    desk.fetch(1, 5, 6, 7)
    assert [copy.host_pages.size for copy in desk.copies.values()] == [1]
    assert desk.is_awaited(1)
    desk.end()
    desk.send()
    assert not desk.copies
    assert not desk.is_awaited(1)
    assert cached(desk.cache, 5, 6, 7) == (0, 1)
    assert desk.unfulfilled() == {"host_full": 2}
    desk.cache.tiers.free_host(held)
    desk.check()


def test_a_prefetch_that_cannot_be_in_time_is_not_begun() -> None:
    desk = Desk()
    desk.measure(fetch_s=1.1 * TIMEOUT_S, prefill_s=10 * TIMEOUT_S)
    desk.fetch(1, 5, 6)
    assert not desk.copies
    assert not desk.is_awaited(1)
    assert desk.unfulfilled() == {"too_late": 2}
    desk.check()


def test_what_is_on_its_way_when_a_request_is_let_go_is_counted_once() -> None:
    desk = Desk()
    desk.measure(fetch_s=0.3 * TIMEOUT_S, prefill_s=10 * TIMEOUT_S)
    desk.fetch(1, 5, 6, 7, 8, 9)
    assert [copy.host_pages.size for copy in desk.copies.values()] == [3]
    desk.now_s += 1.1 * TIMEOUT_S
    assert not desk.is_awaited(1)
    assert desk.unfulfilled() == {"too_late": 2}
    desk.end()
    assert desk.unfulfilled() == {"too_late": 2, "place_lost": 3}
    desk.check()


def test_of_a_prefix_comes_what_can_be_in_time() -> None:
    desk = Desk()
    desk.measure(fetch_s=0.3 * TIMEOUT_S, prefill_s=10 * TIMEOUT_S)
    desk.fetch(1, 5, 6, 7, 8, 9)
    assert [copy.host_pages.size for copy in desk.copies.values()] == [3]
    desk.now_s += 0.9 * TIMEOUT_S
    desk.end()
    desk.send()
    assert not desk.is_awaited(1)
    assert desk.unfulfilled() == {"too_late": 2}
    assert desk.prefetcher.num_stored_tokens(1) == 3 * PAGE_SIZE
    desk.check()


def test_a_request_behind_many_prefetches_does_not_wait_for_its_turn_in_vain() -> None:
    desk = Desk()
    desk.measure(fetch_s=0.4 * TIMEOUT_S, prefill_s=10 * TIMEOUT_S)
    for uid in range(20):
        desk.add(uid, 1000 + uid)
    desk.send()
    for uid in range(20):
        desk.answer(uid, 1)
    desk.send()
    waiting = [uid for uid in range(20) if desk.is_awaited(uid)]
    assert waiting == list(range(len(desk.copies)))
    assert 4 <= len(waiting) <= MAX_PREFETCHES
    for op in list(desk.copies):
        desk.end(op)
    desk.check()


@pytest.mark.parametrize(("policy", "is_fetched"), [("timeout", False), ("wait", True), ("best_effort", True)])
def test_what_is_computed_sooner_than_it_is_fetched_is_only_fetched_where_that_is_wished(
    policy: StorePrefetch, is_fetched: bool
) -> None:
    desk = Desk(policy)
    desk.measure(fetch_s=0.2, prefill_s=0.1)
    desk.fetch(1, 5, 6)
    assert bool(desk.copies) is is_fetched
    if not is_fetched:
        assert not desk.is_awaited(1)
        assert desk.unfulfilled() == {"not_worth_loading": 2}
    for op in list(desk.copies):
        desk.end(op)
    desk.check()


def test_a_store_that_was_slow_is_measured_anew_in_time() -> None:
    desk = Desk()
    desk.measure(fetch_s=2 * TIMEOUT_S, prefill_s=10 * TIMEOUT_S)
    for uid in range(MAX_SKIPPED):
        assert not desk.copies
        desk.fetch(uid, 1000 + uid)
        desk.prefetcher.drop(uid)
    desk.fetch(MAX_SKIPPED, 5)
    desk.end()
    desk.check()


def test_what_the_store_has_not_said_or_not_brought_may_be_there() -> None:
    desk = Desk()
    backed(desk.cache, 5)
    desk.send()
    desk.end()  # its upload
    desk.add(1, 5, 6, 7)
    assert desk.prefetcher.may_have_more(1, PAGE_SIZE)
    desk.send()
    desk.answer(1, 1)
    assert desk.prefetcher.may_have_more(1, PAGE_SIZE)
    assert not desk.prefetcher.may_have_more(1, 2 * PAGE_SIZE)
    desk.prefetcher.drop(1)
    assert not desk.prefetcher.may_have_more(1, PAGE_SIZE)
    desk.add(2, 8, 9)
    desk.send()
    desk.answer(2, 0)
    assert not desk.prefetcher.may_have_more(2, 0)
    desk.check()


def test_a_store_that_owes_an_answer_is_asked_nothing_until_it_comes() -> None:
    desk = Desk()
    desk.add(1, 5, 6)
    desk.send()
    desk.now_s += TIMEOUT_S
    assert not desk.is_awaited(1)
    desk.prefetcher.drop(1)
    desk.add(2, 7, 8)
    assert not desk.is_awaited(2)
    desk.send()
    assert 2 not in desk.asked
    assert desk.unfulfilled() == {"store_behind": 2}
    assert desk.prefetcher.may_have_more(2, 0)
    desk.answer(1, 1)
    assert desk.unfulfilled() == {"store_behind": 2, "too_late": 1}
    desk.add(3, 7, 8)
    assert desk.is_awaited(3)
    desk.prefetcher.drop(3)
    desk.check()


def test_a_prefetch_that_is_late_stops_the_asking_too() -> None:
    desk = Desk()
    desk.fetch(1, 5, 6)
    desk.now_s += TIMEOUT_S
    assert not desk.is_awaited(1)
    desk.prefetcher.drop(1)
    desk.add(2, 7, 8)
    assert not desk.is_awaited(2)
    desk.end()
    desk.add(3, 7, 8)
    assert desk.is_awaited(3)
    desk.prefetcher.drop(3)
    desk.check()


def test_lookups_and_prefetches_are_bounded() -> None:
    desk = Desk("wait")
    for uid in range(MAX_LOOKUPS + 5):
        desk.add(uid, 1000 + uid)
    desk.send()
    assert len(desk.asked) == MAX_LOOKUPS
    for uid in range(MAX_LOOKUPS):
        desk.answer(uid, 1)
    desk.send()
    assert len(desk.asked) == MAX_LOOKUPS + 5
    assert len(desk.copies) == MAX_PREFETCHES
    for op in list(desk.copies):
        desk.end(op)
    desk.send()
    assert len(desk.copies) == MAX_PREFETCHES


def test_requests_that_never_get_to_ask_leave_nothing() -> None:
    desk = Desk("best_effort")
    for uid in range(3 * MAX_LOOKUPS):
        desk.add(uid, 1000 + uid)
        desk.send()
        assert not desk.is_awaited(uid)
        desk.prefetcher.drop(uid)
    assert len(desk.prefetcher._to_look_up) == 0
    assert len(desk.prefetcher._prefetches) == 0
    assert len(desk.asked) == MAX_LOOKUPS


def test_what_reaches_the_host_is_uploaded_and_kept_until_then() -> None:
    desk = Desk()
    desk.cache.release(serve(desk.cache, 5, 6))
    store(desk.cache)
    assert desk.has_work()
    desk.send()
    (copy,) = desk.copies.values()
    assert copy.kind is CopyKind.UPLOAD
    assert copy.run is not None
    assert copy.run.pages.tolist() == copy.host_pages.tolist()
    desk.end()
    assert desk.cache_counters.stats().uploads.num_fulfilled == 2
    assert not desk.has_work()
    desk.check()


def test_uploads_that_outlive_a_flush_give_each_page_back_once() -> None:
    desk = Desk()
    for page in range(30):
        desk.cache.release(serve(desk.cache, 100 + page))
    store(desk.cache)
    desk.send()
    assert len(desk.copies) == 30
    desk.cache.flush()
    for op in list(desk.copies):
        desk.end(op)
        assert sum(len(each.deferred_host_frees) for each in desk.cache.ops) <= 30
    desk.check()


def test_tc_41_orders_are_polled_for_while_idle_but_not_for_ever() -> None:
    desk = Desk("best_effort")
    desk.fetch(1, 5, 6)
    desk.prefetcher.drop(1)
    assert desk.has_work()
    desk.now_s += POLL_S + 0.1
    assert not desk.has_work()
    desk.end()
    desk.check()


def test_uploads_that_cannot_begin_are_not_waited_for_at_the_end_until_they_can() -> None:
    """Something else has all pages of the host."""
    desk = Desk(num_host_pages=4)
    held = desk.cache.tiers.allocate_host(3, num_left=0)
    for page in range(100, 100 + MAX_LOOKED + 9):
        desk.cache.release(serve(desk.cache, page))
    for is_first in (True, False):
        assert desk.prefetcher.is_uploading == is_first and desk.cache.store.num_to_upload == MAX_LOOKED + 9
        desk.send()
        assert desk.prefetcher.is_uploading == is_first, "one call does not examine all"
        desk.send()
        assert not desk.copies and not desk.prefetcher.is_uploading
    desk.cache.tiers.free_host(held)
    assert desk.prefetcher.is_uploading
    for _ in range(2 * (MAX_LOOKED + 9)):
        store(desk.cache)
        desk.send()
        for op in list(desk.copies):
            desk.end(op)
    assert not desk.cache.store.num_to_upload and not desk.prefetcher.is_uploading
    desk.check()


def test_uploads_wait_at_the_end_while_the_memory_of_the_host_is_being_touched() -> None:
    desk = Desk(num_host_pages=4)
    pages, held = desk.cache.host.pages, desk.cache.tiers.allocate_host(3, num_left=0)
    pages.num_ready = 1
    desk.cache.release(serve(desk.cache, 5))
    desk.send()
    desk.now_s += GROWTH_S - 1
    assert not desk.cache.store.has_uploads and desk.prefetcher.is_uploading
    desk.prefetcher.grow_host(1)
    desk.now_s += GROWTH_S - 1
    assert desk.prefetcher.is_uploading
    desk.prefetcher.grow_host(1)
    desk.now_s += 2
    assert not desk.prefetcher.is_uploading
    pages.num_ready = 4
    desk.cache.tiers.free_host(held)
    desk.check()


def test_a_store_that_answers_nothing_is_given_up_at_the_end() -> None:
    desk = Desk()
    assert not desk.prefetcher.is_uploading
    for page in (5, 6):
        desk.cache.release(serve(desk.cache, page))
    assert desk.prefetcher.is_uploading
    store(desk.cache)
    desk.send()
    desk.now_s += STALL_S - 0.1
    assert desk.prefetcher.is_uploading
    first, second = desk.copies
    desk.end(first)
    desk.now_s += STALL_S - 0.1
    assert desk.prefetcher.is_uploading
    desk.now_s += 0.2
    assert not desk.prefetcher.is_uploading
    desk.end(second)
    assert not desk.prefetcher.is_uploading
    desk.check()


def test_acks_of_others_are_left_to_them() -> None:
    ack = CopyAck(77)
    assert Desk().prefetcher.complete([ack]) == [ack]
