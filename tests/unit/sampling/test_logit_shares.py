"""Tokens joined from the shares of ranks over gloo: those of the whole logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hiserve.distributed.collectives import Collectives
from hiserve.distributed.exchange import Exchanged
from hiserve.kernels import step_reference
from hiserve.kernels.step_ops import TokenMasks
from hiserve.sampling.logit_shares import LogitShares
from tests.helpers.gloo import together
from tests.helpers.sampling import keys, random_logits, random_masks

VOCABULARY = 1303  # the last rank has fewer tokens than its share
NUM_ROWS = 40


def shares_of(exchange: Collectives) -> LogitShares:
    return LogitShares.of(step_reference, exchange, VOCABULARY)


def case(dtype: torch.dtype, *, is_masked: bool) -> tuple[Tensor, TokenMasks | None, tuple[Tensor, ...], Tensor]:
    """Logits with ties on both sides of each bound between ranks, masks of which one leaves most ranks nothing, draws, and which rows draw."""
    generator = torch.Generator().manual_seed(11)
    logits = random_logits(generator, NUM_ROWS, VOCABULARY, dtype)
    for row, first in enumerate(range(383, VOCABULARY, 64)):
        logits[row, [first, first + 1]] = logits[row].amax() + 8  # the last token of a block and the first of the next
    logits[20, 5:] = -torch.inf
    logits[21, :1290] = -torch.inf
    temperature, seed, choice, position = keys(generator, NUM_ROWS)
    temperature[3] = 1e-300
    masks = random_masks(generator, NUM_ROWS, VOCABULARY) if is_masked else None
    if masks is not None:
        masks.words[1] = 0
        masks.words[1, -1] = 1 << (VOCABULARY - 1) % 32  # the last token alone
    return logits, masks, (temperature, seed, choice, position), torch.arange(NUM_ROWS) % 3 > 0


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_join_the_tokens_of_whole_logits(size: int, tmp_path: Path) -> None:
    cases = [
        case(dtype, is_masked=is_masked) for dtype in (torch.bfloat16, torch.float64) for is_masked in (False, True)
    ]

    def work(exchange: Collectives) -> list[Tensor]:
        shares, tokens = shares_of(exchange), []
        columns = slice(*exchange.shard.tokens(VOCABULARY))
        for logits, masks, keyed, is_drawn in cases:
            ours = logits[:, columns]
            exchange.expect([shares.exchanged(NUM_ROWS, logits.dtype, is_whole=each == 3) for each in range(4)])
            tokens += [
                shares.greedy(ours, masks),
                *(shares.draw_free(ours, *keyed, each, masks) for each in (None, is_drawn)),
            ]
            assert torch.equal(shares.whole(ours), logits)
            assert not shares.greedy(ours[:0]).numel()  # a step in which no row samples exchanges nothing
            exchange.expect(None)
        return tokens

    expected = [
        token
        for logits, masks, keyed, is_drawn in cases
        for token in (
            step_reference.greedy(logits, masks),
            *(step_reference.draw_free(logits, *keyed, each, masks) for each in (None, is_drawn)),
        )
    ]
    bound = -(-VOCABULARY // (size * 64)) * 64
    assert {bound - 1} <= set(expected[0].tolist())  # of two equal ones, on two ranks, the lower
    for tokens in together(tmp_path, size, work):
        assert all(torch.equal(*both) for both in zip(tokens, expected, strict=True))


def test_shares_in_which_a_token_has_any_place_join_too(tmp_path: Path) -> None:
    """As those of a draft head of fewer tokens, of which each rank spreads its own: of equal ones the lowest, on whatever rank."""
    logits = torch.zeros(3, 10)
    logits[1, [2, 7]] = logits[2, 9] = 1.0

    def work(exchange: Collectives) -> list[int]:
        is_ours = torch.arange(10) % 2 != exchange.shard.rank  # the first rank has the odd ones
        shares = LogitShares(step_reference, exchange, 10, 0)
        tokens: list[int] = shares.greedy(logits.masked_fill(~is_ours, -torch.inf)).tolist()
        return tokens

    assert together(tmp_path, 2, work) == [[0, 2, 9]] * 2


def test_entries_take_16_bytes_a_row() -> None:
    exchanged = LogitShares.exchanged(LogitShares(step_reference, None, 9, 0), 5, torch.bfloat16, is_whole=False)  # type: ignore[arg-type]
    assert exchanged == Exchanged("gather", 5, 4, torch.float32)
