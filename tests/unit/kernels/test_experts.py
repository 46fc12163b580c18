"""Kernels of experts against their plain twins, run by Triton's interpreter where there is no device."""

from __future__ import annotations

import pytest

from tests.helpers.interpreted import run_interpreted
from tests.helpers.widening import some

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.core.activation import Activation
from hiserve.kernels import experts, few_experts, reference

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(5)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2}

def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, generator=generator) * scale).to(dtype)

def typed(sizes, is_wide):
    # Sizes with a type and its tolerance: types take turns, or each meets all sizes.
    types = list(TOLERANCE.items())
    for place, its in enumerate(sizes):
        for dtype, tolerance in types if is_wide else types[place % 3 :][:1]:
            yield *its, dtype, tolerance
"""
ROUTES = """
for dtype, tolerance in TOLERANCE.items():
    for tokens, num_experts, count in ((1, 6, 2), (7, 5, 5), (3, 128, 8), (0, 6, 2)):
        # distinct values, so that no two experts are equally likely
        logits = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(tokens)] or
                             [torch.zeros(num_experts)])[:tokens].to(dtype) / 16
        for is_normalized in (True, False):
            (shares, chosen), (their_shares, theirs) = (
                module.route(logits, count, is_normalized) for module in (experts, reference))
            assert chosen.dtype == theirs.dtype and torch.equal(chosen, theirs)
            assert shares.dtype == their_shares.dtype
            assert_close(shares, their_shares, atol=1e-6, rtol=0)
    # a shared expert with a gate, which has one more share.
    logits, gated = randn(3, 6, dtype=dtype), (randn(3, 20, dtype=dtype), randn(20, dtype=dtype))
    gated[0][0], gated[1][:2] = 0, torch.tensor([1, 2.0**-12])
    gated[0][0, :2] = 1  # in 16 bits the product is rounded to 1
    (shares, chosen), (their_shares, theirs) = (
        module.route(logits, 2, True, gated) for module in (experts, reference))
    assert_close(shares[0], their_shares[0], atol=1e-6, rtol=0)
    assert torch.equal(chosen, theirs) and shares.shape == (3, 3) and shares.dtype == their_shares.dtype
    assert_close(shares, their_shares, atol=tolerance / 10, rtol=0)
equal = torch.zeros(2, 6)
equal[1, 4] = 1
assert experts.route(equal, 3, True)[1].tolist() == [[0, 1, 2], [4, 0, 1]]
for value in (torch.nan, torch.inf, -torch.inf):
    chosen = experts.route(torch.full((1, 5), value), 3, True)[1]
    assert chosen.sort().values.tolist() == [[0, 1, 2]], (value, chosen)
"""
GROUPS = """
for tokens, count, num_experts in ((1, 1, 1), (50, 3, 4), (700, 2, 3), (4700, 2, 3), (0, 2, 3)):
    chosen = torch.stack([torch.randperm(num_experts, generator=generator)[:count] for _ in range(tokens)] or
                         [torch.zeros(count, dtype=torch.int64)])[:tokens]
    order, ends = experts._group(chosen, num_experts, chosen.numel())
    assert torch.equal(order.long(), chosen.flatten().argsort(stable=True))
    assert ends.tolist() == torch.bincount(chosen.flatten(), minlength=num_experts).cumsum(0).tolist()
    if tokens:  # one more expert, which all choose
        more, their_ends = experts._group(chosen, num_experts, chosen.numel() + tokens)
        assert torch.equal(more[:chosen.numel()], order)
        assert torch.equal(more[chosen.numel():].long(), chosen.numel() + torch.arange(tokens))
        assert their_ends.tolist() == [*ends.tolist(), chosen.numel() + tokens]
"""
MIXES = """
few_experts._GATE_DEPTH = few_experts._DOWN_DEPTH = 16  # less than a row
# (tokens, experts, experts per token, hidden, inner): one token, uneven sizes, experts without tokens, tall blocks, tall
# ones of which the last are filled by half, or less, and whose rows blocks fill; every third is float64, which has no kernel
for tokens, num_experts, count, hidden, inner, dtype, tolerance in typed((
    (0, 4, 2, 16, 16), (1, 6, 2, 40, 24), (9, 5, 2, 70, 40), (2, 4, 2, 48, 33), (35, 2, 2, 48, 33), (70, 2, 2, 48, 33),
    (3, 4, 2, 48, 33), (130, 4, 2, 64, 64)
), IS_WIDE):
    x = randn(tokens, hidden, dtype=dtype)
    gate_up = randn(num_experts, 2 * inner, hidden, dtype=dtype, scale=0.2)
    down = randn(num_experts, hidden, inner, dtype=dtype, scale=0.2)
    shares, chosen = reference.route(randn(tokens, num_experts, dtype=dtype), count, True)
    got = experts.mix_experts(x, shares, chosen, gate_up, down)
    expected = reference.mix_experts(x, shares, chosen, gate_up, down)
    assert got.dtype == dtype and got.shape == x.shape
    assert_close(got, expected, atol=tolerance, rtol=tolerance)
    shared = randn(2 * inner, hidden, dtype=dtype, scale=0.2), randn(hidden, inner, dtype=dtype, scale=0.2)
    got, without = experts.mix_experts(x, shares, chosen, gate_up, down, shared=shared), expected
    expected = reference.mix_experts(x, shares, chosen, gate_up, down, shared=shared)
    assert_close(got, expected, atol=2 * tolerance, rtol=tolerance)
    assert not tokens or (expected - without).abs().max() > 0.05
    shares = torch.cat((shares, torch.rand(tokens, 1, generator=generator).to(shares.dtype)), 1)  # its own too
    assert_close(experts.mix_experts(x, shares, chosen, gate_up, down), without, atol=tolerance, rtol=tolerance)
    got, whole = experts.mix_experts(x, shares, chosen, gate_up, down, shared=shared), expected
    expected = reference.mix_experts(x, shares, chosen, gate_up, down, shared=shared)
    assert_close(got, expected, atol=2 * tolerance, rtol=tolerance)
    assert not tokens or (expected - whole).abs().max() > 0.05
