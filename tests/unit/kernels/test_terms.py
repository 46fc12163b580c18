"""Inputs in two terms of E4M3, and products of them, against float64, in Triton's interpreter."""

from __future__ import annotations

import torch

from hiserve.kernels.terms import split_terms
from tests.helpers.interpreted import run_interpreted
from tests.helpers.terms import spell

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.core.activation import GELU_TANH
from hiserve.core.quantization import QuantSpec
from hiserve.kernels import fused, quantized, quantized_linear, reference, term_products, terms, terms_triton
from hiserve.kernels.parts import Parts
from hiserve.kernels.parts_triton import summed
from hiserve.kernels.quantized import QuantizedWeight, pack_codes, quantize
from tests.helpers.terms import spell

torch.set_num_threads(1)
term_products.num_processors = lambda device: 3
generator = torch.Generator().manual_seed(5)

def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=generator).to(dtype)

def weight_of(kind, rows, columns):
    if kind == "rows":
        return quantize(randn(rows, columns), QuantSpec(8, "e4m3", (1, 0)))
    if kind == "blocks":
        return quantize(randn(rows, columns) * torch.rand(columns, generator=generator), QuantSpec(8, "e4m3", (128, 128)))
    if kind == "int":
        return quantize(randn(rows, columns), QuantSpec(4, "int", (1, 128)))
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 17, (columns // 128, rows), generator=generator, dtype=torch.uint8)
    order = torch.randperm(columns, generator=generator).int()
    spec, scales = QuantSpec(4, "uint", (1, 128)), (torch.rand(columns // 128, rows, generator=generator) + 0.5).half()
    return QuantizedWeight(spec, (rows, columns), pack_codes(codes, spec), scales, zeros, order)
"""
PRODUCTS = """
# Tiles of 64 and of 128 columns, and parts of a depth that they do not divide.
for kind, rows, columns in (("rows", 192, 1152), ("blocks", 384, 256), ("int", 64, 1152), ("uint", 128, 128)):
    weight, bias = weight_of(kind, rows, columns), randn(rows)
    values = quantized.dequantize(weight, torch.float64)
    x = randn(17 if kind == "rows" else 9, columns)
    x[1] *= 1e-30
    expected = x.double() @ values.T
    split = terms_triton.split_terms(x, weight.order)
    whole = summed(term_products.term_parts(split, weight, None, torch.float32))
    error = (whole.double() - expected).abs().amax(1) / expected.abs().amax(1)
    assert error.max() < 2e-6, (kind, error)
    one = terms.Terms(*(each[:1] for each in split))  # the same in any batch, but for its bias
    assert_close(summed(term_products.term_parts(one, weight, bias, torch.float32)), whole[:1] + bias.float())
    x[0, 7], x[2, 100] = torch.inf, torch.nan
    found = quantized_linear.quantized_linear(x[:5], weight, None)
    assert found.dtype == x.dtype
    assert [row for row in range(5) if not found[row].isfinite().any()] == [0, 2], kind
    assert_close(found[3:].double(), expected[3:5], rtol=8e-3, atol=1e-3 * float(expected.abs().max()))
"""
READERS = """
weight, sorted_weight = weight_of("rows", 64, 1152), weight_of("uint", 64, 1152)
norm, residual, delta = randn(1152), randn(3, 1152), randn(3, 1152)
gate_up = randn(3, 2304)
narrow = [each.half() for each in (residual, delta, norm, gate_up)]
for reader in (None, sorted_weight):
    for given in (None, delta):
        assert isinstance(fused.norm_inputs(residual.clone(), given, norm, 1e-6, reader), torch.Tensor)
    assert isinstance(fused.act_inputs(gate_up, GELU_TANH, reader), torch.Tensor)
for given in ((residual.repeat(11, 1), None, norm, 1e-6, weight), (narrow[0], narrow[1], narrow[2], 1e-6, weight)):
    assert isinstance(fused.norm_inputs(*given), torch.Tensor)  # too many rows, and a type of more precision

# The interpreter rounds to bfloat16 otherwise than torch; of float16 it rounds as torch does.
residual, delta, norm, gate_up = narrow
term_products.has_terms = lambda x, weight: True
parts = Parts(torch.randn(3, 3, 1152, generator=generator), norm, torch.float16)
for given in (None, delta, parts):
    before, after = residual.clone(), residual.clone()
    found = fused.norm_inputs(after, given, norm, 1e-6, weight)
    expected = reference.norm_inputs(before, summed(given) if isinstance(given, Parts) else given, norm, 1e-6, weight)
    assert torch.equal(before, after)
    assert_close(spell(found), spell(terms.split_terms(expected)), rtol=4e-3, atol=1e-5)
    assert_close(found.sums, expected.float().view(3, 9, 128).sum(-1), rtol=1e-3, atol=1e-1)
found, expected = fused.act_inputs(gate_up, GELU_TANH, weight), reference.act_inputs(gate_up, GELU_TANH, weight)
assert_close(spell(found), spell(terms.split_terms(expected)), rtol=4e-3, atol=1e-5)
"""
TWIN = """
for columns in (128, 1152):
    x = randn(3, columns) * torch.exp(5 * randn(3, columns).float()).bfloat16()
    x[1] = 0
    x[2, :4] = torch.tensor([1e-38, -3e38, 448, -0.0])
    x[0, 5] = torch.inf
    order = torch.randperm(columns, generator=generator).int()
    for given in (None, order):
        found = terms_triton.split_terms(x, given)
        expected = terms.split_terms(x if given is None else x[:, given.long()].contiguous())
        is_known = expected.scales.isfinite()
        codes = [each.codes.view(torch.uint8).view(3, 2, -1, 128).transpose(1, 2)[is_known] for each in (found, expected)]
        assert torch.equal(*codes) and torch.equal(found.scales, expected.scales)
        assert_close(found.sums, expected.sums, rtol=1e-5, atol=1e-5 * float(x[is_known.all(1)].abs().max()))
"""


def test_numbers_near_the_largest_of_a_group_are_exact() -> None:
    """And of others up to 2**-22 of it is lost; groups of any size, the least of bfloat16 included."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 256, generator=generator) * torch.exp(4 * torch.randn(40, 256, generator=generator))
    x = (x * 2.0 ** torch.arange(-60, 60, 3)[:, None]).bfloat16()
    x[0] = 0
    terms = split_terms(x)
    lost = (spell(terms) - x.double()).abs().view(40, 2, 128)
    size = x.double().abs().view(40, 2, 128)
    largest = size.amax(-1, keepdim=True)
    assert bool((lost <= largest * 2.0**-22).all())
    assert bool((lost[size >= largest * 2.0**-14] == 0).all())
    assert bool((lost > 0).any()), "no number is far from the largest"
    torch.testing.assert_close(terms.sums.double(), x.double().view(40, 2, 128).sum(-1), rtol=1e-5, atol=0)


def test_kernels_split_as_the_twin() -> None:
    run_interpreted(HEADER + TWIN)


def test_norms_and_activations_split_for_their_reader() -> None:
    run_interpreted(HEADER + READERS)


def test_products_are_those_of_the_values() -> None:
    run_interpreted(HEADER + PRODUCTS)
