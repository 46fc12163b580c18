"""Chain digests: what they tell apart and what they must not."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.core.digest import DIGEST_BYTES, Chain, chain, chain_of, namespace_digest, pack_tokens, strong_chain

CHAINS = (chain, strong_chain)
ROOT = namespace_digest("model", b"tenant")


def tokens(*values: int) -> bytes:
    return pack_tokens(np.array(values))


def test_parts_of_a_namespace_do_not_run_into_each_other() -> None:
    assert namespace_digest("ab", "c") != namespace_digest("a", "bc") != namespace_digest("abc")
    assert namespace_digest("a", "") != namespace_digest("a")
    assert namespace_digest("a", b"b") == namespace_digest(b"a", "b")


@pytest.mark.parametrize("link", CHAINS)
def test_one_digest_for_each_whole_page(link: Chain) -> None:
    digests = link(ROOT, tokens(1, 2, 3, 4, 5), 2)
    assert [len(digest) for digest in digests] == [DIGEST_BYTES, DIGEST_BYTES]
    assert link(ROOT, tokens(1), 2) == [] == link(ROOT, b"", 2)


@pytest.mark.parametrize("link", CHAINS)
@pytest.mark.parametrize("cut", [0, 2, 4, 6])
def test_a_chain_may_be_continued_from_its_last_digest(cut: int, link: Chain) -> None:
    key = tokens(1, 2, 3, 4, 5, 6)
    head = link(ROOT, key[: 4 * cut], 2)
    assert head + link([ROOT, *head][-1], key[4 * cut :], 2) == link(ROOT, key, 2)


@pytest.mark.parametrize("link", CHAINS)
def test_a_digest_covers_everything_before_it(link: Chain) -> None:
    key = tokens(1, 2, 3, 4)
    last = link(ROOT, key, 2)[-1]
    others = [tokens(9, 2, 3, 4), tokens(1, 9, 3, 4), tokens(1, 2, 9, 4), tokens(1, 2, 3, 9), tokens(3, 4, 1, 2)]
    assert all(link(ROOT, other, 2)[-1] != last for other in others)
    assert link(namespace_digest("model", b"other"), key, 2)[-1] != last


@pytest.mark.parametrize("link", CHAINS)
def test_equal_pages_in_a_row_have_different_digests(link: Chain) -> None:
    assert len(set(link(ROOT, tokens(*[7] * 8), 2))) == 4


def test_digests_are_the_same_on_every_machine() -> None:
    root, key = namespace_digest("a", "b"), tokens(1, 2)
    assert root.hex() == "cf6ab613e3942391f88ed698557e1680"
    assert chain(root, key, 1)[-1].hex() == "b6db430ac2798b6271b7ae08c142c1d1"
    assert strong_chain(root, key, 1)[-1].hex() == "7df9a3b456636736c25d0c967c03fd7f"


def test_a_store_wants_the_chain_that_nobody_can_make_collide() -> None:
    assert chain_of(is_strong=True) is strong_chain
    assert chain_of(is_strong=False) is chain


def test_tokens_are_packed_as_little_endian_int32_whatever_their_type_or_layout() -> None:
    expected = b"\x01\x00\x00\x00\xff\x01\x00\x00"
    assert pack_tokens(np.array([1, 511], dtype=np.int64)) == expected
    assert pack_tokens(np.array([1, 511], dtype=">i4")) == expected
    assert pack_tokens(np.array([1, 0, 511, 0], dtype=np.int32)[::2]) == expected
