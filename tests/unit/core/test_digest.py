"""Chain digests: what they tell apart and what they must not."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.core.digest import DIGEST_BYTES, chain, namespace_digest, pack_tokens

ROOT = namespace_digest("model", b"tenant")


def tokens(*values: int) -> bytes:
    return pack_tokens(np.array(values))


def test_parts_of_a_namespace_do_not_run_into_each_other() -> None:
    assert namespace_digest("ab", "c") != namespace_digest("a", "bc") != namespace_digest("abc")
    assert namespace_digest("a", "") != namespace_digest("a")
    assert namespace_digest("a", b"b") == namespace_digest(b"a", "b")


def test_one_digest_for_each_whole_page() -> None:
    digests = chain(ROOT, tokens(1, 2, 3, 4, 5), page_size=2)
    assert [len(digest) for digest in digests] == [DIGEST_BYTES, DIGEST_BYTES]
    assert chain(ROOT, tokens(1), page_size=2) == [] == chain(ROOT, b"", page_size=2)


@pytest.mark.parametrize("cut", [0, 2, 4, 6])
def test_a_chain_may_be_continued_from_its_last_digest(cut: int) -> None:
    key = tokens(1, 2, 3, 4, 5, 6)
    head = chain(ROOT, key[: 4 * cut], page_size=2)
    assert head + chain([ROOT, *head][-1], key[4 * cut :], page_size=2) == chain(ROOT, key, page_size=2)


def test_a_digest_covers_everything_before_it() -> None:
    key = tokens(1, 2, 3, 4)
    last = chain(ROOT, key, page_size=2)[-1]
    others = [tokens(9, 2, 3, 4), tokens(1, 9, 3, 4), tokens(1, 2, 9, 4), tokens(1, 2, 3, 9), tokens(3, 4, 1, 2)]
    assert all(chain(ROOT, other, page_size=2)[-1] != last for other in others)
    assert chain(namespace_digest("model", b"other"), key, page_size=2)[-1] != last


def test_equal_pages_in_a_row_have_different_digests() -> None:
    assert len(set(chain(ROOT, tokens(*[7] * 8), page_size=2))) == 4


def test_digests_are_the_same_on_every_machine() -> None:
    assert chain(namespace_digest("a", "b"), tokens(1, 2), page_size=1)[-1].hex() == "735a9183ae367f90049847f64411dc56"


def test_tokens_are_packed_as_little_endian_int32_whatever_their_type_or_layout() -> None:
    expected = b"\x01\x00\x00\x00\xff\x01\x00\x00"
    assert pack_tokens(np.array([1, 511], dtype=np.int64)) == expected
    assert pack_tokens(np.array([1, 511], dtype=">i4")) == expected
    assert pack_tokens(np.array([1, 0, 511, 0], dtype=np.int32)[::2]) == expected
