"""Reported bugs of leaks and of liveness as test cases, by number: loops that stop polling, locks that nobody returns.

TC-42, 45 and 46 are in ``test_reported_bugs_index.py``, too, where a prefetch that hangs (TC-44) is given up; pools
free no page twice (TC-42) by ``tests/unit/storage/test_records.py``.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import Tier
from hiserve.cache.storage.file_store import FileStore
from hiserve.cache.storage.segment import Segment
from hiserve.cache.storage.store import KEY_BYTES
from hiserve.core.transfers import CopyKind
from tests.helpers.copying import add, copying_engine, run
from tests.helpers.host import PAGE_BYTES, make_layout
from tests.helpers.tiers import TENANT, is_whole, new_cache, prompt, squeeze_host

PAGE = 4


def tokens(seed: int, num_pages: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 1000, num_pages * PAGE + 1).astype(np.int32)


@pytest.mark.parametrize("depth", [0, 1])
def test_tc_40_a_loop_that_only_decodes_takes_acks_and_returns_what_copies_held(depth: int) -> None:
    engine, executor, cache = copying_engine(num_pages=40, num_host_pages=40, depth=depth)
    executor.holds = True
    add(engine, 1, tokens(1, 5))
    add(engine, 2, tokens(2, 3), max_tokens=100)
    for _ in range(5):
        engine.step()
    locked = cache.device.pages.num_pages - 1 - cache.device.pages.num_free - cache.device.num_evictable
    assert executor.open, "no store is in flight"
    executor.holds = False
    num_decodes = len(executor.plans)
    for _ in range(3):
        engine.step()
    assert all(plan.num_tokens == 1 for plan in executor.plans[num_decodes:] if plan.rows.size)
    now = cache.device.pages.num_pages - 1 - cache.device.pages.num_free - cache.device.num_evictable
    assert now <= locked - 5 + 1, "the store of a request that has ended keeps its pages"
    assert engine.stats().running == 1


def test_tc_41_an_engine_without_requests_has_work_until_its_copies_are_answered() -> None:
    engine, executor, cache = copying_engine(num_pages=40, num_host_pages=40)
    executor.holds = True
    add(engine, 1, tokens(1, 5))
    for _ in range(20):
        engine.step()
    assert engine.stats().running == engine.stats().waiting == 0
    assert engine.has_work and executor.open
    executor.holds = False
    run(engine, max_turns=5)
    assert (
        not len(cache.ops)
        and cache.device.num_evictable == cache.device.pages.num_pages - 1 - cache.device.pages.num_free
    )


@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("fails", [False, True])
def test_tc_42_a_request_aborted_at_any_step_leaves_nothing_held(turn: int, fails: bool) -> None:
    engine, executor, cache = copying_engine(num_pages=12, num_host_pages=30)
    for uid in (1, 2):
        add(engine, uid, tokens(uid, 8))
        run(engine)
    executor.holds, executor.fails = True, fails
    add(engine, 3, tokens(1, 8), max_tokens=4)
    for i in range(turn):
        executor.holds = i < 3
        engine.step()
    engine.abort([3])
    executor.holds = False
    run(engine, max_turns=50)
    assert any(copy.kind is CopyKind.LOAD for copy in executor.copies) or not turn
    engine.flush()
    assert cache.device.pages.num_free == cache.device.pages.num_pages - 1
    assert cache.host.pages.num_free == cache.host.pages.num_pages - 1
    assert not cache.tree.roots


def test_tc_43_prefetches_without_end_keep_no_memory(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", 1 << 20)
    segment = Segment.anonymous(make_layout(8))
    keys = [bytes([number]) * KEY_BYTES for number in range(3)]
    store.put(keys, [memoryview(bytes(PAGE_BYTES))] * 3)
    cache = new_cache(num_host_pages=8)

    def prefetch() -> None:
        begun = cache.store.begin_prefetch(TENANT, prompt(1, 2, 3), 9)
        assert begun is not None
        found = store.get(keys, [memoryview(segment.pages[page]) for page in begun.run.pages])
        assert cache.store_sync.end_prefetch(begun.op, found) == 3
        squeeze_host(cache)
        cache.take_events(Tier.HOST)
        cache.take_freed_host_pages()

    for _ in range(20):
        prefetch()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        prefetch()
    gc.collect()
    assert len(gc.get_objects()) <= before + 20
    assert is_whole(cache)
    store.close()
    segment.close()


@pytest.mark.parametrize("fails", [False, True])
def test_tc_46_requests_wait_for_pages_that_copies_hold_and_then_run(fails: bool) -> None:
    engine, executor, cache = copying_engine(num_pages=12, num_host_pages=30)
    for uid in (1, 2):
        add(engine, uid, tokens(uid, 8))
        run(engine)
    executor.holds, executor.fails = True, fails
    add(engine, 3, tokens(1, 8))
    for _ in range(3):
        engine.step()
    add(engine, 4, tokens(4, 9))
    for _ in range(10):
        engine.step()
    assert engine.stats().waiting == 1, "a request got pages that a load fills"
    executor.holds = False
    assert set(run(engine, max_turns=100)) == {3, 4}
    assert not len(cache.ops)
