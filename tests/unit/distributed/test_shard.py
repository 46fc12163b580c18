"""The shares of ranks are a partition."""

from __future__ import annotations

import pytest

from hiserve.distributed.shard import VOCABULARY_STEP, Shard


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocab_size", [320, 4096, 151_936, 32_001])
def test_each_token_is_of_one_rank_and_shares_begin_with_whole_blocks(size: int, vocab_size: int) -> None:
    shares = [Shard(rank, size).tokens(vocab_size) for rank in range(size)]
    assert [token for begin, end in shares for token in range(begin, end)] == list(range(vocab_size))
    assert all(begin % VOCABULARY_STEP == 0 for begin, end in shares if begin < end)
    assert max(end - begin for begin, end in shares) <= Shard(0, size).token_share(vocab_size)


@pytest.mark.parametrize(
    ("count", "size", "heads"), [(4, 2, [(0, 2), (2, 4)]), (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)])]
)
def test_with_fewer_key_heads_than_ranks_neighbours_hold_the_same(
    count: int, size: int, heads: list[tuple[int, int]]
) -> None:
    assert [Shard(rank, size).kv_heads(count) for rank in range(size)] == heads
