"""Updates come back as they were added, and merging them loses nothing and holds one delta per request."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from hiserve.core.request import FinishReason
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.ipc.updates import MergedUpdates, RequestFacts, RequestUpdates, TokenDelta

RUNNING, LENGTH, ABORT = FinishReason.RUNNING, FinishReason.LENGTH, FinishReason.ABORT


def updates(*deltas: TokenDelta) -> RequestUpdates:
    made = RequestUpdates()
    made.add(*deltas)
    made.check()
    return made


def first(uid: int, *tokens: int, cached: int = 0) -> TokenDelta:
    return TokenDelta(list(tokens), uid=uid, cached=CacheUse(device=cached))


def test_rows_are_the_deltas_that_were_added() -> None:
    deltas = [
        TokenDelta([1, 2], RUNNING, b"abcd", 7, cached=CacheUse(16), queue_s=0.5),
        TokenDelta([], ABORT, uid=3),
        TokenDelta([2**31 - 1], LENGTH, b"efghijkl", 5, drafts=DraftUse(1, 3, (1, 0, 0))),
    ]
    made = updates(*deltas)
    assert list(made) == deltas
    assert (made.tokens.tolist(), made.tokens.dtype, made.scores) == ([1, 2, 2**31 - 1], np.int32, b"abcdefghijkl")


def test_columns_are_appended_to_what_is_there() -> None:
    made = updates(TokenDelta([9], uid=1))
    tokens = np.array([4, 5, 6], dtype=np.int32)
    made.extend([7, 8], [1, 2], [0, 2], tokens, [b"", b"wxyz"], facts={1: RequestFacts(cached=CacheUse(8))})
    made.extend([2], [0], [3], tokens[:0], facts={0: RequestFacts(queue_s=0.5)}, drafts=[DraftUse(1, 1, (1,))])
    made.check()
    assert list(made) == [
        TokenDelta([9], uid=1),
        TokenDelta([4], uid=7),
        TokenDelta([5, 6], LENGTH, b"wxyz", 8, cached=CacheUse(8)),
        TokenDelta(finish=ABORT, uid=2, drafts=DraftUse(1, 1, (1,)), queue_s=0.5),
    ]


def test_facts_of_a_row_are_replaced() -> None:
    made = updates(first(1, 5), first(2, 6, cached=4))
    made.set_facts(1, TokenDelta(queue_s=2.5, drafts=DraftUse(1, 1, (1,))))
    assert list(made) == [first(1, 5), TokenDelta([6], uid=2, queue_s=2.5, drafts=DraftUse(1, 1, (1,)))]


@pytest.mark.parametrize("column", [{"failed": [(1, "a", "b")]}, {"published": bytes(16)}, {"removed": bytes(16)}])
def test_updates_with_failures_or_pages_alone_are_not_empty(column: dict[str, Any]) -> None:
    assert RequestUpdates().is_empty
    assert not RequestUpdates(**column).is_empty


def test_tokens_are_appended_per_request_in_order_of_first_arrival() -> None:
    late = MergedUpdates()
    late.merge(updates(first(7, 1, 2, cached=16), first(3, 9)))
    late.merge(updates(TokenDelta([8], LENGTH, uid=3), TokenDelta(uid=7), first(5, 4, cached=32)))
    assert list(late.take()) == [
        TokenDelta([1, 2], uid=7, cached=CacheUse(16)),
        TokenDelta([9, 8], LENGTH, uid=3, cached=CacheUse()),
        TokenDelta([4], uid=5, cached=CacheUse(32)),
    ]
    assert not late


def test_a_finish_without_tokens_is_kept() -> None:
    late = MergedUpdates()
    late.merge(updates(TokenDelta(finish=ABORT, uid=1)))
    taken = late.take()
    assert list(taken) == [TokenDelta(finish=ABORT, uid=1)]
    assert taken.tokens.dtype == np.int32
    assert len(taken.tokens) == 0


def test_rows_grow_with_requests_and_not_with_reports() -> None:
    late = MergedUpdates()
    for step in range(5000):
        late.merge(updates(*(first(uid, step % 100) for uid in range(4))))
    assert len(late) == 4


def test_scores_are_appended_per_request_in_order() -> None:
    late = MergedUpdates()
    late.merge(updates(TokenDelta(scores=b"prompt__", uid=7), TokenDelta([9], uid=3)))
    late.merge(updates(TokenDelta([8], scores=b"abcd", uid=3), TokenDelta([1, 2], scores=b"efghijkl", uid=7)))
    taken = late.take()
    assert (taken.uids, taken.score_words) == ([7, 3], [4, 1])
    assert taken.scores == b"prompt__efghijkl" + b"abcd"
    assert taken.tokens.tolist() == [1, 2, 9, 8]


def test_the_first_known_queue_time_and_cache_use_are_kept() -> None:
    late = MergedUpdates()
    late.merge(updates(TokenDelta([5], uid=1)))
    late.merge(updates(TokenDelta([6], uid=1, queue_s=0.25, cached=CacheUse(4))))
    late.merge(updates(TokenDelta([7], uid=1, queue_s=0.5, cached=CacheUse(8))))
    taken = late.take()
    assert (taken.queue_s, taken.cached) == ([0.25], [CacheUse(4)])


def test_any_history_merges_to_what_its_reader_would_have_seen() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    late = MergedUpdates()
    streams: dict[int, tuple[list[int], bytearray]] = {}
    for _ in range(200):
        deltas = []
        for uid in rng.sample(range(10), rng.randint(1, 6)):
            part, packed = [rng.randrange(100) for _ in range(rng.randint(0, 3))], rng.randbytes(4 * rng.randint(0, 4))
            deltas.append(TokenDelta(part, scores=packed, uid=uid, cached=rng.choice([None, CacheUse(5)])))
            tokens, words = streams.setdefault(uid, ([], bytearray()))
            tokens += part
            words += packed
        late.merge(updates(*deltas))
        if rng.random() < 0.1:
            check_and_forget(late, streams)
    check_and_forget(late, streams)


def check_and_forget(late: MergedUpdates, streams: dict[int, tuple[list[int], bytearray]]) -> None:
    taken = late.take()
    taken.check()
    assert {delta.uid: (delta.tokens, delta.scores) for delta in taken} == streams
    streams.clear()


def test_of_drafts_the_latest_news_counts() -> None:
    late, early, last = MergedUpdates(), DraftUse(1, 3, (1, 0, 0)), DraftUse(2, 6, (2, 1, 1))
    for drafts in (early, last, None):
        late.merge(updates(TokenDelta([5], uid=1, drafts=drafts)))
    assert late.take().drafts == [last]


def test_pages_that_came_and_went_leave_nothing_behind() -> None:
    """What a receiver that accepts nothing may cost is bounded by the cache, not by what passes through it."""
    merged = MergedUpdates()
    for number in range(1000):
        digest = number.to_bytes(16, "little")
        merged.merge(RequestUpdates(published=digest))
        merged.merge(RequestUpdates(removed=digest))
    assert not merged._pages
    assert merged.take().is_empty


def test_failures_are_all_kept() -> None:
    late = MergedUpdates()
    late.merge(RequestUpdates(failed=[(1, "a", "b")]))
    late.merge(RequestUpdates(failed=[(2, "c", "d")]))
    assert late.take().failed == [(1, "a", "b"), (2, "c", "d")]
    assert late.take().is_empty
