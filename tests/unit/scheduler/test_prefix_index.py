"""The prefix index answers as a brute-force search over each worker's pages would."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hiserve.core.digest import chain, namespace_digest, pack_tokens
from hiserve.scheduler.placement import HASHED_PAGES, PrefixIndex

BASE = b"b" * 16
PAGE = 4


def digests(tokens: list[int], namespace: bytes = b"") -> list[bytes]:
    return chain(namespace_digest(BASE, namespace), pack_tokens(np.array(tokens)), PAGE)


def index_with(tokens: list[int], *, replica: int = 0) -> PrefixIndex:
    index = PrefixIndex(PAGE)
    index.attach(replica, BASE)
    index.update(replica, b"".join(digests(tokens)), b"")
    return index


def ask(index: PrefixIndex, tokens: list[int], *, replica: int = 0, namespace: bytes = b"") -> int:
    return index.match(index.prefix(np.array(tokens, dtype=np.int32), namespace), replica)


def test_whole_pages_match_and_the_last_token_is_always_computed() -> None:
    index = index_with(list(range(12)))
    assert ask(index, [*range(12), 99]) == 12
    assert ask(index, list(range(12))) == 8
    assert ask(index, list(range(11))) == 8
    assert ask(index, [*range(6), 99, 99, 99]) == 4
    assert ask(index, [99, *range(12)]) == 0


def test_tenants_do_not_see_each_others_pages() -> None:
    index = index_with(list(range(12)))
    assert ask(index, list(range(13)), namespace=b"other") == 0


def test_removed_pages_end_the_match() -> None:
    index = index_with(list(range(12)))
    index.update(0, b"", digests(list(range(12)))[2])
    assert ask(index, list(range(13))) == 8


def test_a_page_is_there_until_the_last_tier_has_lost_it() -> None:
    index = index_with(list(range(12)))
    pages = digests(list(range(12)))
    index.update(0, b"".join(pages), b"")  # on the host too
    index.update(0, b"", b"".join(pages[1:]))  # evicted from the device
    assert ask(index, list(range(13))) == 12
    index.update(0, b"", pages[2])
    assert ask(index, list(range(13))) == 8
    assert len(index._pages[0]) == 2


def test_a_prefix_asked_again_follows_growth_eviction_and_a_new_worker() -> None:
    index = PrefixIndex(PAGE)
    index.attach(0, BASE)
    pages = digests(list(range(16)))
    prefix = index.prefix(np.arange(17, dtype=np.int32), b"")
    assert index.match(prefix, 0) == 0
    index.update(0, b"".join(pages[:3]), b"")
    assert index.match(prefix, 0) == 12
    index.update(0, pages[3], pages[2] + pages[3])
    assert index.match(prefix, 0) == 8
    index.detach(0)
    index.attach(0, BASE)
    assert index.match(prefix, 0) == 0


def test_a_long_prompt_that_differs_early_is_hashed_no_further_than_one_block() -> None:
    index = index_with(list(range(8)))
    prefix = index.prefix(np.arange(100_000, dtype=np.int32), b"")
    assert index.match(prefix, 0) == 8
    assert len(prefix.digests) == HASHED_PAGES


def test_a_prompt_longer_than_one_block_matches_across_blocks() -> None:
    tokens = list(range(3 * HASHED_PAGES * PAGE))
    assert ask(index_with(tokens), [*tokens, 5]) == len(tokens)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_match_equals_brute_force(data: st.DataObject) -> None:
    index = PrefixIndex(PAGE)
    held: dict[int, list[list[int]]] = {0: [], 1: []}
    for replica in held:
        index.attach(replica, BASE)
    sequences = st.lists(st.integers(0, 1), min_size=1, max_size=20)
    asked = [(tokens, index.prefix(np.array(tokens, dtype=np.int32), b"")) for tokens in data.draw(st.lists(sequences))]
    for _ in range(data.draw(st.integers(0, 12))):
        replica = data.draw(st.integers(0, 1))
        if held[replica] and data.draw(st.booleans()):
            held[replica].pop(data.draw(st.integers(0, len(held[replica]) - 1)))
        else:
            held[replica].append(data.draw(sequences))
        pages = {digest for tokens in held[replica] for digest in digests(tokens)}
        have = index._pages[replica].keys()
        index.update(replica, b"".join(pages - have), b"".join(have - pages))
        for tokens, prefix in asked:
            for worker, cached in held.items():
                longest = max((shared(tokens, other) for other in cached), default=0)
                assert index.match(prefix, worker) == min(longest, (len(tokens) - 1) // PAGE) * PAGE


def shared(left: list[int], right: list[int]) -> int:
    """Full pages two sequences have in common."""
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length // PAGE
