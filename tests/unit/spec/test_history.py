"""Searches of kept replies: against a plain search, within a ring, and never in another tenant's."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.core.plan import Int32Array
from hiserve.spec.history import LONGEST, ReplyHistory

SIZES = (2, 4, 8, 16)
US, THEM = b"us", b"them"


def last_of(text: list[int] | Int32Array) -> Int32Array:
    """What a search takes for a row of these tokens."""
    known = list(text)[::-1][:LONGEST]
    return np.array([*known, *[int(text[0])] * (LONGEST - len(known)), -1], dtype=np.int32)


def search(history: ReplyHistory, tenant: bytes, text: list[int] | Int32Array, num: int = 5) -> tuple[int, list[int]]:
    agreed, following = history.follow([tenant], last_of(text)[None], num)
    return int(agreed[0]), following[0].tolist()


def agreement(kept: list[int], place: int, text: list[int]) -> int:
    """How many tokens before a place are the last ones of a text, ``LONGEST`` at most."""
    size = min(place, len(text), LONGEST)
    return next((n for n in range(size) if kept[place - 1 - n] != text[-1 - n]), size)


def plainly(kept: list[int], replied: list[int], text: list[int]) -> tuple[int, int]:
    """The most tokens that agree at the latest place of an n-gram of some size, and the latest such place; 0 without any."""
    found = [(0, 0)]
    for size in SIZES:
        places = [place for place in replied if agreement(kept, place, text) >= size]
        found += [(agreement(kept, places[-1], text), places[-1])] if places else []
    return max(found)


def replies(seed: int, num: int, num_ids: int) -> list[tuple[Int32Array, int]]:
    """Requests with the lengths of their prompts; parts of replies are repeated."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(1, num_ids, 12) for _ in range(4)]
    made = []
    for _ in range(num):
        parts = [phrases[at][: rng.integers(1, 13)] for at in rng.integers(4, size=4)]
        prompt = rng.integers(1, num_ids, LONGEST + 4)
        made.append((np.concatenate((prompt, *parts)).astype(np.int32), prompt.size))
    return made


@pytest.mark.parametrize("num_ids", [3, 40])
def test_a_search_finds_the_longest_agreement_and_of_equals_the_latest(num_ids: int) -> None:
    history, seen = ReplyHistory(num_tokens=400_000), set()  # so large a table that no two n-grams share an entry
    kept: list[int] = []
    replied: list[int] = []  # places of tokens of replies
    for tokens, num_prompt in replies(seed=num_ids, num=12, num_ids=num_ids):
        for known in range(num_prompt, tokens.size):
            text = tokens[:known].tolist()
            agreed, following = search(history, US, text)
            wanted, place = plainly(kept, replied, text)
            if wanted:
                assert (agreed, following) == (wanted, [*kept[place:], *[0] * 5][:5]), (known, place)
            else:
                assert agreed <= 1
            seen.add(agreed)
        history.add(US, tokens, num_prompt)
        replied += range(len(kept) + LONGEST, len(kept) + LONGEST + tokens.size - num_prompt)
        kept += tokens[num_prompt - LONGEST :].tolist()
        assert history.num_tokens == len(kept)
    assert {0, LONGEST} <= seen and len(seen) > 6, seen


def test_the_end_of_a_prompt_leads_to_the_beginning_of_the_reply_and_no_other_part_of_it_is_kept() -> None:
    history, tokens = ReplyHistory(1000), np.arange(1, 71, dtype=np.int32)
    history.add(US, tokens, num_prompt=50)
    assert search(history, US, tokens[:50]) == (LONGEST, [51, 52, 53, 54, 55])
    assert search(history, US, tokens[:60]) == (LONGEST, [61, 62, 63, 64, 65])
    assert search(history, US, tokens[:40])[0] == 0
    assert history.num_tokens == 20 + LONGEST


