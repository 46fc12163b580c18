"""What waits for a store, what is read where, what passes a full host, and what is lost count of: nothing."""

from __future__ import annotations

import pytest

from hiserve.cache.index import uploads
from hiserve.cache.index.prefix_cache import HostAdmission, PrefixCache, RunOp, Tier
from hiserve.core.transfers import CopyKind, PageCopy
from tests.helpers.tiers import (
    TENANT,
    backed,
    cached,
    demoted,
    digests,
    is_whole,
    new_cache,
    prompt,
    serve,
    squeeze,
    store,
)

Digests = list[bytes]


def told(orders: list[RunOp] | list[PageCopy]) -> list[Digests]:
    return [order.run.digests for order in orders if order.run is not None]


def end_all(cache: PrefixCache) -> list[Digests]:
    """Lets all that waits get to the store; returns what was written there, in its order."""
    written: list[Digests] = []
    while cache.uploads.has_uploads:
        begun, stages = cache.store.begin_uploads()
        for upload in begun:
            written += told([upload])
            cache.uploads.end_upload(upload.op)
        for stage in stages:
            cache.uploads.end_stage(stage.op, ok=True)
    return written


def full_of(cache: PrefixCache, first: int) -> None:
    """Fills the host with pages that the device has, too, so that none of them may go; the reserve stays."""
    for page in range(first, first + cache.host.num_available):
        serve(cache, page)
    store(cache)
    end_all(cache)
    assert cache.host.num_available == 0 and not cache.uploads.num_waiting


def test_a_full_host_is_passed_by() -> None:
    """Upload without a host page: the reserve is all that the copies go through."""
    cache = new_cache(num_pages=64, num_host_pages=17, max_upload_pages=9)
    full_of(cache, 100)
    serve(cache, *range(1, 8))
    assert store(cache) == []
    begun, stages = cache.store.begin_uploads()
    assert not begun and told(stages) == [digests(1, 2)]  # two pages are reserved
    (stage,) = stages
    assert stage.kind is CopyKind.OFFLOAD and set(stage.device_pages) < set(cache.locks.prefix_locks[-1].node.pages)
    assert cache.uploads.num_waiting == 5
    cache.uploads.end_stage(stage.op, ok=True)
    assert cache.uploads.num_waiting == 7, "what arrived on the host is not on its way to the store"
    ((upload,), _) = cache.store.begin_uploads()
    assert upload.run is stage.run and cache.uploads.num_waiting == 5
    assert cached(cache, 1, 2) == (2, 0)
    cache.uploads.end_upload(upload.op)
    assert end_all(cache) == [digests(*range(1, 8))[at : at + 2] for at in (2, 4, 6)]
    assert cache.uploads.num_not_uploaded == cache.uploads.num_waiting == 0


def test_what_the_device_has_of_the_same_prefix_makes_room_for_what_passes() -> None:
    """Of a host of two pages one has the start of the prefix, which the device would lose at no loss."""
    cache = new_cache(num_pages=9, num_host_pages=3, max_upload_pages=2)
    backed(cache, 1)
    assert end_all(cache) == [digests(1)]
    cache.release(serve(cache, 1, 2, 3))
    for page in range(10, 15):
        cache.release(serve(cache, page))
    assert cache.begin_offloads(9, is_worth=lambda num_pages: False) == []
    assert sum(node.is_spare for node in cache.tree.nodes()) == 2 and not cache.tiers.has_idle_host_pages
    ((), (stage,)) = cache.store.begin_uploads()
    assert told([stage]) == [digests(1, 2, 3)[1:]] and cached(cache, 1, 2, 3) == (3, 0)
    cache.uploads.end_stage(stage.op, ok=True)
    end_all(cache)
    assert is_whole(cache)


