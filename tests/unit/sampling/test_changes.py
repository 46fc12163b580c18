"""Changes of logits at the edge of what numbers can hold."""

from __future__ import annotations

import pytest
import torch

from hiserve.core.request import SamplingParams
from hiserve.sampling.params import SamplingRows
from hiserve.sampling.sampler import sample, scores
from tests.helpers.sampling import CPU, admit, gather

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
