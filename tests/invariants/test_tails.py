"""H3: ``match`` finds the deepest resume point, against sets of prefixes, whatever came and went."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import (
    PrefixCache,
    PrefixLock,
    TailPool,
    TailSizes,
    Tier,
    TierListener,
)
from hiserve.core.digest import namespace_digest
from hiserve.core.transfers import TailImage
from tests.helpers.host import TENANTS, make_run
from tests.invariants.tail_runs import FRAMES, NAMESPACE, PAGE, Runs


def make_cache(
    num_pages: int = 60,
    num_window_pages: int = 30,
    num_host_pages: int = 0,
    num_ready_host_pages: int | None = None,
    listener: TierListener | None = None,
) -> tuple[PrefixCache, TailPool]:
    cache = PrefixCache(
        num_pages=num_pages,
        page_size=PAGE,
        namespace=NAMESPACE,
        tails=TailSizes(window_pages=num_window_pages, frames_per_page=FRAMES),
        num_host_pages=num_host_pages,
        num_ready_host_pages=num_ready_host_pages,
        listener=listener,
    )
    assert cache.windows is not None
    return cache, cache.windows


def insert(cache: PrefixCache, tokens: np.ndarray) -> PrefixLock:
    """Inserts the whole pages before the last token; returns the lock on them."""
    lock = cache.lock(cache.match(b"", tokens.tobytes())).detach()
    num_pages = (tokens.size - 1) // PAGE
    pages = cache.allocate(np.zeros(num_pages, dtype=np.int32))
    assert pages is not None
    cache.insert(lock, tokens[: num_pages * PAGE].tobytes(), pages)
    return lock


def publish(cache: PrefixCache, windows: TailPool, tokens: np.ndarray) -> PrefixLock:
    """Inserts the two pages of five tokens, with their tail of two window pages; returns the lock on them."""
    lock = insert(cache, tokens)
    held = windows.allocate(np.zeros(2, dtype=np.int32))
    cache.keep_tail(lock, 0, held)
    windows.drop(held)
    return lock


@pytest.mark.parametrize("seed", range(40))
def test_match_is_the_deepest_resume_point_whatever_came_and_went(seed: int) -> None:
    runs = Runs(seed)
    for _ in range(150):
        runs.step()
    runs.close()


@pytest.mark.parametrize("num_host_pages", [24, 70, 300])
def test_match_knows_the_deepest_resume_point_of_each_tier(num_host_pages: int) -> None:
    """H1, H3 and H10: a load has the whole tail of its boundary, or is not begun."""
    num_loads = 0
    for seed in range(30):
        runs = Runs(seed, num_host_pages)
        for _ in range(200):
            runs.step()
        runs.close()
        num_loads += runs.num_loads
    assert num_loads > 30, num_loads


@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("num_host_pages", [0, 24, 70])
def test_match_knows_the_deepest_snapshot_of_each_tier(num_host_pages: int, has_windows: bool) -> None:
    """H1, H3 and H10, of tails with a snapshot, alone or behind window pages."""
    num_loads = num_evicted = 0
    for seed in range(6):
        runs = Runs(seed, num_host_pages, has_windows=has_windows, num_slots=[4, 9][seed % 2])
        for _ in range(150):
            runs.step()
        runs.close()
        num_loads += runs.num_loads
        num_evicted += runs.cache.stats().snapshots.num_evicted_tails
    assert num_evicted > 0 and (num_loads > 0) == (num_host_pages > 0), (num_loads, num_evicted)


def test_tails_keep_pace_with_history_that_takes_every_order_of_a_step() -> None:
    cache, windows = make_cache(num_pages=200, num_window_pages=200, num_host_pages=400)
    prompts = [np.full(5, token, dtype=np.int32) for token in range(60)]
    for first in range(0, len(prompts), 3):
        for tokens in prompts[first : first + 3]:
            cache.release(publish(cache, windows, tokens))
        for copy in cache.begin_offloads(64, 3):
            cache.complete(copy.op, ok=True)
    cache.flush(Tier.DEVICE)
    num_resumable = sum(cache.match(b"", tokens.tobytes()).num_host_tokens == 4 for tokens in prompts)
    assert num_resumable >= len(prompts) - 3


@pytest.mark.parametrize("use", ["a match", "a row that ends there"])
def test_a_boundary_that_is_used_keeps_its_tail_longer(use: str) -> None:
    cache, windows = make_cache(num_window_pages=5)
    prompts = [np.full(5, token, dtype=np.int32) for token in (1, 2)]
    locks = [publish(cache, windows, tokens) for tokens in prompts]
    if use == "a match":
        locks.append(cache.lock(cache.match(b"", prompts[0].tobytes())).detach())
    else:
        cache.keep_tail(locks[0], 0, np.empty(0, dtype=np.int32))
    windows.allocate(np.zeros(2, dtype=np.int32))
    assert [cache.match(b"", tokens.tobytes()).num_tokens for tokens in prompts] == [4, 0]


def test_a_tail_whose_offload_lost_its_place_makes_room_for_rows() -> None:
    """It was kept anew while the offload ran, passed over for a row, and then the host was flushed."""
    cache, windows = make_cache(num_window_pages=9, num_host_pages=40)
    tokens, others = np.arange(5, dtype=np.int32), np.arange(7, 12, dtype=np.int32)
    cache.release(publish(cache, windows, tokens))
    for copy in cache.begin_offloads(8, 1):
        cache.complete(copy.op, ok=True)
    (of_tail,) = cache.begin_offloads(8)
    cache.flush(Tier.DEVICE)
    for each in (tokens, others):
        cache.release(publish(cache, windows, each))
    windows.drop(windows.allocate(np.zeros(4, dtype=np.int32)))
    cache.flush(Tier.HOST)
    assert windows.num_free == 4 and windows.num_spare == 6
    windows.allocate(np.zeros(6, dtype=np.int32))
    cache.complete(of_tail.op, ok=True)


def test_a_match_from_before_a_tail_is_matched_again() -> None:
    cache, windows = make_cache()
    tokens = np.arange(5, dtype=np.int32)
    lock = insert(cache, tokens)
    before = cache.match(b"", tokens.tobytes())
    cache.keep_tail(lock, 0, windows.allocate(np.zeros(2, dtype=np.int32)))
    assert (before.num_tokens, cache.match(b"", tokens.tobytes()).num_tokens) == (0, 4)
    with pytest.raises(AssertionError, match="the tree changed since the match"):
        cache.lock(before)


def test_a_boundary_keeps_the_tail_that_it_has() -> None:
    cache, windows = make_cache()
    tokens = np.arange(9, dtype=np.int32)
    lock = insert(cache, tokens)
    first = cache.keep_tail(lock, 1, windows.allocate(np.zeros(2, dtype=np.int32)))
    second = cache.keep_tail(lock, 1, windows.allocate(np.zeros(2, dtype=np.int32)))
    assert first is second and windows.num_tails == 1
    with pytest.raises(AssertionError, match="no page ends 4 pages before the end"):
        cache.keep_tail(lock, 4, np.zeros(2, dtype=np.int32))
    cache.release(lock)


def test_a_load_waits_for_the_last_forward_over_its_window_pages() -> None:
    """INV 26, of window pages."""
    cache, windows = make_cache(num_window_pages=3, num_host_pages=20)
    tokens = np.arange(5, dtype=np.int32)
    publish(cache, windows, tokens)
    for _ in ("history", "tail"):
        (copy,) = cache.begin_offloads(8)
        cache.complete(copy.op, ok=True)
    row = windows.allocate(np.zeros(2, dtype=np.int32))
    cache.begin_after(7)
    windows.drop(row)
    again = cache.lock((found := cache.match(b"", tokens.tobytes())), found.num_host_tokens).detach()
    copy = cache.begin_load(again, np.empty(0, dtype=np.int32), windows.allocate(np.zeros(2, dtype=np.int32)))
    assert copy.window_pages.size == 2 and copy.after_step == 7


TOKENS = np.arange(5, dtype=np.int32)


def offload(cache: PrefixCache) -> list[int]:
    """Ends the offloads of a step; returns the window pages of each."""
    copies = cache.begin_offloads(8)
    for copy in copies:
        cache.complete(copy.op, ok=True)
    return [copy.window_pages.size for copy in copies]


def test_a_row_whose_tail_was_lost_is_told_as_one_that_moved() -> None:
    cache, windows = make_cache(num_window_pages=3, num_host_pages=20)
    cache.release(publish(cache, windows, TOKENS))
    offload(cache)
    offload(cache)
    windows.drop(windows.allocate(np.zeros(2, dtype=np.int32)))
    found = cache.match(b"", TOKENS.tobytes())
    lock = cache.lock(found, found.num_host_tokens).detach()
    copy = cache.begin_load(lock, np.empty(0, dtype=np.int32), windows.allocate(np.zeros(2, dtype=np.int32)))
    before = cache.relocation_version
    assert cache.complete(copy.op, ok=False) == [lock]
    assert cache.relocation_version > before


def test_a_tail_is_offloaded_to_memory_that_is_ready_and_from_pages_that_nobody_was_promised() -> None:
    cache, windows = make_cache(num_window_pages=4, num_host_pages=20, num_ready_host_pages=4)
    cache.release(publish(cache, windows, TOKENS))
    assert [offload(cache), offload(cache)] == [[0], []], "the tail takes four frames, of which one is ready"
    cache.grow_host(20)
    windows.num_promised = 2
    assert offload(cache) == [] and not cache.has_offloads
    windows.num_promised = 1
    assert cache.has_offloads and offload(cache) == [2]


def test_the_host_keeps_history_whose_tail_it_alone_has() -> None:
    """The device has the pages too, but without the host's copy the tail would go."""
    cache, windows = make_cache(num_window_pages=3, num_host_pages=20)
    cache.release(publish(cache, windows, TOKENS))
    offload(cache)
    offload(cache)
    (node,) = cache.tree.nodes()
    assert node.is_copy, "the device has the tail too"
    windows.drop(windows.allocate(np.zeros(2, dtype=np.int32)))
    assert not node.is_copy
    cache.tiers.make_host_room(19, evicts=False)
    assert cache.match(b"", TOKENS.tobytes()).num_host_tokens == 4


