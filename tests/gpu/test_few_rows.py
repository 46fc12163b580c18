"""Products of few rows on a GPU: those that end with an activation, or are added up by a norm, have the bits of launches of their own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hiserve.core.activation import GELU_TANH, SILU, Activation
from hiserve.kernels import fused, skinny_linear
from hiserve.kernels.parts import Parts
from hiserve.kernels.parts_triton import summed
from hiserve.kernels.terms_triton import norm_terms

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(BF16)


@pytest.mark.parametrize("shape", [(28_672, 4096), (6144, 1024), (9000, 520)], ids=str)
@pytest.mark.parametrize(
    "activation", [SILU, GELU_TANH, Activation(slope=1.702, shift=1.0, limit=7.0)], ids=["silu", "gelu", "capped"]
)
def test_gates_and_ups_become_activations(shape: tuple[int, int], activation: Activation) -> None:
    weight, bias = randn(*shape, seed=1) / shape[1] ** 0.5, randn(shape[0], seed=2)
    for num_rows in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129):
        x = randn(num_rows, shape[1], seed=num_rows)
        for given in (None, bias):
            found = fused.act_linear(x, weight, given, activation)
            project = skinny_linear.linear
            if 32 < num_rows <= 128 and shape[1] % 128 == 0:
                # Without an activation these are a library's.
                project = partial(skinny_linear._tiled_linear, is_early=True)
            expected = fused.act_mul(project(x, weight, given), activation)
            assert torch.equal(found, expected), (num_rows, (found - expected).abs().max())
            exact = fused.act_mul(
                (x.double() @ weight.double().T + (0 if given is None else given.double())).to(BF16), activation
            )
            torch.testing.assert_close(found, exact, atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("shape", [(4096, 14_336), (4096, 4096), (1024, 3072)], ids=str)
def test_norms_add_parts_up(shape: tuple[int, int]) -> None:
    weight, bias, norm = randn(*shape, seed=1) / shape[1] ** 0.5, randn(shape[0], seed=2), randn(shape[0], seed=3)
    seen = set()
    for num_rows in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129):
        x, residual = randn(num_rows, shape[1], seed=num_rows), randn(num_rows, shape[0], seed=num_rows + 1)
        for given in (None, bias):
            parts = skinny_linear.linear_parts(x, weight, given)
            seen.add(isinstance(parts, Parts))
            ours, theirs = residual.clone(), residual.clone()
            found = fused.add_rms_norm(parts, ours, norm, 1e-6)
            expected = fused.add_rms_norm(summed(parts), theirs, norm, 1e-6)
            assert torch.equal(ours, theirs) and torch.equal(found, expected), num_rows
            terms = [norm_terms(residual.clone(), each, norm, 1e-6) for each in (parts, summed(parts))]
            assert all(
                torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(*terms, strict=True)
            )
            whole = (x.double() @ weight.double().T + (0 if given is None else given.double())).to(BF16)
            torch.testing.assert_close(summed(parts), whole, atol=2e-2, rtol=2e-2)
    assert seen == {True, False}
