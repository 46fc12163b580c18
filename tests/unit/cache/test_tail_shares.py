"""Tails of tenants and of retained prefixes: whose window pages and frames go first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.cache.index.eviction import MAX_ACCOUNTS
from hiserve.cache.index.locks import path
from hiserve.cache.index.prefix_cache import PrefixCache, PrefixLock, Tail, TailSizes, Tier
from hiserve.cache.index.retention import MIN_SWEEP
from hiserve.config.caching import EvictionOrder
from hiserve.core.digest import namespace_digest
from hiserve.core.transfers import TailImage
from hiserve.ipc.messages import Admit
from tests.helpers.host import make_run
from tests.helpers.tiered import engine_of
from tests.helpers.window_models import SETTINGS, VOCAB, save_windows

PAGE, TAIL = 2, 2  # tokens of a page, pages of a tail
NUM_TAILS = 10  # that the pool holds


def make_cache() -> PrefixCache:
    return PrefixCache(
        num_pages=400, page_size=PAGE, namespace=b"n" * 16, tails=TailSizes(window_pages=1 + TAIL * NUM_TAILS)
    )


def serve(cache: PrefixCache, seed: int, tenant: bytes, until_s: int = 0) -> None:
    """Computes a prompt of two pages, keeps a tail behind it, and retains it on demand."""
    tokens = np.array([seed, 1, 2, 3, 4], dtype=np.int32)
    lock = cache.lock(cache.match(tenant, tokens.tobytes())).detach()
    assert cache.windows is not None
    if lock.pages.size == 0:
        pages = cache.allocate(np.zeros(2, dtype=np.int32))
        assert pages is not None
        cache.insert(lock, tokens[:4].tobytes(), pages)
    held = cache.windows.allocate(np.zeros(TAIL, dtype=np.int32))
    cache.keep_tail(lock, 0, held)
    cache.windows.drop(held)
    if until_s:
        cache.retain(lock, 4, until_s)
    cache.release(lock)
    cache.windows.check()


def num_resumable(cache: PrefixCache, seeds: range, tenant: bytes) -> int:
    """Prompts of a tenant that can be resumed behind their two pages."""
    prompts = [np.array([seed, 1, 2, 3, 4], dtype=np.int32).tobytes() for seed in seeds]
    return sum(cache.match(tenant, prompt).num_tokens == 4 for prompt in prompts)


def test_a_flood_leaves_others_their_share_of_window_pages() -> None:
    cache = make_cache()
    for seed in range(4):
        serve(cache, seed, b"calm")
    for seed in range(100, 160):
        serve(cache, seed, b"flood")
    assert num_resumable(cache, range(4), b"calm") == 4
    assert num_resumable(cache, range(100, 160), b"flood") == NUM_TAILS - 4, "an unused share is lent"


def test_what_is_more_than_the_share_goes_oldest_first() -> None:
    cache = make_cache()
    for seed in range(9):
        serve(cache, seed, b"calm")
    for seed in range(100, 160):
        serve(cache, seed, b"flood")
    kept = [seed for seed in range(9) if num_resumable(cache, range(seed, seed + 1), b"calm")]
    assert kept == list(range(9))[-len(kept) :] and len(kept) in (4, 5)


def test_a_retained_prefix_keeps_its_tail_until_its_time() -> None:
    cache = make_cache()
    serve(cache, 1, b"one", until_s=10)
    for seed in range(100, 140):
        serve(cache, seed, b"one")
    cache.expire(9)
    for seed in range(200, 240):
        serve(cache, seed, b"one")
    assert num_resumable(cache, range(1, 2), b"one") == 1
    cache.expire(10)
    for seed in range(300, 340):
        serve(cache, seed, b"one")
    assert num_resumable(cache, range(1, 2), b"one") == 0
    assert cache.windows is not None and cache.windows.num_tails == NUM_TAILS


def test_a_tail_that_is_retained_again_keeps_its_later_time() -> None:
    cache = make_cache()
    for until_s in (10, 20, 15):
        serve(cache, 1, b"one", until_s)
    cache.expire(19)
    for seed in range(100, 140):
        serve(cache, seed, b"one")
    assert num_resumable(cache, range(1, 2), b"one") == 1


def test_tails_that_are_retained_for_ever_have_a_bounded_record() -> None:
    """Else the nodes of tails that were evicted long ago stay in memory until their time."""
    cache = make_cache()
    for until_s in range(1, 2 * MIN_SWEEP):
        serve(cache, 1 + until_s % 50, b"one", until_s)
    assert cache.tails is not None and cache.windows is not None and len(cache.tails.ends) < MIN_SWEEP
    cache.expire(2 * MIN_SWEEP)
    assert not len(cache.tails.ends) and not any(tail.retained_until_s for tail in cache.windows._order)


def test_retained_tails_keep_no_request_from_its_pages() -> None:
    cache = make_cache()
    for seed in range(30):
        serve(cache, seed, b"one", until_s=100 + seed)
    assert num_resumable(cache, range(30), b"one") == NUM_TAILS
    assert num_resumable(cache, range(30 - NUM_TAILS, 30), b"one") == NUM_TAILS, (
        "of these the one first that ends first"
    )


FRAMES = 2  # of a window page
PROMPT_FRAMES = 2 + TAIL * FRAMES  # host pages of a prompt: its history, and its tail


def make_host_cache(num_prompts: int, eviction: EvictionOrder = "lru") -> PrefixCache:
    """A cache whose host holds so many prompts with their tails; its device holds as many without, so that pages leave it."""
    return PrefixCache(
        num_pages=1 + 2 * num_prompts,
        page_size=PAGE,
        namespace=b"n" * 16,
        tails=TailSizes(window_pages=1 + TAIL * NUM_TAILS, frames_per_page=FRAMES),
        num_host_pages=1 + num_prompts * PROMPT_FRAMES,
        eviction=eviction,
    )


def serve_to_host(cache: PrefixCache, seed: int, tenant: bytes, until_s: int = 0) -> None:
    """Serves a prompt, and offloads whatever is due: the pages that leave the device next, too."""
    serve(cache, seed, tenant, until_s)
    for _ in ("history", "tail", "nothing"):
        for copy in cache.begin_offloads(8):
            cache.complete(copy.op, ok=True)
    assert sum(cache.host.shares.held.values()) == cache.host.pages.num_pages - 1 - cache.host.pages.num_free


def num_on_host(cache: PrefixCache, seeds: range, tenant: bytes) -> int:
    """Prompts of a tenant that can be resumed behind their two pages after a load."""
    prompts = [np.array([seed, 1, 2, 3, 4], dtype=np.int32).tobytes() for seed in seeds]
    return sum(cache.match(tenant, prompt).num_host_tokens == 4 for prompt in prompts)


def test_a_flood_leaves_others_their_share_of_the_host() -> None:
    """Frames of tails count as the pages of history do."""
    cache = make_host_cache(8)
    for seed in range(3):
        serve_to_host(cache, seed, b"calm")
    cache.flush(Tier.DEVICE)  # the host frees copies of what the device has
    for seed in range(100, 140):
        serve_to_host(cache, seed, b"flood")
    assert num_on_host(cache, range(3), b"calm") == 3
    assert num_on_host(cache, range(100, 140), b"flood") > 0


def test_frames_that_the_host_evicts_are_counted_as_pages() -> None:
    cache = make_host_cache(1)
    serve_to_host(cache, 1, b"one")
    cache.flush(Tier.DEVICE)
    (tail,) = {tail for node in cache.tree.nodes() for tail in (node.tails or {}).values()}
    assert cache.tails is not None
    cache.tails.touch(tail, 0)
    cache.tiers.make_host_room(PROMPT_FRAMES)
    assert cache.host.num_evicted == PROMPT_FRAMES == cache.host.pages.num_free


def test_a_retained_prefix_keeps_its_tail_on_the_host_until_its_time() -> None:
    cache = make_host_cache(8)
    serve_to_host(cache, 1, b"one", until_s=10)
    cache.flush(Tier.DEVICE)
    for seed in range(100, 140):
        serve_to_host(cache, seed, b"one")
    cache.expire(9)
    for seed in range(200, 240):
        serve_to_host(cache, seed, b"one")
    assert num_on_host(cache, range(1, 2), b"one") == 1
    cache.expire(10)
    for seed in range(300, 340):
        serve_to_host(cache, seed, b"one")
    assert num_on_host(cache, range(1, 2), b"one") == 0


@pytest.mark.parametrize("until_s", [10, 30])
def test_an_adopted_tail_is_charged_and_retained_as_its_history_is(until_s: int) -> None:
    """And no longer, if its record says so: the history before it goes."""
    cache = make_host_cache(8)
    root, prompt = namespace_digest(b"n" * 16, b"one"), np.array([1, 1, 2, 2, 3], dtype=np.int32).tobytes()
    run = replace(make_run([1, 2], [1, 2], namespace=root, page_size=PAGE), retained_until_s=10)
    cache.recover([run])
    assert cache.tails is not None
    cache.tails.recover([TailImage(np.arange(3, 3 + TAIL * FRAMES, dtype=np.int32), root, run.digests[-1], until_s)])
    cache.release(cache.lock(cache.match(b"one", prompt)).detach())
    assert cache.host.shares.held == cache.tiers.retention.quota.held == {root: PROMPT_FRAMES}
    for seed in range(100, 140):
        serve_to_host(cache, seed, b"one")
    assert cache.match(b"one", prompt).num_host_tokens == 4
    cache.expire(10)
    for seed in range(200, 240):
        serve_to_host(cache, seed, b"one")
    assert cache.match(b"one", prompt).num_host_tokens == 0


def test_frames_of_retained_tails_count_in_the_quota_until_they_are_gone() -> None:
    """A quarter of 48 pages holds two prompts of two pages of history and four frames each."""
    cache, one = make_host_cache(8), namespace_digest(b"n" * 16, b"one")
    for seed in (1, 2, 3):
        serve_to_host(cache, seed, b"one", until_s=10)
        serve_to_host(cache, seed, b"one", until_s=20)  # again: nothing counts twice
    quota = cache.tiers.retention.quota
    assert quota.held == {one: 2 * PROMPT_FRAMES} and cache.stats().num_not_retained > 0
    serve_to_host(cache, 4, b"two", until_s=10)
    assert quota.held[namespace_digest(b"n" * 16, b"two")] == PROMPT_FRAMES, "one account's quota is not another's"
    cache.expire(10)
    assert quota.held == {one: 2 * PROMPT_FRAMES}
    cache.flush(Tier.DEVICE)
    assert quota.held == {one: 2 * PROMPT_FRAMES}, "its frames are on the host"
    cache.flush()
    assert quota.held == {}


def compute(cache: PrefixCache, num_pages: int, ends: tuple[int, ...]) -> PrefixLock:
    """Computes a prompt of so many pages, with tails behind the first so many of them."""
    tokens, windows = np.arange(num_pages * PAGE + 1, dtype=np.int32), cache.windows
    lock = cache.lock(cache.match(b"one", tokens.tobytes())).detach()
    pages = cache.allocate(np.zeros(num_pages, dtype=np.int32))
    assert windows is not None and pages is not None
    cache.insert(lock, tokens[:-1].tobytes(), pages)
    held = windows.allocate(np.zeros(TAIL, dtype=np.int32))
    for end in ends:
        cache.keep_tail(lock, num_pages - end, held)
    windows.drop(held)
    return lock


def tails_of(cache: PrefixCache) -> dict[int, Tail]:
    """By the pages of the prefixes that they end."""
    tails = [tail for node in cache.tree.nodes() for tail in (node.tails or {}).values()]
    return {sum(step.num_pages for step in path(tail.node)) - tail.node.num_pages + tail.at: tail for tail in tails}


def test_a_prefix_longer_than_the_quota_leaves_room_for_the_tail_that_it_needs() -> None:
    """Pages that are retained without a tail cannot be resumed behind."""
    cache = make_host_cache(8)
    lock = compute(cache, 12, ends=(4, 12))
    cache.retain(lock, 12 * PAGE, 10)
    cache.release(lock)
    found = {node.num_pages: node.retained_until_s for node in cache.tree.nodes()}
    assert found == {8: 10, 4: 0}
    assert {at: tail.num_retained for at, tail in tails_of(cache).items()} == {4: TAIL * FRAMES, 12: 0}


@pytest.mark.parametrize(("num_prompts", "times"), [(8, [10, 10]), (6, [0, 10])])
def test_a_shorter_prefix_has_its_own_tail_whichever_is_retained_first_if_the_quota_has_room(
    num_prompts: int, times: list[int]
) -> None:
    """Three pages and two tails of four frames, of twelve, and of nine."""
    cache = make_host_cache(num_prompts)
    lock = compute(cache, 3, ends=(1, 2, 3))
    for num_pages in (3, 1):
        cache.retain(lock, num_pages * PAGE, 10)
    cache.release(lock)
    tails = tails_of(cache)
    assert [tails[at].retained_until_s for at in (1, 3)] == times and tails[2].retained_until_s == 0
    assert cache.stats().num_not_retained == (0 if all(times) else TAIL * FRAMES)


def test_the_records_get_the_time_of_every_retained_tail_and_the_next_process_retains_each() -> None:
    """Two of a node, and not the third."""
    cache = make_host_cache(8)
    lock = compute(cache, 3, ends=(1, 2, 3))
    cache.retain(lock, PAGE, 10)
    for _ in ("history", "tails"):
        for copy in cache.begin_offloads(8):
            cache.complete(copy.op, ok=True)
    cache.retain(lock, 3 * PAGE, 10)
    cache.release(lock)
    host_pages, until_s = cache.host_times.take()
    times = dict(zip(host_pages.tolist(), until_s.tolist(), strict=True))
    frames = {at: tail.frames for at, tail in tails_of(cache).items() if tail.frames is not None}
    assert {at: {times.get(frame, 0) for frame in each.tolist()} for at, each in frames.items()} == {
        1: {10},
        2: {0},
        3: {10},
    }

    after = make_host_cache(8)
    root = namespace_digest(b"n" * 16, b"one")
    run = replace(make_run([1, 2, 3], [1, 2, 3], namespace=root, page_size=PAGE), retained_until_s=10)
    after.recover([run])
    assert after.tails is not None
    images = np.arange(4, 4 + 3 * TAIL * FRAMES, dtype=np.int32).reshape(3, -1)
    each = zip(images, run.digests, (10, 0, 10), strict=True)
    after.tails.recover([TailImage(ours, root, digest, until) for ours, digest, until in each])
    assert [tails_of(after)[at].retained_until_s for at in (1, 2, 3)] == [10, 0, 10]


def test_the_records_get_the_time_of_a_retained_tail_that_comes_from_a_store() -> None:
    """A row has left it on the device meanwhile, and its request retains it."""
    cache = make_host_cache(8)
    lock = compute(cache, 2, ends=(2,))
    cache.retain(lock, 2 * PAGE, 10)
    cache.release(lock)
    cache.host_times.take()
    ((_, tail),) = tails_of(cache).items()
    frames = cache.tiers.allocate_host(TAIL * FRAMES)
    assert cache.tails is not None and cache.tails.put_on_host(tail.node, tail.at, frames) == TAIL * FRAMES
    assert [each.tolist() for each in cache.host_times.take()] == [frames.tolist(), [10] * (TAIL * FRAMES)]


@pytest.mark.parametrize(("eviction", "first"), [("lru", 1), ("priority", 2)])
def test_a_tail_has_the_priority_of_the_requests_that_used_it(eviction: EvictionOrder, first: int) -> None:
    cache = make_host_cache(8, eviction)
    for seed in (1, 2):
        serve_to_host(cache, seed, b"one")
    for seed, priority in ((1, 5), (2, 0)):
        found = cache.match(b"one", np.array([seed, 1, 2, 3, 4], dtype=np.int32).tobytes())
        cache.release(cache.lock(found, priority=priority).detach())
    cache.flush(Tier.DEVICE)
    tail = next(each for each in iter(cache.host.eviction.pop, None) if isinstance(each, Tail))
    assert np.frombuffer(tail.node.key, dtype=np.int32)[0] == first


def test_an_account_is_charged_for_adopted_tails_wherever_they_are() -> None:
    """It gets them late if there were too many accounts when it used the first; each has a place in its order then."""
    cache = make_host_cache(8)
    root, prompt = namespace_digest(b"n" * 16, b"one"), np.array([1, 1, 2, 2, 3], dtype=np.int32).tobytes()
    runs = [
        replace(make_run(pages, [token, 2], namespace=root, page_size=PAGE))
        for token, pages in ((1, [1, 2]), (7, [3, 4]))
    ]
    cache.recover(runs)
    assert cache.tails is not None and cache.windows is not None
    frames = np.arange(5, 5 + 2 * TAIL * FRAMES, dtype=np.int32).reshape(2, -1)
    cache.tails.recover([TailImage(each, root, run.digests[-1]) for each, run in zip(frames, runs, strict=True)])
    others = [b"%d" % index for index in range(MAX_ACCOUNTS)]
    for other in others:
        cache.device.shares.charge(other, 1)
    found = cache.match(b"one", prompt)
    lock = cache.lock(found, found.num_host_tokens).detach()
    pages = cache.allocate(np.zeros(2, dtype=np.int32))
    assert pages is not None
    window_pages = cache.windows.allocate(np.zeros(TAIL, dtype=np.int32))
    cache.complete(cache.begin_load(lock, pages, window_pages).op, ok=True)
    assert cache.windows.shares.held == {b"": TAIL}
    for other in others:
        cache.device.shares.charge(other, -1)
    cache.release(cache.lock(cache.match(b"one", prompt)).detach())
    assert cache.windows.shares.held == {root: TAIL} and cache.host.shares.held == {root: 2 * PROMPT_FRAMES}
    tails = {tail for node in cache.tree.nodes() for tail in (node.tails or {}).values()}
    assert len(tails) == 2 and tails <= set(cache.host.eviction), "a tail without a place in the order of its account"
    cache.release(lock)


def test_each_use_of_a_tail_frees_its_account_of_its_pages() -> None:
    cache = make_cache()
    for seed in range(50):
        serve(cache, seed % 17, b"%d" % (seed % 3))
    windows = cache.windows
    assert windows is not None and sum(windows.shares.held.values()) == TAIL * windows.num_tails
    cache.flush()
    assert windows.shares.held == {} and windows.num_tails == 0


@pytest.mark.parametrize("retained", [0, 26])
def test_a_prompt_gets_a_tail_where_its_request_retains_it(
    retained: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Otherwise a retained beginning of a prompt could not be resumed behind."""
    folder, page = save_windows(tmp_path_factory.mktemp("windows")), int(SETTINGS["page_size"])
    tokens = np.random.default_rng(4).integers(7, VOCAB, 70).astype(np.int32)
    with LLM(model=str(folder), **SETTINGS | {"window_pages": 400}) as llm:
        engine = engine_of(llm)
        sampling = SamplingParams(seed=1, temperature=0.0, max_tokens=2, ignore_eos=True)
        retain = ((retained, 300),) if retained else ()
        engine.add(Admit(1, tokens.size, sampling, b"", 0, retain=retain), tokens)
        while engine.has_work:
            engine.step()
        other = np.concatenate((tokens[:30], tokens[:9]))
        assert engine._planner._cache.match(b"", other.tobytes()).num_tokens == retained // page * page