def test_an_idle_host_does_not_exchange_history_and_tails_of_two_prefixes_for_ever() -> None:
    """A full one has the first two pages of each and one of their tails; the other tail replaced both of the first prefix."""
    cache, windows = make_cache(num_host_pages=2 * 2 + 2 * FRAMES + 1)
    for first in (0, 100):
        lock = insert(cache, np.arange(first, first + 9, dtype=np.int32))
        held = windows.allocate(np.zeros(2, dtype=np.int32))
        cache.keep_tail(lock, 2, held)
        windows.drop(held)
        cache.release(lock)
    for _ in range(9):
        copies = cache.begin_offloads(2)
        for copy in copies:
            cache.complete(copy.op, ok=True)
    assert not copies and not cache.has_offloads, "the engine would go on for it"


def test_tails_of_a_former_process_are_adopted_whole_and_once() -> None:
    """H10: frames of parts of window pages, of a boundary that has a tail, or without history are free."""
    cache, _ = make_cache(num_host_pages=20)
    run = make_run([1, 2], [7, 8], page_size=PAGE)
    cache.recover([run])

    def image(frames: list[int], digest: bytes) -> TailImage:
        return TailImage(np.array(frames, dtype=np.int32), TENANTS[0], digest)

    first, last = run.digests
    assert cache.tails is not None and cache.take_events(Tier.HOST) == (b"", b"")
    images = [image([3, 4, 5], first), image([6, 7], last), image([8, 9], last), image([10, 11], b"?" * 16)]
    assert cache.tails.recover(images) == 2
    assert sorted(cache.host.pages.free_pages().tolist()) == [3, 4, 5, *range(8, 20)]
    assert cache.host.num_evictable == 4
    assert cache.take_events(Tier.HOST) == (first + last, b""), "H11: routers learn of adopted resume points"


def test_a_node_adopts_the_tails_of_all_its_boundaries() -> None:
    cache, _ = make_cache(num_host_pages=20)
    run = make_run([1, 2], [7, 8], namespace=namespace_digest(NAMESPACE, b""), page_size=PAGE)
    cache.recover([run])
    assert cache.tails is not None
    frames = np.arange(3, 7, dtype=np.int32).reshape(2, -1)
    images = [TailImage(each, run.namespace, digest) for each, digest in zip(frames, run.digests, strict=True)]
    assert cache.tails.recover(images) == 4
    for tokens, num_tokens in (([7, 7, 8, 8, 9], 2 * PAGE), ([7, 7, 9, 9, 9], PAGE)):
        assert cache.match(b"", np.array(tokens, dtype=np.int32).tobytes()).num_host_tokens == num_tokens
    cache.flush()
    assert cache.host.pages.num_free == cache.host.pages.num_ready - 1
