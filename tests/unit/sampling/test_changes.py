"""Changes of logits at the edge of what numbers can hold."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from hiserve.core.request import Grammar, SamplingParams
from hiserve.kernels.step_ops import TokenMasks
from hiserve.sampling.params import SamplingRows
from hiserve.sampling.sampler import sample, scores
from tests.helpers.sampling import CPU, admit, batch, gather

ENDS = (1,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("repetition", [1e-30, 1e-60, 1e-320])
def test_a_vanishing_repetition_penalty_leaves_numbers(
    dtype: torch.dtype, temperature: float, repetition: float
) -> None:
    """It is 0 in float32; the end token, forbidden and known, must stay forbidden, and what is known win."""
    params = SamplingParams(temperature=temperature, repetition_penalty=repetition, min_tokens=5, seed=3)
    known = torch.tensor([[0] * 4, [1, 2, 3, 4]], dtype=torch.int32)
    logits = torch.tensor([[2.0, 9.0, 8.0, 7.0, -6.0, 1.0]], dtype=dtype) * 10
    rows = SamplingRows(2, CPU, ENDS)
    rows.write([admit(1, params, tokens=[1, 2, 3, 4])])
    batch = gather(rows, [1], [4], known)
    got = scores(logits, batch)[0]
    assert not got.isnan().any()
    assert got[1] == -torch.inf
    assert int(sample(logits, batch)) in (2, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_token_that_a_mask_forbids_is_never_drawn_and_the_others_keep_their_scores(dtype: torch.dtype) -> None:
    """In each way of drawing, with penalties and biases that would have it; the logits stay as they were."""
    generator = torch.Generator().manual_seed(5)
    ways = [
        SamplingParams(temperature=0.0, seed=1),
        SamplingParams(seed=2),
        SamplingParams(seed=3, top_k=5),
        SamplingParams(seed=4, top_p=0.5),
        SamplingParams(seed=5, temperature=0.0, logit_bias={7: 100.0}, repetition_penalty=1.5),
        SamplingParams(seed=6, min_p=0.1, presence_penalty=-2.0),
    ]
    size, num_rows = 70, len(ways)
    logits = torch.randn((num_rows, size), generator=generator, dtype=torch.float64).to(dtype)
    logits[:, 7] = 50.0
    words = torch.full((2, 3), -1, dtype=torch.int32)
    words[1, 0] = ~(1 << 7)
    words[1, 2] = 0  # tokens from 64 on
    for entries in ([-1] * num_rows, [0] * num_rows, [1, -1, 1, 0, 1, 1]):
        # With rows that are free alone, the first mask forbids too: they must not read it.
        masks = TokenMasks(torch.tensor(entries, dtype=torch.int32), words if max(entries) >= 0 else words.flip(0))
        plain, before = batch(ways, range(10, 10 + num_rows)), logits.clone()
        got, free = scores(logits, replace(plain, masks=masks)), scores(logits, plain)
        tokens = sample(logits, replace(plain, masks=masks)).tolist()
        assert torch.equal(logits, before)
        for row, entry in enumerate(entries):
            if entry == 1:
                assert got[row, 7] == -torch.inf and (got[row, 64:] == -torch.inf).all()
                assert tokens[row] != 7 and tokens[row] < 64
            else:
                assert torch.equal(got[row], free[row])
                assert tokens[row] == 7


def test_a_grammar_yields_neither_to_min_tokens_nor_holds_back_an_end() -> None:
    """Where it may only end, an end token that ``min_tokens`` forbids would leave no token at all."""
    rows = SamplingRows(3, CPU, ENDS)
    asked = SamplingParams(temperature=0.0, seed=1, min_tokens=9, stop_token_ids=(2,))
    grammar = Grammar.of("choice", '["a"]')
    rows.write([admit(1, asked), admit(2, msgspec.structs.replace(asked, grammar=grammar))])
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]] * 2)
    assert sample(logits, gather(rows, [1, 2], [3, 3])).tolist() == [3, 1]
