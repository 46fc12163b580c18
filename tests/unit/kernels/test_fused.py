"""Fused kernels against their plain twins, run by Triton's interpreter where there is no device."""

from __future__ import annotations

import inspect

import pytest

from hiserve.kernels import fused, reference
from hiserve.kernels.ops import Ops
from tests.helpers.interpreted import run_interpreted

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.core.activation import GELU_TANH, SILU, Activation
from hiserve.core.forward import LayerKV
from hiserve.kernels import fused, reference
from hiserve.kernels.parts import Parts
from hiserve.kernels.parts_triton import summed

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(5)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-6, torch.float16: 2e-3}
DTYPES = tuple(TOLERANCE)

def randn(*shape, dtype, scale=1.0):
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

def close(got, expected, dtype):
    assert got.dtype == expected.dtype and got.shape == expected.shape, (got.dtype, got.shape)
    assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
"""
NORMS = """
for dtype in DTYPES:
    for rows, size in ((1, 64), (5, 100), (3, 1024), (0, 64)):
        x, delta, weight = randn(rows, size, dtype=dtype, scale=9), randn(rows, size, dtype=dtype), randn(size, dtype=dtype)
        before = x.clone()
        close(fused.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
        assert torch.equal(x, before)
        apart = torch.cat((x, delta), 1)  # rows of a wider matrix, as a part of a projection
        close(fused.rms_norm(apart[:, :size], weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
        assert fused.rms_norm(apart[:, :size], weight, 1e-5).is_contiguous()
        ours, theirs = x.clone(), x.clone()
        close(fused.add_rms_norm(delta, ours, weight, 1e-5), reference.add_rms_norm(delta, theirs, weight, 1e-5), dtype)
        assert torch.equal(ours, theirs), dtype
    if dtype == torch.float16:
        x, weight, bias = (randn(*shape, dtype=dtype, scale=9) for shape in ((5, 100), (100,), (100,)))
        values = randn(4, 5, 100, dtype=torch.float32)
        for parts in (Parts(values, bias, dtype), Parts(values[:2], None, dtype)):  # rounded as in a launch of their own
            ours, theirs = x.clone(), x.clone()
            got = fused.add_rms_norm(parts, ours, weight, 1e-5)
            assert torch.equal(got, fused.add_rms_norm(summed(parts), theirs, weight, 1e-5)) and torch.equal(ours, theirs)
            assert_close(summed(parts), (values[: len(parts.values)].sum(0) + (0 if parts.bias is None else bias)).half(), atol=1e-2, rtol=1e-3)
        # one rounding with a wider weight
        x, weight = randn(5, 100, dtype=dtype, scale=9), 1 + randn(100, dtype=torch.float32) / 300
        close(fused.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
        assert (fused.rms_norm(x, weight, 1e-5) == reference.rms_norm(x, weight, 1e-5)).float().mean() > 0.99
    tiny = torch.full((2, 64), 1e-4, dtype=dtype)
    weight = torch.ones(64, dtype=dtype)
    close(fused.rms_norm(tiny, weight, 1e-5), reference.rms_norm(tiny, weight, 1e-5), dtype)
"""
ACTIVATIONS = """
for dtype in DTYPES:
    for rows, size in ((1, 64), (5, 100), (2, 2500), (0, 64)):
        gate_up = randn(rows, 2 * size, dtype=dtype, scale=4)
        before = gate_up.clone()
        for activation in (SILU, GELU_TANH, Activation(slope=1.702, shift=1.0, limit=7.0)):
            close(fused.act_mul(gate_up, activation), reference.act_mul(gate_up, activation), dtype)
            assert torch.equal(gate_up, before)
        x, gate = randn(rows, size, dtype=dtype), gate_up[:, 1 : size + 1]
        close(fused.sigmoid_mul(x, gate), reference.sigmoid_mul(x, gate), dtype)
ends = torch.tensor([[-torch.inf, -1e30, 0.0, torch.inf, 1.0, 1.0, 1.0, 1.0]])
assert torch.equal(fused.act_mul(ends).nan_to_num(nan=7.0), reference.act_mul(ends).nan_to_num(nan=7.0))
"""
ROTATIONS = """
for half in (4, 12, 64):
    frequencies = 3e4 ** -(torch.arange(half, dtype=torch.float32) / half)
    positions = torch.tensor([0, 1, 17, 8191, 131071])
    for dtype, factor in ((torch.float32, 1.0), (torch.float64, 1.25)):
        ours = fused.rotations(positions, frequencies, factor, dtype)
        for got, expected in zip(ours, reference.rotations(positions, frequencies, factor, dtype)):
            assert got.dtype == dtype and got.shape == expected.shape == (5, 1, 2 * half)
            assert_close(got, expected, atol=1e-6, rtol=0)
"""
HEADS = """
NUM_SLOTS, EPS = 40, 1e-5
# (query heads, key heads, head_dim): whole blocks of heads, parts of one, one key head, uneven head_dims
SHAPES = ((4, 2, 16), (9, 3, 24), (3, 1, 80), (20, 10, 8))

def batch(heads, kv_heads, head_dim, tokens, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    qkv = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(NUM_SLOTS - 1, generator=generator)[:tokens] + 1
    frequencies = 1e4 ** -(torch.arange(head_dim // 2, dtype=torch.float32) / head_dim)
    cos, sin = reference.rotations(torch.randint(0, 9999, (tokens,), generator=generator), frequencies, 1.0, wide)
    return qkv, cos, sin, slots

def pool(kv_heads, head_dim, dtype):
    # planes of a larger pool: slots of one layer lie further apart than their elements
    planes = torch.full((2, NUM_SLOTS, 2 * kv_heads, head_dim), torch.nan, dtype=dtype)
    return LayerKV(k=planes[0, :, :kv_heads], v=planes[1, :, :kv_heads]), planes

for dtype in DTYPES:
    for heads, kv_heads, head_dim in SHAPES:
        for has_norm in (False, True):
            weight = randn(heads + kv_heads, head_dim, dtype=dtype) if has_norm else None
            if has_norm and dtype == torch.float16 and heads == 4:
                weight = weight.float()
            for tokens in (1, 6):
                qkv, cos, sin, slots = batch(heads, kv_heads, head_dim, tokens, dtype)
                ours, our_planes = pool(kv_heads, head_dim, dtype)
                theirs, their_planes = pool(kv_heads, head_dim, dtype)
                expected = reference.rotate_and_store(qkv.clone(), weight, EPS, cos, sin, theirs, slots)
                apart = torch.cat((qkv, qkv[:, :1]), 1)[:, :-1]  # beside gates
                got = fused.rotate_and_store(apart, weight, EPS, cos, sin, ours, slots)
                for ours_is, theirs_is in zip(got, expected):
                    close(ours_is, theirs_is, dtype)
                assert got[0].is_contiguous()
                assert torch.equal(ours.k[slots], got[1]) and torch.equal(ours.v[slots], got[2])
                assert torch.equal(our_planes.isnan(), their_planes.isnan()), "other slots were written"
"""
LATENTS = """
# (heads, elements of a query that stay, rank, rotated elements): whole blocks of heads, parts of one, uneven ranks
for dtype in DTYPES:
    for heads, plain, rank, rope_dim in ((8, 16, 32, 8), (3, 12, 40, 12), (20, 8, 16, 4)):
        for tokens in (1, 6):
            _, cos, sin, slots = batch(1, 1, rope_dim, tokens, dtype)
            # views, as of one projection; slots of one layer lie further apart than their elements
            both = randn(tokens, heads * (plain + rope_dim) + rank + rope_dim, dtype=dtype)
            weight = randn(rank, dtype=dtype)
            made = []
            for ops in (fused, reference):
                planes = torch.full((NUM_SLOTS, 2, rank + rope_dim), torch.nan, dtype=dtype)
                q, row = both.clone().split((heads * (plain + rope_dim), rank + rope_dim), 1)
                kv = LayerKV(k=planes[:, :1], v=planes[:, :1, :rank])
                q = q.view(tokens, heads, plain + rope_dim)
                q, rows = ops.store_latents(q, row, weight, EPS, cos, sin, kv, slots)
                assert torch.equal(kv.k[slots], rows)
                made.append((q, rows, planes))
            for ours_is, theirs_is in zip(made[0][:2], made[1][:2]):
                close(ours_is, theirs_is, dtype)
            assert torch.equal(made[0][2].isnan(), made[1][2].isnan()), "other slots were written"
"""
PACKED = """
from hiserve.core.row_shapes import scale_words
from hiserve.kernels.row_codecs import load_heads

# Of one KV head, of an odd number, of whole blocks and a part of one; of all magnitudes, zeros, and what is not finite.
for dtype, heads, kv_heads, head_dim in ((torch.float32, 2, 1, 16), (torch.float16, 3, 3, 80), (torch.float16, 9, 9, 32)):
    qkv, cos, sin, slots = batch(heads, kv_heads, head_dim, 9, torch.float32)
    qkv = (qkv * 2.0 ** torch.randint(-9, 10, (9, heads + 2 * kv_heads, 1), generator=generator)).to(dtype)
    qkv[3, -1], qkv[4, -1, 0], qkv[5, heads, 1] = 0, torch.inf, torch.nan
    made = []
    for ops in (fused, reference):
        bits = torch.full((2, NUM_SLOTS, kv_heads, head_dim), 255, dtype=torch.uint8)
        kv = LayerKV(*bits, scales=torch.full((NUM_SLOTS, scale_words(kv_heads)), -1, dtype=torch.int32))
        stored = ops.rotate_and_store(qkv.clone(), None, EPS, cos, sin, kv, slots)[1:]
        for ours_is, its in zip(load_heads(kv, slots, dtype), stored):
            assert torch.equal(ours_is[:3], its[:3]) and torch.equal(ours_is[6:], its[6:]), "new ones are not read as stored ones"
        assert not load_heads(kv, slots, dtype)[1][4, -1].isfinite().all() and not stored[1][4, -1].isfinite().all()
        assert not load_heads(kv, slots, dtype)[0][5, 0].isfinite().all() and not stored[0][5, 0].isfinite().all()
        others = torch.ones(NUM_SLOTS, dtype=torch.bool)
        others[slots] = False
        assert (bits[:, others] == 255).all() and (kv.scales[others] == -1).all(), "other slots were written"
        finite = slots[[0, 1, 2, 3, 6, 7, 8]]
        made.append((bits[:, finite], kv.scales[finite]))
        turned = reference.rotate_and_store(qkv.clone(), None, EPS, cos, sin, pool(kv_heads, head_dim, dtype)[0], slots)[1:]
        for its, exact in zip(stored, turned):
            largest = exact[:3].float().abs().amax(-1, keepdim=True)
            error = (its[:3].float() - exact[:3].float()).abs()
            assert (error <= torch.maximum(exact[:3].float().abs() / 16, largest / 448 / 500 + 2.0**-24)).all()
    assert torch.equal(made[0][1], made[1][1])
    assert (made[0][0] != made[1][0]).float().mean() < 1e-3, "more than products that round differently"
    assert torch.equal(made[0][0][1], made[1][0][1]), "values are not rotated"
"""
PACKED_LATENTS = """
from hiserve.core.row_shapes import PackedPages, packed_latent
from hiserve.kernels.row_codecs import load_packed

# Of all magnitudes, zeros, and what is not finite: of a row, the norm has no scale of its own then.
for dtype, heads, rank, rope_dim in ((torch.float32, 3, 32, 8), (torch.float16, 9, 64, 16)):
    pages, tokens = PackedPages(packed_latent(rank, rope_dim), 4), 8
    _, cos, sin, slots = batch(1, 1, rope_dim, tokens, dtype)
    both = randn(tokens, heads * (16 + rope_dim) + rank + rope_dim, dtype=dtype)
    both[3, -rank - rope_dim :] = 0
    both[4, -1], both[5, -rope_dim - 1] = torch.inf, torch.nan
    weight = (randn(rank, dtype=torch.float32) * 2.0 ** torch.randint(-9, 10, (rank,), generator=generator)).to(dtype)
    made = []
    for ops in (fused, reference):
        bits = torch.full((NUM_SLOTS, 1, pages.shape.row_bytes), 171, dtype=torch.uint8)
        q, row = both.clone().split((heads * (16 + rope_dim), rank + rope_dim), 1)
        kv = LayerKV(k=bits, v=bits)
        q, rows = ops.store_latents(q.view(tokens, heads, -1), row, weight, EPS, cos, sin, kv, slots, pages)
        stored = load_packed(bits[:, 0], slots, pages).to(dtype)
        finite = [0, 1, 2, 3, 6, 7]
        assert torch.equal(stored[finite], rows[finite, 0]), "new ones are not read as stored ones"
        assert not stored[4].isfinite().all() and not stored[5, :rank].isfinite().any(), "what is not finite is read as a number"
        assert not rows[4].isfinite().all() and not rows[5, 0, :rank].isfinite().any()
        others = torch.ones(NUM_SLOTS, dtype=torch.bool)
        others[slots] = False
        untouched = torch.full_like(bits[:, 0], 171)
        at = load_packed(untouched, others.nonzero()[:, 0], pages)
        assert torch.equal(load_packed(bits[:, 0], others.nonzero()[:, 0], pages), at), "other slots were written"
        made.append((q, stored[finite], rows[finite]))
    close(made[0][0], made[1][0], dtype)
    exact = torch.full((NUM_SLOTS, 1, rank + rope_dim), 0.0, dtype=dtype)
    q, row = both.clone().split((heads * (16 + rope_dim), rank + rope_dim), 1)
    reference.store_latents(q.view(tokens, heads, -1), row, weight, EPS, cos, sin, LayerKV(k=exact, v=exact), slots)
    exact = exact[slots][finite, 0].float()
    for _, stored, _ in made:
        stored = stored.float()
        assert_close(stored[:, rank:], exact[:, rank:], rtol=2**-8, atol=1e-7)
        latents = exact[:, :rank].view(len(finite), 4, -1)
        error = (stored[:, :rank].view(latents.shape) - latents).abs()
        bound = torch.maximum(latents.abs() / 15, latents.abs().amax(-1, keepdim=True) / 448 / 500) + 2**-22
        assert (error <= bound).all(), (error / bound).max()
    assert (made[0][1] != made[1][1]).float().mean() < 0.02, "more than norms that round differently"
"""
GATED_NORMS = """
# Whole blocks of heads, parts of one, uneven sizes; gates are a part of a wider projection.
for dtype in DTYPES:
    for tokens, heads, size in ((2, 8, 16), (1, 5, 24), (3, 1, 64), (0, 4, 16)):
        x, weight = randn(tokens, heads, size, dtype=dtype, scale=9), 1 + randn(size, dtype=dtype)
        both = randn(tokens, 7 + heads * size, dtype=dtype, scale=4)
        gate, before = both[:, 7:].view(x.shape), (x.clone(), both.clone())
        got, expected = (ops.gated_rms_norm(x, gate, weight, 1e-5) for ops in (fused, reference))
        close(got, expected, dtype)
        assert torch.equal(x, before[0]) and torch.equal(both, before[1])
        if dtype == torch.float16 and tokens:  # rounded where the twin rounds
            assert (got == expected).float().mean() > 0.98
    tiny = torch.full((1, 2, 16), 1e-4, dtype=dtype)
    close(*(ops.gated_rms_norm(tiny, tiny + 1, tiny[0, 0] + 1, 1e-5) for ops in (fused, reference)), dtype)
"""


def test_fused_kernels_compute_what_their_twins_do() -> None:
    run_interpreted(HEADER + NORMS + ACTIVATIONS + ROTATIONS + HEADS + LATENTS + PACKED + PACKED_LATENTS + GATED_NORMS)


@pytest.mark.parametrize("name", [name for name in vars(Ops) if not name.startswith("_")])
def test_every_operation_is_there_for_both_devices_and_takes_the_same(name: str) -> None:
    asked = [parameter for parameter in inspect.signature(getattr(Ops, name)).parameters if parameter != "self"]
    for module in (reference, fused):
        assert list(inspect.signature(getattr(module, name)).parameters) == asked
