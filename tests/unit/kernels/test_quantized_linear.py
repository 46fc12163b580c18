"""Projections by weights in 8 and 4 bits against products of the values that these stand for, in Triton's interpreter."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.core.quantization import QuantSpec
from hiserve.kernels import quantized, quantized_linear as linear, scaled_products
from hiserve.kernels.quantized import QuantizedWeight, pack_codes

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(5)
spelled = []
linear.quantized.quantized_linear = lambda x, weight, bias: spelled.append(x.shape) or quantized.F.linear(x, quantized.dequantize(weight, x.dtype), bias)

def randn(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=generator).to(dtype)

def uneven(*shape):
    return torch.rand(shape, generator=generator) + 0.1

def fp8(rows, columns, has_blocks, activations="none"):
    codes = randn(rows, columns).mul_(60).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = uneven(-(-rows // 128), -(-columns // 128)) if has_blocks else uneven(rows)
    spec = QuantSpec(8, "e4m3", (128, 128) if has_blocks else (1, 0), activations)
    return QuantizedWeight(spec, (rows, columns), codes, scales / 60)

def int4(rows, columns, group, has_zeros, has_order):
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    groups = columns // group
    zeros = torch.randint(0, 17, (groups, rows), generator=generator, dtype=torch.uint8) if has_zeros else None
    order = torch.randperm(columns, generator=generator).int() if has_order else None
    spec = QuantSpec(4, "uint" if has_zeros else "int", (1, group))
    return QuantizedWeight(spec, (rows, columns), pack_codes(codes, spec), (uneven(groups, rows) / 8).half(), zeros, order)

def check(num_rows, weight, *, is_spelled=False, tolerance=4e-3):
    values = quantized.dequantize(weight, torch.float64)
    x, bias = randn(num_rows, weight.shape[1]), randn(weight.shape[0])
    for given in (None, bias):
        spelled.clear()
        got = linear.quantized_linear(x, weight, given)
        assert bool(spelled) == is_spelled, (spelled, weight.shape)
        expected = x.double() @ values.T + (0 if given is None else given.double())
        assert got.dtype == x.dtype
        assert_close(got.double(), expected, atol=tolerance * float(expected.abs().max()), rtol=0)
"""
FP8 = """
linear.num_processors = lambda device: 3
for has_blocks in (False, True):
    for num_rows, columns in ((1, 128), (17, 1664), (33, 256)):
        check(num_rows, fp8(192, columns, has_blocks))
    check(129, fp8(320, 256, has_blocks))  # by slices
    check(2, fp8(96, 128, has_blocks), is_spelled=True)
    check(2, fp8(64, 192, has_blocks), is_spelled=True)
scaled_products._SLICE_BYTES = 1
check(130, fp8(192, 256, True))
"""
ROUNDED = """
for has_blocks in (False, True):
    weight = fp8(192, 384, has_blocks, "token")
    check(32, weight)
    x = randn(35, 384)
    codes, scales = scaled_products.round_tokens(x, 128)
    assert codes.float().abs().max() == 448
    codes = quantized.split_halves(codes)
    expected = x.float().view(35, 3, 128).abs().amax(-1) / 448
    assert_close(scales, expected)
    assert_close(codes.float().view(35, 3, 128) * scales[..., None], x.float().view(35, 3, 128), rtol=0.07, atol=1e-3)
x[3, 130], x[4, 7] = torch.nan, torch.inf
lacking = [[3, 1], [4, 0]]
assert scaled_products.round_tokens(x, 128)[1].isinf().nonzero().tolist() == lacking
got = linear.quantized_linear(x, fp8(192, 384, True, "token"), None)
assert [row for row in range(35) if not got[row].isfinite().any()] == [3, 4]
for num_rows in (33, 150):
    weight = fp8(192, 384, True, "token")
    x, bias = randn(num_rows, 384), randn(192)
    codes, scales = scaled_products.round_tokens(x, 128)
    codes = quantized.split_halves(codes)
    rounded = (codes.double().view(num_rows, 3, 128) * scales.double()[..., None]).flatten(1)
    got = linear.quantized_linear(x, weight, bias)
    assert_close(got.double(), rounded @ quantized.dequantize(weight, torch.float64).T + bias.double(), atol=0.05, rtol=4e-3)
"""
INT4 = """
linear.num_processors = lambda device: 3
for group, has_zeros, has_order, columns in ((128, False, False, 1280), (64, True, True, 640), (32, True, False, 384), (32, False, True, 64)):
    for num_rows in (1, 33):
        check(num_rows, int4(128, columns, group, has_zeros, has_order))
    check(129, int4(192, columns, group, has_zeros, has_order))
    check(3, int4(72, columns, group, has_zeros, has_order), is_spelled=True)
check(3, int4(64, 96, 32, True, True), is_spelled=True)
"""


def test_weights_in_8_bits() -> None:
    run_interpreted(HEADER + FP8)


def test_rounded_inputs() -> None:
    run_interpreted(HEADER + ROUNDED)


def test_weights_in_4_bits() -> None:
    run_interpreted(HEADER + INT4)