def test_a_staged_page_that_leaves_the_device_meanwhile_is_uploaded_all_the_same() -> None:
    cache = new_cache(num_pages=64, num_host_pages=17, max_upload_pages=9)
    full_of(cache, 100)
    cache.release(serve(cache, 1, 2))
    (_, (stage,)) = cache.store.begin_uploads()
    squeeze(cache)
    assert cached(cache, 1, 2) == (2, 0), "a copy reads these pages"
    cache.flush()
    cache.uploads.end_stage(stage.op, ok=True)
    assert end_all(cache) == [digests(1, 2)]
    assert cached(cache, 1, 2) == (0, 0)


def test_a_page_that_both_a_store_and_a_stage_read_is_free_when_both_have_ended() -> None:
    cache = new_cache(num_pages=64, num_host_pages=17, max_upload_pages=9)
    full_of(cache, 100)
    cache.release(serve(cache, 1, 2))
    (_, (stage,)) = cache.store.begin_uploads()
    cache.flush(Tier.HOST)
    lock = serve(cache, 1, 2)
    cache.ensure_backed(lock)
    cache.release(lock)
    (copy,) = (each for each in cache.begin_offloads(99) if set(each.device_pages) == set(stage.device_pages))
    cache.flush()
    cache.complete(copy.op, ok=False)
    read = set(stage.device_pages.tolist())
    assert read.isdisjoint(cache.device.pages.free_pages().tolist())
    cache.uploads.end_stage(stage.op, ok=False)
    assert read <= set(cache.device.pages.free_pages().tolist())


def test_what_the_host_is_about_to_get_is_not_staged() -> None:
    cache = new_cache(max_upload_pages=9)
    cache.release(serve(cache, 1, 2))
    assert cache.store.begin_uploads() == ([], []) and not cache.uploads.has_uploads
    (copy,) = cache.begin_offloads(9)
    assert cache.store.begin_uploads() == ([], []) and not cache.uploads.has_uploads
    cache.complete(copy.op, ok=True)
    assert cache.uploads.has_uploads, "nobody else tells an idle engine that there is work"
    begun, stages = cache.store.begin_uploads()
    assert told(begun) == [digests(1, 2)] and not stages


def test_a_page_whose_store_failed_is_staged() -> None:
    cache = new_cache(max_upload_pages=9)
    cache.release(serve(cache, 1, 2))
    (copy,) = cache.begin_offloads(9)
    cache.complete(copy.op, ok=False)
    assert end_all(cache) == [digests(1, 2)]
    assert is_whole(cache)


def test_every_page_is_written_once_and_after_the_page_before_it() -> None:
    cache = new_cache(num_pages=64, num_host_pages=33, max_upload_pages=3)
    written: list[bytes] = []
    lock = serve(cache, 1)
    for end in range(2, 12):
        cache.release(lock)
        lock = serve(cache, *range(1, end))
        if end % 3 == 0:
            store(cache)
        if end % 4 == 0:
            written += [each for run in end_all(cache) for each in run]
    store(cache)
    written += [each for run in end_all(cache) for each in run]
    assert written == digests(*range(1, 11))
    cache.release(lock)
    assert is_whole(cache)


def test_what_leaves_the_cache_before_it_was_read_is_counted_once() -> None:
    cache = new_cache(num_host_pages=9, max_upload_pages=1)
    backed(cache, 1)
    ((upload,), _) = cache.store.begin_uploads()
    backed(cache, 2, 3)
    cache.release(serve(cache, 4))
    assert cache.store.begin_uploads() == ([], [])  # a single page at a time
    cache.flush()
    assert (cache.uploads.num_not_uploaded, cache.uploads.num_waiting) == (3, 0)
    cache.uploads.end_upload(upload.op)
    assert end_all(cache) == []
    assert is_whole(cache)


def test_a_stage_that_fails_is_counted_and_gives_its_pages_back() -> None:
    cache = new_cache(num_pages=64, num_host_pages=17, max_upload_pages=9)
    full_of(cache, 100)
    free = cache.host.pages.num_free
    cache.release(serve(cache, 1))
    (_, (stage,)) = cache.store.begin_uploads()
    assert cache.host.pages.num_free == free - 1
    cache.uploads.end_stage(stage.op, ok=False)
    assert cache.host.pages.num_free == free
    assert cache.uploads.num_not_uploaded == 1 and not cache.uploads.has_uploads


