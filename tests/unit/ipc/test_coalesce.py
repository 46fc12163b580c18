"""Merging reports loses nothing and holds one row per request."""

from __future__ import annotations

import random

import numpy as np

from hiserve.core.cache_usage import CacheUse
from hiserve.core.draft_use import DraftUse
from hiserve.ipc.coalesce import Coalescer
from hiserve.ipc.messages import Tokens

News = tuple[Tokens, np.ndarray, bytes]


def columns(
    *rows: tuple[int, list[int], int, int],
    scores: tuple[bytes, ...] = (),
    queue_s: float = -1,
    drafts: DraftUse | None = None,
) -> News:
    """Rows are (uid, tokens, finish, cached tokens or -1); the news of each may have scores."""
    uids, lists, finishes, told = (list(column) for column in zip(*rows, strict=True))
    cached = [None if num < 0 else CacheUse(device=num) for num in told]
    tokens = np.array([token for part in lists for token in part], dtype=np.int32)
    words = [len(packed) // 4 for packed in scores] or [0] * len(rows)
    news = Tokens(
        uids, [len(part) for part in lists], finishes, cached, [drafts] * len(rows), words, [queue_s] * len(rows)
    )
    return news, tokens, b"".join(scores)


def test_tokens_are_appended_per_request_in_order_of_first_arrival() -> None:
    late = Coalescer()
    late.add(*columns((7, [1, 2], 0, 16), (3, [9], 0, 0)))
    late.add(*columns((3, [8], 2, -1), (7, [], 0, -1), (5, [4], 0, 32)))
    news, tokens, scores = late.take()
    assert news == Tokens(
        [7, 3, 5],
        [2, 2, 1],
        [0, 2, 0],
        [CacheUse(16), CacheUse(), CacheUse(32)],
        [None, None, None],
        [0, 0, 0],
        [-1, -1, -1],
    )
    assert scores == b""
    assert tokens.tolist() == [1, 2, 9, 8, 4]
    assert not late


def test_a_finish_without_tokens_is_kept() -> None:
    late = Coalescer()
    late.add(*columns((1, [], 3, -1)))
    news, tokens, _ = late.take()
    assert news == Tokens([1], [0], [3], [None], [None], [0], [-1])
    assert tokens.dtype == np.int32
    assert len(tokens) == 0


def test_rows_grow_with_requests_and_not_with_reports() -> None:
    late = Coalescer()
    for step in range(5000):
        late.add(*columns(*((uid, [step % 100], 0, 0) for uid in range(4))))
    assert len(late) == 4


def test_scores_are_appended_per_request_in_order() -> None:
    late = Coalescer()
    late.add(*columns((7, [], 0, 0), (3, [9], 0, 0), scores=(b"prompt__", b"")))
    late.add(*columns((3, [8], 0, -1), (7, [1, 2], 0, -1), scores=(b"abcd", b"efghijkl")))
    news, tokens, scores = late.take()
    assert (news.uids, news.score_words) == ([7, 3], [4, 1])
    assert scores == b"prompt__efghijkl" + b"abcd"
    assert tokens.tolist() == [1, 2, 9, 8]


def test_the_first_known_queue_time_is_kept() -> None:
    late = Coalescer()
    late.add(*columns((1, [5], 0, 0), queue_s=-1))
    late.add(*columns((1, [6], 0, -1), queue_s=0.25))
    late.add(*columns((1, [7], 0, -1), queue_s=0.5))
    news, _, _ = late.take()
    assert news.queue_s == [0.25]


def test_any_history_merges_to_what_its_reader_would_have_seen() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    late = Coalescer()
    streams: dict[int, tuple[list[int], bytearray]] = {}
    for _ in range(200):
        uids = rng.sample(range(10), rng.randint(1, 6))
        rows = [(uid, [rng.randrange(100) for _ in range(rng.randint(0, 3))], 0, rng.choice([-1, 5])) for uid in uids]
        scores = tuple(rng.randbytes(4 * rng.randint(0, 4)) for _ in rows)
        late.add(*columns(*rows, scores=scores))
        for (uid, part, _, _), packed in zip(rows, scores, strict=True):
            tokens, words = streams.setdefault(uid, ([], bytearray()))
            tokens += part
            words += packed
        if rng.random() < 0.1:
            check_and_forget(late, streams)
    check_and_forget(late, streams)


def check_and_forget(late: Coalescer, streams: dict[int, tuple[list[int], bytearray]]) -> None:
    news, tokens, scores = late.take()
    ends, score_ends = np.cumsum(news.counts), 4 * np.cumsum(news.score_words)
    got = {
        uid: (tokens[end - count : end].tolist(), scores[score_end - 4 * words : score_end])
        for uid, count, end, words, score_end in zip(
            news.uids, news.counts, ends, news.score_words, score_ends, strict=True
        )
    }
    assert got == streams
    streams.clear()


def test_of_drafts_the_latest_news_counts() -> None:
    late, first, last = Coalescer(), DraftUse(1, 3, (1, 0, 0)), DraftUse(2, 6, (2, 1, 1))
    for drafts in (first, last, None):
        late.add(*columns((1, [5], 0, -1), drafts=drafts))
    news, _, _ = late.take()
    assert news.drafts == [last]