def test_rows_of_a_step_are_searched_at_once() -> None:
    history = ReplyHistory(1000)
    for tenant, first in ((US, 100), (THEM, 300)):
        history.add(tenant, np.arange(first, first + 60, dtype=np.int32), num_prompt=20)
    rows = [(US, 130), (THEM, 330), (THEM, 130), (b"a stranger", 330), (US, 140)]
    last = np.stack([last_of(range(end - 20, end)) for _, end in rows])
    agreed, following = history.follow([tenant for tenant, _ in rows], last, 2)
    assert agreed.tolist() == [16, 16, 0, 0, 16]
    assert following.tolist() == [[130, 131], [330, 331], [0, 0], [0, 0], [140, 141]]


@pytest.mark.parametrize("num_tokens", [1, 7, LONGEST + 1, 40, 64])
def test_the_oldest_tokens_are_overwritten_and_never_found(num_tokens: int) -> None:
    history, rng = ReplyHistory(num_tokens), np.random.default_rng(num_tokens)
    ring, num_added, num_found = [0] * num_tokens, 0, 0
    for _ in range(30):
        tokens = rng.integers(1, 30, LONGEST + int(rng.integers(1, 60))).astype(np.int32)
        history.add(US, tokens, LONGEST)
        for token in tokens[-num_tokens:].tolist():
            ring[num_added % num_tokens] = token
            num_added += 1
        assert history.num_tokens == min(num_added, num_tokens)
        for end in range(4, tokens.size):
            agreed, (following,) = search(history, US, tokens[:end], 1)
            wanted = [*last_of(tokens[:end])[:agreed][::-1].tolist(), following]
            num_found += agreed > 1
            assert not agreed or any([*ring, 0][at : at + agreed + 1] == wanted for at in range(num_tokens)), (
                agreed,
                wanted,
            )
    assert (num_found > 0) == (num_tokens > LONGEST)


def test_tenants_are_never_found_by_others_and_do_not_push_each_other_out() -> None:
    """Each has as many tokens as if it were alone; all replies repeat the same phrases."""
    together, alone = ReplyHistory(100), {tenant: ReplyHistory(100) for tenant in (US, THEM)}
    for number, (tokens, num_prompt) in enumerate(replies(seed=5, num=40, num_ids=6)):
        tenant = US if number % 7 == 0 else THEM
        for text in (tokens[:-3], tokens[: num_prompt + 4]):
            for each in (US, THEM):
                assert search(together, each, text) == search(alone[each], each, text)
        for history in (together, alone[tenant]):
            history.add(tenant, tokens, num_prompt)


def test_the_tenant_whose_last_reply_is_oldest_makes_room_and_leaves_nothing() -> None:
    history, tokens = ReplyHistory(100, max_tenants=2), np.arange(1, 61, dtype=np.int32)
    first, second, third = b"1", b"2", b"3"
    for tenant in (first, second, second, first, third):
        history.add(tenant, tokens + 100 * int(tenant), num_prompt=20)
    assert history.num_tokens == 100 + 56  # the first tenant has two replies
    is_found = {t: search(history, t, tokens[:40] + 100 * int(t))[0] == LONGEST for t in (first, second, third)}
    assert is_found == {first: True, second: False, third: True}
    assert search(history, third, tokens[:40] + 200)[0] == 0, "the third has the region of the second"
    assert search(history, third, tokens[:59] + 300) == (LONGEST, [360, 0, 0, 0, 0]), "and nothing is left in it"
    assert not history.is_empty
    history.clear()
    assert history.is_empty and not history.num_tokens
    assert all(search(history, t, tokens[:40] + 100 * int(t))[0] == 0 for t in (first, third))
    history.add(second, tokens, num_prompt=20)
    assert search(history, second, tokens[:40]) == (LONGEST, [41, 42, 43, 44, 45])


def test_a_request_without_a_reply_leaves_nothing() -> None:
    history = ReplyHistory(100)
    history.add(US, np.arange(1, 21, dtype=np.int32), num_prompt=20)
    assert history.is_empty


def test_a_short_request_is_kept_though_it_has_no_n_gram_yet() -> None:
    history = ReplyHistory(100)
    for first in (1, 2, 3):
        history.add(US, np.arange(first, first + 9, dtype=np.int32), num_prompt=2)
    assert history.num_tokens == 27
