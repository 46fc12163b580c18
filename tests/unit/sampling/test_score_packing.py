"""Scores of tokens: log-softmax of the model's own logits, and the likeliest tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hiserve.sampling.sampler
from hiserve.core.plan import Scores
from hiserve.sampling.sampler import MAX_SCORED, aligned, pack_scores

VOCAB = 333


def made(count: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    logits = (torch.randn((count, VOCAB), generator=generator, dtype=torch.float64) * 4).to(dtype)
    return logits, torch.randint(0, VOCAB, (count,), generator=generator)


def unpacked(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Scores:
    return Scores.unpack(pack_scores(logits, tokens, num_top).numpy().tobytes(), num_top)


def reference(logits: np.ndarray) -> np.ndarray:
    """In float64, by numpy."""
    best = logits.max(-1, keepdims=True)
    return logits - best - np.log(np.exp(logits - best).sum(-1, keepdims=True))


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("count", [1, 3, MAX_SCORED, 2 * MAX_SCORED + 5])
def test_scores_are_the_rounded_log_softmax(count: int, num_top: int) -> None:
    logits, tokens = made(count)
    scores, wanted = unpacked(logits, tokens, num_top), reference(logits.numpy())
    own = wanted[np.arange(count), tokens.numpy()]
    assert (np.abs(scores.logprobs - own) <= np.spacing(np.abs(own).astype(np.float32))).all()
    order = np.argsort(-wanted, axis=-1)[:, :num_top]
    assert (scores.top_tokens == order).all()
    top = np.take_along_axis(wanted, order, 1)
    assert scores.top_logprobs.shape == (count, num_top)
    assert (np.abs(scores.top_logprobs - top) <= np.spacing(np.abs(top).astype(np.float32))).all()


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_narrow_logits_are_widened_first(dtype: torch.dtype, atol: float) -> None:
    logits, tokens = made(7, dtype)
    wanted = reference(logits.double().numpy())
    np.testing.assert_allclose(unpacked(logits, tokens, 5).logprobs, wanted[np.arange(7), tokens], atol=atol, rtol=0)


def test_equal_tokens_come_lowest_first_also_where_the_list_ends() -> None:
    logits = torch.zeros((1, VOCAB), dtype=torch.bfloat16)
    logits[0, [200, 100, 300]] = 2.0
    assert unpacked(logits, torch.tensor([5]), 5).top_tokens.tolist() == [[100, 200, 300, 0, 1]]


def test_a_certain_token_has_logprob_zero_and_an_impossible_one_minus_infinity() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 8] = 3.0
    scores = unpacked(logits, torch.tensor([8, 9]), 2)
    assert scores.logprobs.tolist() == [0.0, -np.inf]
    assert scores.top_tokens[0].tolist() == [8, 0]
    assert scores.top_logprobs[0].tolist() == [0.0, -np.inf]


def test_no_tokens_have_no_scores() -> None:
    scores = unpacked(torch.zeros((0, VOCAB)), torch.zeros(0, dtype=torch.int64), 4)
    assert scores.logprobs.shape == (0,)
    assert scores.top_tokens.shape == (0, 4)


@pytest.mark.parametrize("vocab_size", [331, 332, 333, 334])
def test_rows_of_logits_begin_at_multiples_of_16_bytes_when_they_are_summed(vocab_size: int) -> None:
    """Otherwise the order of a sum on CUDA would depend on the row's place in the batch."""
    logits = torch.randn((5, vocab_size), generator=torch.Generator().manual_seed(1))
    rows = aligned(logits)
    assert rows.stride(0) * rows.itemsize % 16 == 0 and rows.shape[1] - vocab_size < 4
    assert torch.equal(rows[:, :vocab_size], logits) and (rows[:, vocab_size:] == -torch.inf).all()


def test_wide_copies_hold_one_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    pack = hiserve.sampling.sampler._pack
    monkeypatch.setattr(
        hiserve.sampling.sampler,
        "_pack",
        lambda logits, *rest: (seen.append(len(logits)), pack(logits, *rest))[1],
    )
    pack_scores(*made(300), 1)
    assert seen == [128, 128, 44]