def test_stages_that_fail_take_nothing_of_what_later_ones_may_have() -> None:
    cache = new_cache(num_pages=64, num_host_pages=17, max_upload_pages=2)
    full_of(cache, 100)
    for page in range(5):
        cache.release(serve(cache, page))
        ((), (stage,)) = cache.store.begin_uploads()
        cache.uploads.end_stage(stage.op, ok=False)
    assert cache.uploads.num_not_uploaded == 5


def test_of_pages_chosen_by_use_only_those_on_the_host_are_uploaded() -> None:
    cache = new_cache(admission=HostAdmission.SELECTIVE, max_upload_pages=9)
    cache.release(serve(cache, 1, 2))
    store(cache)
    assert end_all(cache) == []
    cache.release(serve(cache, 1, 2))
    store(cache)
    assert end_all(cache) == [digests(1, 2)]


def test_what_waits_is_uploaded_though_what_follows_it_came_from_the_store() -> None:
    cache = new_cache(max_upload_pages=9)
    backed(cache, 1, 2)
    begun = cache.store.begin_prefetch(TENANT, prompt(1, 2, 3), 1)
    assert begun is not None and cache.store_sync.end_prefetch(begun.op, 1) == 1
    squeeze(cache)
    assert cached(cache, 1, 2, 3) == (0, 3), "three pages that nothing else tells apart"
    assert end_all(cache) == [digests(1, 2)] and not cache.uploads.num_waiting


def test_without_a_store_nothing_waits() -> None:
    cache = new_cache()
    backed(cache, 1, 2)
    assert cache.store.begin_uploads() == ([], []) and not cache.uploads.num_waiting and not cache.host.num_reserved


def test_the_queue_does_not_grow_while_a_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache(num_pages=16, num_host_pages=9, max_upload_pages=1)
    backed(cache, 1)
    ((upload,), _) = cache.store.begin_uploads()
    for page in range(10, 3000):
        cache.release(serve(cache, page, page + 10_000))
        cache.store.begin_uploads()
    assert len(cache.uploads._queue) <= 1024 and cache.uploads.num_waiting <= 16
    cache.uploads.end_upload(upload.op)


def test_what_passes_the_host_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_STAGED_PAGES", 3)
    cache = new_cache(num_pages=200, num_host_pages=100, max_upload_pages=50)
    assert cache.host.num_reserved == 3
    full_of(cache, 1000)
    cache.release(serve(cache, *range(1, 9)))
    (_, stages) = cache.store.begin_uploads()
    assert [len(run) for run in told(stages)] == [3]
    assert cache.store.begin_uploads() == ([], []) and not cache.uploads.has_uploads


def test_no_more_pages_are_staged_at_once_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_STAGED_PAGES", 3)
    cache = new_cache(num_pages=64, num_host_pages=33, max_upload_pages=30)
    demoted(cache, *range(100, 129))  # the host could have room for all, if it had to
    end_all(cache)
    num_lost = cache.uploads.num_not_uploaded
    cache.release(serve(cache, *range(1, 8)))
    (_, (first,)) = cache.store.begin_uploads()
    assert told([first]) == [digests(1, 2, 3)]
    assert cache.store.begin_uploads() == ([], [])
    cache.uploads.end_stage(first.op, ok=True)
    ((upload,), none) = cache.store.begin_uploads()
    assert not none, "what is on its way from the host counts still"
    cache.uploads.end_upload(upload.op)
    (_, (second,)) = cache.store.begin_uploads()
    assert told([second]) == [digests(1, 2, 3, 4, 5, 6)[3:]]
    cache.uploads.end_stage(second.op, ok=False)
    assert end_all(cache) == [digests(*range(1, 8))[6:]]
    assert cache.uploads.num_not_uploaded - num_lost == 3
    assert is_whole(cache)