"""
BIASES = """
LIMITED = Activation(slope=1.702, shift=1.0, limit=2.0)
for tokens, inner, dtype, tolerance in typed(((2, 40), (1, 40), (9, 40), (2, 16), (70, 33)), IS_WIDE):
    x = randn(tokens, 48, dtype=dtype)
    gate_up, down = randn(4, 2 * inner, 48, dtype=dtype, scale=0.3), randn(4, 48, inner, dtype=dtype, scale=0.2)
    weights = gate_up, down, randn(4, 2 * inner, dtype=dtype), randn(4, 48, dtype=dtype)
    shares, chosen = reference.route(randn(tokens, 4, dtype=dtype), 2, True)
    got = experts.mix_experts(x, shares, chosen, *weights, LIMITED)
    assert_close(got, reference.mix_experts(x, shares, chosen, *weights, LIMITED), atol=2 * tolerance, rtol=tolerance)
    assert (got - experts.mix_experts(x, shares, chosen, gate_up, down, activation=LIMITED)).abs().max() > 0.1
x = torch.full((1, 16), torch.nan)
broken = experts.mix_experts(x, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), randn(1, 16, 16), randn(1, 16, 8),
                             activation=LIMITED)
assert broken.isnan().all(), "a limit hides NaN"
"""
OTHERS = """
x, gate_up, down = randn(4, 24), randn(6, 32, 24), randn(6, 24, 16)
gate_up[2] = torch.nan
shares, chosen = torch.ones(4, 1), torch.tensor([[0], [1], [2], [5]])
out = experts.mix_experts(x, shares, chosen, gate_up, down)
assert out.isfinite().all(1).tolist() == [True, True, False, True]
"""

BOUNDS = """
from triton.runtime.interpreter import InterpreterBuilder

read, load = set(), InterpreterBuilder.create_masked_load
def note(self, ptrs, mask, *others):
    read.update(ptrs.data[mask.data].tolist())
    return load(self, ptrs, mask, *others)

room = torch.tensor([1, 0, 1 << 40])  # two choices, and what may lie behind them
weights = randn(2, 32, 24), randn(2, 24, 16)
InterpreterBuilder.create_masked_load = note
experts.mix_experts(randn(1, 24), torch.ones(1, 2), room[None, :2], *weights, shared=(randn(32, 24), randn(24, 16)))
InterpreterBuilder.create_masked_load = load
assert [room.data_ptr() + 8 * place in read for place in range(3)] == [True, True, False]
"""

SPANS = """
from triton.runtime.interpreter import InterpreterBuilder

spans, load, multiply = [], InterpreterBuilder.create_masked_load, experts.multiply
def check(self, ptrs, mask, *others):
    places = ptrs.data[mask.data].astype("int64")
    is_inside = sum(((first <= places) & (places < end) for first, end in spans), start=places < 0)
    assert not spans or is_inside.all(), places[~is_inside]
    return load(self, ptrs, mask, *others)

def watched(*given):
    spans[:] = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in given if isinstance(each, torch.Tensor)]
    multiply(*given)
    spans.clear()

experts.multiply, InterpreterBuilder.create_masked_load = watched, check
# Of the last expert: less than a block of rows, a whole one and a half, of fewer columns than a block has; of the first none.
for tokens in (9, 130):
    x, shares, chosen = randn(tokens, 48), torch.ones(tokens, 1), torch.ones(tokens, 1, dtype=torch.int64)
    weights = randn(2, 66, 48), randn(2, 48, 33)
    for options in ({}, {"shared": (randn(66, 48), randn(48, 33))}):
        found = experts.mix_experts(x, shares, chosen, *weights, **options)
        assert_close(found, reference.mix_experts(x, shares, chosen, *weights, **options), atol=1e-2, rtol=1e-3)
"""


@pytest.mark.parametrize("is_wide", some((False, True), False))
def test_kernels_of_experts_compute_what_their_twins_do(is_wide: bool) -> None:
    run_interpreted(f"IS_WIDE = {is_wide}\n" + HEADER + ROUTES + GROUPS + MIXES + BIASES + OTHERS)


def test_the_turn_of_the_expert_that_computes_all_reads_no_choice() -> None:
    run_interpreted(HEADER + BOUNDS)


def test_products_of_experts_read_nothing_beside_their_tensors() -> None:
    """Most of their loads have no mask."""
    run_interpreted(HEADER + SPANS)
