"""A batch per step, of what the step changed; a flush is told at once, and runs end with the sockets closed."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import PrefixCache, Tier
from hiserve.config.options import make_options
from hiserve.core.request import SamplingParams
from hiserve.core.transfers import CopyKind
from hiserve.engine.kv_event_sender import KvEventSender, open_kv_events
from hiserve.engine.loop import Engine
from hiserve.ipc.kv_events import Change, Cleared, Removed, Stored
from hiserve.ipc.messages import Admit
from tests.helpers.engines import echo_engine
from tests.helpers.kv_mirror import Mirror
from tests.helpers.tiers import PAGE_SIZE, TENANT, new_cache, prompt, serve, squeeze, store, take
from tests.invariants.kv_checks import Direct


class Published:
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[list[Change]] = []
        self.is_closed = False
        self.num_dropped = 0

    def put(self, changes: list[Change]) -> None:
        self.batches.append(changes)

    def close(self) -> None:
        self.is_closed = True


def listener() -> tuple[KvEventSender, Published]:
    published = Published()
    return KvEventSender(published), published  # type: ignore[arg-type]


def run(engine: Engine, uid: int, tokens: list[int], max_tokens: int = 3) -> None:
    given = np.array(tokens, dtype=np.int32)
    engine.add(Admit(uid, given.size, SamplingParams(seed=1, max_tokens=max_tokens), b"", 0), given)
    while engine.has_work:
        engine.step()


def test_the_first_batch_says_that_nothing_is_cached() -> None:
    _, published = listener()
    assert published.batches == [[Cleared()]]


def test_a_step_that_changes_nothing_publishes_nothing() -> None:
    events, published = listener()
    engine, *_ = echo_engine(num_pages=30, kv_events=events)
    for _ in range(3):
        engine.step()
    assert len(published.batches) == 1


def test_what_was_dropped_is_in_the_engines_stats() -> None:
    events, published = listener()
    engine, *_ = echo_engine(num_pages=30, kv_events=events)
    assert engine.stats().dropped_event_batches == 0
    published.num_dropped = 3
    assert engine.stats().dropped_event_batches == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_each_step_is_one_batch_told_before_its_report(depth: int) -> None:
    events, published = listener()
    engine, *_ = echo_engine(num_pages=30, budget=8, depth=depth, kv_events=events, eos=())
    given = np.arange(3, 23, dtype=np.int32)  # five pages of four, in chunks of two pages
    engine.add(Admit(1, given.size, SamplingParams(seed=1, max_tokens=1), b"", 0), given)
    while engine.has_work:
        before = len(published.batches)
        updates = engine.step()
        told = published.batches[before:]
        assert len(told) <= 1
        num_told = sum(len(change.digests) for batch in told for change in batch if isinstance(change, Stored))
        assert num_told == len(updates.published if updates else b"")
    assert [sum(len(change.digests) // 16 for change in batch) for batch in published.batches[1:]] == [2, 2, 1]


def test_a_mirror_of_the_batches_knows_what_the_engine_has_under_pressure() -> None:
    seed = 5
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    direct = Direct(page_size=4)
    engine, *_, cache = echo_engine(num_pages=24, kv_events=KvEventSender(direct))  # type: ignore[arg-type]
    shared = rng.integers(3, 50, 16).tolist()
    for uid in range(1, 60):
        tokens = shared[: rng.integers(0, 17)] + rng.integers(3, 50, rng.integers(1, 24)).tolist()
        match = cache.match(b"", np.array(tokens, dtype="<i4").tobytes())
        assert direct.mirror.num_cached(tokens, "GPU") == match.num_tokens
        run(engine, uid, tokens)
    assert direct.mirror.num_events["BlockRemoved"] > 20


def test_a_flush_is_told_at_once_and_clears_all() -> None:
    events, published = listener()
    engine, *_ = echo_engine(num_pages=30, kv_events=events)
    run(engine, 1, list(range(3, 20)))
    before = len(published.batches)
    assert engine.flush() > 0
    assert published.batches[before:] == [[Cleared()]]


def test_what_a_former_process_left_is_told_before_the_first_step() -> None:
    events, published = listener()
    events.stored(Tier.HOST, None, [bytes(16)], bytes(16))
    echo_engine(num_pages=30, kv_events=events)
    assert published.batches[1:] == [[Stored("CPU_PINNED", None, bytes(16), bytes(16))]]


def test_closing_the_engine_closes_the_sockets() -> None:
    events, published = listener()
    engine, *_ = echo_engine(num_pages=30, kv_events=events)
    engine.close()
    assert published.is_closed


# --- both tiers ---------------------------------------------------------------------------


def two_tiers() -> tuple[PrefixCache, KvEventSender, Mirror]:
    direct = Direct(PAGE_SIZE)
    events = KvEventSender(direct)  # type: ignore[arg-type]
    return new_cache(num_pages=16, listener=events), events, direct.mirror


def num_pages(events: KvEventSender, mirror: Mirror) -> tuple[int, int]:
    events.send()
    return len(mirror.cached["GPU"]), len(mirror.cached["CPU_PINNED"])


def test_a_page_is_told_on_each_tier_when_it_can_be_read_there_and_when_not_any_more() -> None:
    cache, events, mirror = two_tiers()
    cache.release(serve(cache, 1, 2, 3))
    assert num_pages(events, mirror) == (3, 0)
    (copy,) = cache.begin_offloads(100)
    assert num_pages(events, mirror) == (3, 0)
    cache.complete(copy.op, ok=True)
    assert num_pages(events, mirror) == (3, 3)
    squeeze(cache)
    assert num_pages(events, mirror) == (0, 3)
    match = cache.match(TENANT, prompt(1, 2, 3))
    lock = cache.lock(match, match.num_host_tokens)
    load = cache.begin_load(lock, take(cache, 3))
    assert load.kind is CopyKind.LOAD
    assert num_pages(events, mirror) == (0, 3)
    cache.complete(load.op, ok=True)
    assert num_pages(events, mirror) == (3, 3)


@pytest.mark.parametrize("ok", [True, False])
def test_what_did_not_arrive_is_not_told(ok: bool) -> None:
    cache, events, mirror = two_tiers()
    cache.release(serve(cache, 1, 2))
    (copy,) = cache.begin_offloads(100)
    cache.complete(copy.op, ok=ok)
    assert num_pages(events, mirror) == (2, 2 * ok)


def test_what_requests_hold_is_told_again_after_a_flush() -> None:
    cache, events, mirror = two_tiers()
    held = serve(cache, 1, 2)
    cache.release(serve(cache, 7, 8, 9))
    store(cache)
    assert num_pages(events, mirror) == (5, 5)
    before = mirror.num_events["AllBlocksCleared"]
    cache.flush()
    assert num_pages(events, mirror) == (2, 0)
    assert mirror.num_events["AllBlocksCleared"] == before + 1
    cache.release(held)
    cache.flush()
    assert num_pages(events, mirror) == (0, 0)


def test_a_flush_of_one_tier_tells_what_it_removed() -> None:
    cache, events, mirror = two_tiers()
    cache.release(serve(cache, 1, 2))
    store(cache)
    events.send()
    before = mirror.num_events["AllBlocksCleared"]
    cache.flush(Tier.HOST)
    assert num_pages(events, mirror) == (2, 0)
    assert mirror.num_events["AllBlocksCleared"] == before


def test_a_split_changes_nothing_for_a_router() -> None:
    cache, events, mirror = two_tiers()
    cache.release(serve(cache, 1, 2, 3))
    cache.release(serve(cache, 1, 2, 4))
    assert num_pages(events, mirror) == (4, 0)
    tokens = [[1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4]]
    assert sorted(mirror.cached["GPU"].values()) == [tuple(each) for each in tokens]


def test_a_removal_keeps_its_digests_whatever_the_index_does_with_its_list() -> None:
    events, published = listener()
    digests = [bytes([1] * 16), bytes([2] * 16)]
    events.removed(Tier.DEVICE, digests)
    digests.clear()
    events.send()
    assert published.batches[-1] == [Removed("GPU", bytes([1] * 16 + [2] * 16))]


def test_without_an_endpoint_nothing_is_opened() -> None:
    assert open_kv_events(make_options(), 0) is None
