"""The endless cache: cases by hand, and a brute force that compares every pair of requests."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hiserve.bench.cache_summary import Held, Visit, endless_cache

PAGE = 4


def visit(prompt: list[int], output: list[int] | None = None, *, at: float, end: float, namespace: str = "") -> Visit:
    ids = [np.array(tokens, dtype=np.int32) for tokens in (prompt, output or [])]
    return Visit(prompt=ids[0], output=ids[1], begin_s=at, end_s=end, namespace=namespace)


def held(*visits: Visit, page_size: int = PAGE) -> list[tuple[int, int]]:
    return [(each.most, each.least) for each in endless_cache(visits, page_size)]


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_only_whole_pages_are_found_and_never_the_last_token() -> None:
    first = visit(tokens(11), at=0, end=1)
    assert held(first, visit(tokens(11), at=2, end=3)) == [(0, 0), (8, 8)]
    assert held(first, visit(tokens(8), at=2, end=3)) == [(0, 0), (4, 4)]
    assert held(first, visit(tokens(9), at=2, end=3)) == [(0, 0), (8, 8)]
    assert held(first, visit(tokens(3), at=2, end=3)) == [(0, 0), (0, 0)]


def test_a_prefix_ends_where_the_tokens_differ() -> None:
    other = [*tokens(6), 99, *tokens(9, 7)]
    assert held(visit(tokens(16), at=0, end=1), visit(other, at=2, end=3)) == [(0, 0), (4, 4)]
    same_page_elsewhere = [*tokens(4, 50), *tokens(4, 4), 1]
    assert held(visit(tokens(16), at=0, end=1), visit(same_page_elsewhere, at=2, end=3)) == [(0, 0), (0, 0)]
    same_page_again = [*tokens(4), *tokens(4), 1]
    assert held(visit(tokens(16), at=0, end=1), visit(same_page_again, at=2, end=3)) == [(0, 0), (4, 4)]


def test_what_is_still_being_computed_counts_as_the_most_and_not_as_the_least() -> None:
    slow = visit(tokens(12), at=0, end=10)
    assert held(slow, visit(tokens(12), at=5, end=6)) == [(0, 0), (8, 0)]
    assert held(slow, visit(tokens(12), at=10, end=11)) == [(0, 0), (8, 8)]
    quick = visit(tokens(6), at=1, end=2)
    assert held(slow, quick, visit(tokens(12), at=5, end=6)) == [(0, 0), (4, 0), (8, 4)]


def test_the_order_is_that_of_sending_whatever_the_order_given() -> None:
    late, early = visit(tokens(9), at=5, end=6), visit(tokens(9), at=0, end=1)
    assert held(late, early) == [(8, 8), (0, 0)]
    at_once = [visit(tokens(9), at=0, end=1) for _ in range(3)]
    assert held(*at_once) == [(0, 0), (8, 0), (8, 0)]


def test_the_page_that_the_last_token_of_a_reply_fills_may_be_held_or_not() -> None:
    chat = visit(tokens(6), tokens(6, 6), at=0, end=1)
    assert held(chat, visit([*tokens(12), 7], at=2, end=3)) == [(0, 0), (12, 8)]
    settled = visit([*tokens(12), 7], at=2, end=3)
    assert held(chat, settled, visit([*tokens(12), 7], at=4, end=5)) == [(0, 0), (12, 8), (12, 12)]
    longer = visit(tokens(6), tokens(7, 6), at=0, end=1)
    assert held(longer, visit([*tokens(13), 7], at=2, end=3)) == [(0, 0), (12, 12)]


def test_namespaces_share_nothing() -> None:
    visits = [visit(tokens(9), at=at, end=at + 0.5, namespace=name) for at, name in enumerate("abab")]
    assert held(*visits) == [(0, 0), (0, 0), (8, 8), (8, 8)]


def test_a_request_that_never_ended_is_never_settled() -> None:
    assert held(visit(tokens(9), at=0, end=math.inf), visit(tokens(9), at=9, end=10)) == [(0, 0), (8, 0)]


def brute_force(visits: list[Visit], page_size: int) -> list[Held]:
    """For each request, the longest common page-aligned prefix with any one before it."""

    def common(new: Visit, old: Visit, num_left_out: int) -> int:
        output = old.output.tolist()
        computed = [*old.prompt.tolist(), *output[: max(0, len(output) - num_left_out)]]
        end = 0
        while end + page_size < new.prompt.size and end + page_size <= len(computed):
            if new.prompt[end : end + page_size].tolist() != computed[end : end + page_size]:
                break
            end += page_size
        return end

    found = []
    for index, new in enumerate(visits):
        before = [
            old
            for at, old in enumerate(visits)
            if (old.begin_s, at) < (new.begin_s, index) and old.namespace == new.namespace
        ]
        most = max((common(new, old, 0) for old in before), default=0)
        least = max((common(new, old, 1) for old in before if old.end_s <= new.begin_s), default=0)
        found.append(Held(most=most, least=least))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_the_trie_says_what_comparing_every_pair_says(seed: int, page_size: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    visits: list[Visit] = []
    for _ in range(60):
        base: list[int] = []
        if visits and rng.random() < 0.8:
            old = visits[int(rng.integers(len(visits)))]
            base = [*old.prompt.tolist(), *old.output.tolist()][: int(rng.integers(0, 40))]
        prompt = [*base, *rng.integers(0, 2, int(rng.integers(1, 9))).tolist()]
        at = float(rng.integers(0, 30))
        end = at + float(rng.integers(0, 10))
        output = rng.integers(0, 2, int(rng.integers(0, 6))).tolist()
        visits.append(visit(prompt, output, at=at, end=end, namespace="ab"[int(rng.integers(2))]))
    found = endless_cache(visits, page_size)
    assert found == brute_force(visits, page_size)
    assert sum(each.most for each in found) > sum(each.least for each in found) > 0
