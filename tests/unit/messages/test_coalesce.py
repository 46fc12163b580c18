"""Merging reports loses nothing and holds one row per request."""

from __future__ import annotations

import random

import numpy as np

from hiserve.messages.coalesce import Coalescer
from hiserve.messages.types import Tokens


def columns(*rows: tuple[int, list[int], int, int]) -> tuple[Tokens, np.ndarray]:
    uids, lists, finishes, cached = (list(column) for column in zip(*rows, strict=True))
    tokens = np.array([token for part in lists for token in part], dtype=np.int32)
    return Tokens(uids, [len(part) for part in lists], finishes, cached), tokens


def test_tokens_are_appended_per_request_in_order_of_first_arrival() -> None:
    late = Coalescer()
    late.add(*columns((7, [1, 2], 0, 16), (3, [9], 0, 0)))
    late.add(*columns((3, [8], 2, -1), (7, [], 0, -1), (5, [4], 0, 32)))
    news, tokens = late.take()
    assert news == Tokens([7, 3, 5], [2, 2, 1], [0, 2, 0], [16, 0, 32])
    assert tokens.tolist() == [1, 2, 9, 8, 4]
    assert not late


def test_a_finish_without_tokens_is_kept() -> None:
    late = Coalescer()
    late.add(*columns((1, [], 3, -1)))
    news, tokens = late.take()
    assert news == Tokens([1], [0], [3], [-1])
    assert tokens.dtype == np.int32
    assert len(tokens) == 0


def test_rows_grow_with_requests_and_not_with_reports() -> None:
    late = Coalescer()
    for step in range(5000):
        late.add(*columns(*((uid, [step % 100], 0, 0) for uid in range(4))))
    assert len(late) == 4


def test_any_history_merges_to_what_its_reader_would_have_seen() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    late, streams = Coalescer(), {}
    for _ in range(200):
        uids = rng.sample(range(10), rng.randint(1, 6))
        rows = [(uid, [rng.randrange(100) for _ in range(rng.randint(0, 3))], 0, rng.choice([-1, 5])) for uid in uids]
        late.add(*columns(*rows))
        for uid, part, _, _ in rows:
            streams.setdefault(uid, []).extend(part)
        if rng.random() < 0.1:
            check_and_forget(late, streams)
    check_and_forget(late, streams)


def check_and_forget(late: Coalescer, streams: dict[int, list[int]]) -> None:
    news, tokens = late.take()
    ends = np.cumsum(news.counts)
    got = {
        uid: tokens[end - count : end].tolist() for uid, count, end in zip(news.uids, news.counts, ends, strict=True)
    }
    assert got == streams
    streams.clear()
