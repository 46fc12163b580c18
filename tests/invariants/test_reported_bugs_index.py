"""Reported bugs of hierarchical caches as test cases, one test each, by number."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import HostAdmission, MissReason, PrefixCache, Tier
from tests.helpers.tiers import (
    PAGE_SIZE,
    TENANT,
    backed,
    cached,
    demoted,
    digests,
    is_whole,
    key,
    load,
    lock,
    new_cache,
    prompt,
    run_of,
    serve,
    squeeze,
    squeeze_host,
    states,
    take,
)
from tests.invariants.index_checks import check_structure

PREFIX = (1, 2, 3, 4, 5)


@pytest.fixture
def cache() -> PrefixCache:
    return new_cache()


def end_uploads(cache: PrefixCache) -> None:
    uploads, stages = cache.store.begin_uploads()
    for upload in uploads:
        cache.uploads.end_upload(upload.op)
    for stage in stages:
        cache.uploads.end_stage(stage.op, ok=False)


@pytest.mark.parametrize("cuts", [(1,), (2,), (4,), (3, 1), (1, 2, 3, 4), (4, 3, 2, 1)])
@pytest.mark.parametrize("is_ok", [True, False])
def test_tc_22_a_split_of_a_pending_store_keeps_it_on_every_fragment(cuts: tuple[int, ...], is_ok: bool) -> None:
    cache = new_cache(max_upload_pages=99)
    cache.release(serve(cache, *PREFIX))
    (copy,) = cache.begin_offloads(99)
    for cut in cuts:
        cache.release(lock(cache, *PREFIX[:cut]))
        check_structure(cache)
    assert set(states(cache).split()) == {"DW"} and cache.device.num_evictable == 0
    cache.complete(copy.op, ok=is_ok)
    check_structure(cache)
    assert set(states(cache).split()) == {"DH" if is_ok else "D"}
    uploads, stages = cache.store.begin_uploads()
    if is_ok:
        assert [upload.run.digests for upload in uploads] == [digests(*PREFIX)]
        squeeze(cache)
        for cut in (2, 3):  # a host-locked prefix is split, too
            cache.release(lock(cache, *PREFIX[:cut]))
        squeeze_host(cache)
        assert cached(cache, *PREFIX) == (0, 5), "an upload still reads these pages"
        cache.uploads.end_upload(uploads[0].op)
    else:
        assert not uploads and [stage.run.digests for stage in stages if stage.run] == [digests(*PREFIX)]
        cache.uploads.end_stage(stages[0].op, ok=False)
    assert is_whole(cache)


@pytest.mark.parametrize("on_device", range(5))
@pytest.mark.parametrize("wanted", range(1, 6))
def test_tc_23_what_is_loaded_begins_after_the_device_and_ends_at_the_match(on_device: int, wanted: int) -> None:
    cache = new_cache(num_pages=7)
    backed(cache, *PREFIX)
    host = lock(cache, *PREFIX).node.host_pages.tolist()
    cache = new_cache(num_pages=7)
    backed(cache, *PREFIX)
    cache.free(take(cache, cache.device.pages.num_free + 5 - on_device))
    assert cached(cache, *PREFIX) == (on_device, 5 - on_device)
    match = cache.match(TENANT, prompt(*PREFIX[:wanted], 9))
    receipt = cache.lock(match, match.num_host_tokens)
    num_loaded = max(0, wanted - on_device)
    assert receipt.host_pages.tolist() == host[on_device : on_device + num_loaded]
    if num_loaded:
        pages = take(cache, num_loaded)
        copy = cache.begin_load(receipt, pages)
        assert (copy.device_pages.tolist(), copy.host_pages.tolist()) == (pages.tolist(), host[on_device:][:num_loaded])
        assert receipt.pages.size == wanted and receipt.pages[on_device:].tolist() == pages.tolist()
        cache.complete(copy.op, ok=True)
    cache.release(receipt)
    assert is_whole(cache)


def test_tc_25_what_a_prefetch_continues_is_no_leaf_any_more(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    begun = cache.store.begin_prefetch(TENANT, prompt(1, 2, 3, 4), 9)
    assert begun is not None and begun.run.digests == digests(1, 2, 3, 4)[2:]
    squeeze_host(cache)
    assert cached(cache, 1, 2) == (0, 2), "the place that the prefetch continues was evicted"
    assert cache.store_sync.end_prefetch(begun.op, 2) == 2
    check_structure(cache)
    assert cached(cache, 1, 2, 3, 4) == (0, 4)
    cache.tiers.allocate_host(cache.host.pages.num_free + 1)
    assert cached(cache, 1, 2, 3, 4) == (0, 3), "a parent went before its child"


def test_tc_26_pages_of_a_load_that_fails_are_freed_once_and_found_by_nobody(cache: PrefixCache) -> None:
    demoted(cache, 1, 2, 3)
    free, free_host = cache.device.pages.num_free, cache.host.pages.num_free
    first, copy = load(cache, 1, 2, 3)
    second = lock(cache, 1, 2, 9)
    assert second.pages.tolist() == copy.device_pages[:2].tolist() and second.ops == {copy.op}
    lost = cache.complete(copy.op, ok=False)
    assert {id(receipt) for receipt in lost} == {id(first), id(second)}
    assert first.pages.size == second.pages.size == 0 and not first.ops and not second.ops
    assert cached(cache, 1, 2, 3) == (0, 0)
    assert (cache.device.pages.num_free, cache.host.pages.num_free) == (free, free_host + 3)
    cache.insert(first, key(1, 2, 3), take(cache, 3))
    cache.insert(second, key(1, 2, 9), take(cache, 3))
    assert cached(cache, 1, 2, 3) == cached(cache, 1, 2, 9) == (3, 0)
    cache.release(first)
    cache.release(second)
    assert is_whole(cache)


def test_tc_29_an_order_names_the_same_pages_whatever_becomes_of_the_nodes(cache: PrefixCache) -> None:
    demoted(cache, 1, 2, 3)
    cache.release(serve(cache, 7, 8))
    (outward,) = cache.begin_offloads(99)
    receipt, inward = load(cache, 1, 2, 3)
    named = [(copy.device_pages.tolist(), copy.host_pages.tolist()) for copy in (outward, inward)]
    for pages in [(1,), (1, 2), (7,)]:
        cache.release(lock(cache, *pages))
    twin = cache.lock(cache.match(b"other", prompt(7)))
    cache.insert(twin, key(7), take(cache, 1))
    squeeze(cache)
    squeeze_host(cache)
    assert [(copy.device_pages.tolist(), copy.host_pages.tolist()) for copy in (outward, inward)] == named
    assert receipt.pages.tolist() == named[1][0]
    whole = lock(cache, 7, 8)
    assert whole.pages.tolist() == named[0][0], "pages moved under a copy"
    for op in (outward.op, inward.op):
        cache.complete(op, ok=True)
    for each in (receipt, twin, whole):
        cache.release(each)
    assert is_whole(cache)


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize(
    "how", ["load", "load fails", "store", "store fails", "prefetch", "prefetch fails", "abort", "upload"]
)
def test_tc_42_host_pages_are_freed_once_at_whatever_step_a_request_ends(how: str, is_flushed: bool) -> None:
    cache = new_cache(num_host_pages=9, max_upload_pages=9)
    demoted(cache, 1, 2)
    end_uploads(cache)
    op, used = 0, set()
    if how.startswith("load"):
        receipt, copy = load(cache, 1, 2)
        op, used = copy.op, {*copy.host_pages.tolist()}
        cache.release(receipt)
    elif how.startswith(("store", "upload")):
        cache.release(serve(cache, 5, 6))
        (copy,) = cache.begin_offloads(99)
        op, used = copy.op, {*copy.host_pages.tolist()}
        if how == "upload":
            cache.complete(op, ok=True)
            op = cache.store.begin_uploads()[0][0].op
    else:
        begun = cache.store.begin_prefetch(TENANT, prompt(1, 2, 3), 9)
        assert begun is not None
        op, used = begun.op, {*begun.run.pages.tolist()}
        if how == "abort":
            cache.store.abort_prefetch(op)
    if is_flushed:
        cache.flush()
        assert cached(cache, 1, 2) == cached(cache, 5, 6) == (0, 0)
    squeeze(cache)
    squeeze_host(cache)
    assert used.isdisjoint(cache.host.pages.free_pages().tolist()), "a copy still uses these pages"
    check_structure(cache)
    if how == "upload":
        cache.uploads.end_upload(op)
    elif how.startswith(("load", "store")):
        cache.complete(op, ok="fails" not in how)
    else:
        cache.store_sync.end_prefetch(op, 0 if "fails" in how else 1)
    assert cached(cache, 1, 2, 3)[1] == 0 or not is_flushed
    with pytest.raises(AssertionError, match="not in flight"):
        cache.complete(op, ok=True)
    end_uploads(cache)
    assert is_whole(cache)


def test_tc_42_a_page_that_a_store_reads_outlives_two_flushes(cache: PrefixCache) -> None:
    cache.release(serve(cache, 1, 2))
    (copy,) = cache.begin_offloads(99)
    cache.flush(Tier.HOST)
    cache.flush()
    assert set(copy.device_pages.tolist()).isdisjoint(cache.device.pages.free_pages().tolist())
    cache.complete(copy.op, ok=True)
    assert is_whole(cache)


def test_tc_44_a_prefetch_that_hangs_is_given_up_and_keeps_nobody_from_another(cache: PrefixCache) -> None:
    hung = cache.store.begin_prefetch(TENANT, prompt(1, 2), 9)
    assert hung is not None and cache.store.begin_prefetch(TENANT, prompt(1, 2), 9) is None
    cache.store.abort_prefetch(hung.op)
    assert cache.explain(TENANT, prompt(1, 2), 0).reason is MissReason.COLD
    again = cache.store.begin_prefetch(TENANT, prompt(1, 2), 9)
    assert again is not None and set(again.run.pages.tolist()).isdisjoint(hung.run.pages.tolist())
    assert cache.store_sync.end_prefetch(again.op, 2) == 2
    assert cache.store_sync.end_prefetch(hung.op, 2) == 0, "what came too late was found"
    assert cached(cache, 1, 2) == (0, 2)
    assert is_whole(cache)


def test_tc_45_every_chunk_of_a_prefill_is_stored(cache: PrefixCache) -> None:
    receipt = cache.lock(cache.match(TENANT, prompt(0)))
    stored: list[bytes] = []
    for chunk in range(0, 12, 3):
        cache.insert(receipt, key(*range(chunk, chunk + 3)), take(cache, 3))
        copies = cache.begin_offloads(99)
        stored += [each for copy in copies for each in copy.run.digests]  # type: ignore[union-attr]
        for copy in copies:
            cache.complete(copy.op, ok=True)
        assert stored == digests(*range(chunk + 3))
    cache.release(receipt)
    squeeze(cache)
    assert cached(cache, *range(12)) == (0, 12) and cache.tiers.num_unbacked == 0


def test_tc_45_chunks_that_come_while_their_parents_are_stored_follow_them(cache: PrefixCache) -> None:
    receipt = serve(cache, 1, 2)
    (first,) = cache.begin_offloads(99)
    for page in (3, 4):
        cache.insert(receipt, key(page), take(cache, 1))
        assert cache.begin_offloads(99) == [], "a child was stored below a parent that may fail"
    cache.complete(first.op, ok=True)
    (second,) = cache.begin_offloads(99)
    assert second.run is not None and second.run.digests == digests(1, 2, 3, 4)[2:]
    cache.complete(second.op, ok=False)
    cache.insert(receipt, key(5), take(cache, 1))
    (third,) = cache.begin_offloads(99)
    assert third.run is not None and third.run.digests == digests(1, 2, 3, 4, 5)[2:], "what failed is tried again"


def test_tc_46_pages_that_copies_use_are_waited_for(cache: PrefixCache) -> None:
    cache = new_cache(num_pages=7, num_host_pages=9)
    demoted(cache, 1, 2, 3)
    receipt, inward = load(cache, 1, 2, 3)
    cache.release(receipt)
    cache.release(serve(cache, 7, 8, 9))
    (outward,) = cache.begin_offloads(99)
    assert cache.device.pages.num_free == cache.device.num_evictable == 0
    assert cache.allocate(np.zeros(1, dtype=np.int32)) is None, "a page was freed under a copy"
    cache.complete(inward.op, ok=True)
    assert cache.device.num_evictable == 3
    cache.complete(outward.op, ok=False)
    assert cache.device.num_evictable == 6
    assert take(cache, 6).size == 6


@pytest.mark.parametrize("num_tokens", range(1, 4 * PAGE_SIZE + 2))
def test_tc_62_prompts_around_whole_pages_on_either_tier(num_tokens: int) -> None:
    expected = (num_tokens - 1) // PAGE_SIZE
    for on_host in (False, True):
        cache = new_cache()
        (demoted if on_host else backed)(cache, 1, 2, 3, 4)
        match = cache.match(TENANT, key(1, 2, 3, 4, 5)[: 4 * num_tokens])
        found = match.num_host_tokens if on_host else match.num_tokens
        assert found == expected * PAGE_SIZE == match.num_tokens + match.num_host_tokens
        receipt = cache.lock(match, match.num_host_tokens)
        assert receipt.pages.size + receipt.host_pages.size == expected


def test_tc_70_other_tenants_find_nothing_on_any_tier(cache: PrefixCache) -> None:
    demoted(cache, 1, 2)
    backed(cache, 3, 4)
    begun = cache.store.begin_prefetch(TENANT, prompt(5, 6), 9)
    assert begun is not None and cache.store_sync.end_prefetch(begun.op, 2) == 2
    pages = np.array([30, 31], dtype=np.int32)
    assert cache.recover([run_of(pages, 7, 8)]) == 2
    for prefix in ((1, 2), (3, 4), (5, 6), (7, 8)):
        assert sum(cached(cache, *prefix)) == 2
        assert cached(cache, *prefix, tenant=b"other") == (0, 0)
    other = cache.store.begin_prefetch(b"other", prompt(5, 6), 9)
    assert other is not None and set(other.run.digests).isdisjoint(digests(5, 6))
    assert cache.store_sync.end_prefetch(other.op, 1) == 1
    assert cached(cache, 5, 6, tenant=b"other") == (0, 1)


def test_tc_70_a_hit_of_another_tenant_is_no_second_use() -> None:
    cache = new_cache(admission=HostAdmission.SELECTIVE)
    cache.release(serve(cache, 1, 2))
    cache.release(serve(cache, 1, 2, tenant=b"other"))
    assert cache.begin_offloads(99) == []
    cache.release(lock(cache, 1))
    (copy,) = cache.begin_offloads(99)
    assert copy.run is not None and copy.run.digests == digests(1)


def test_tc_42_a_page_that_a_load_and_an_upload_read_is_free_when_both_have_ended() -> None:
    cache = new_cache(max_upload_pages=99)
    demoted(cache, 1, 2)
    ((upload,), _) = cache.store.begin_uploads()
    receipt, copy = load(cache, 1, 2)
    cache.release(receipt)
    cache.flush()
    cache.complete(copy.op, ok=True)
    assert set(upload.run.pages.tolist()).isdisjoint(cache.host.pages.free_pages().tolist())
    cache.uploads.end_upload(upload.op)
    assert is_whole(cache)
