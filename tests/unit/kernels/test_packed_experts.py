"""Products with packed weights of experts against those with the same weights in 16 bits; in Triton's interpreter."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

HEADER = """
import torch
from torch.testing import assert_close
from hiserve.core.activation import SILU, Activation
from hiserve.kernels import experts, reference
from hiserve.kernels.expert_products import Tile, multiply
from hiserve.kernels.packed_products import PACKED_TILES, multiply_packed
from hiserve.kernels.packed_weights import plain
from tests.helpers.packed_cases import random_4, random_8

torch.set_num_threads(1)
HALF = torch.float16
generator = torch.Generator().manual_seed(5)
WIDE = Tile(rows=64, columns=128, depth=128, warps=4, stages=1)
LIMITED = Activation(slope=1.702, shift=1.0, limit=2.0)

def randn(*shape, scale=1.0):
    return (torch.randn(shape, generator=generator) * scale).to(HALF)

def routes(tokens, num_experts, count):
    return reference.route(randn(tokens, num_experts), count, True)
"""
# Rows of the identity return the weights: all codes, under the scales from none that float16 holds to the largest of all.
NUMBERS = """
for weight, turns in ((random_4(generator, 1, 70, 160, scales=(80, 129)), PACKED_TILES[1:2]), (random_8(generator, 1, 140, 136), PACKED_TILES[2:])):
    count = weight.columns
    x = torch.eye(count, dtype=HALF)
    order, ends = experts._group(torch.zeros(count, 1, dtype=torch.int64), 1, count)
    for tile, _ in turns:
        out = torch.full((count, weight.shape[1]), torch.nan, dtype=HALF)
        multiply_packed(x, weight, None, None, order, ends, out, order[:, None].long(), None, tile)
        assert torch.equal(out, weight.unpacked(HALF)[0].T)
"""
# Sums of small integers times such numbers are exact in any order.
SUMS = """
def integers(*shape):
    return torch.randint(-2, 3, shape, generator=generator).to(HALF)

def weights_of(kind, *shape, num_parts):
    if kind == "plain":
        return integers(*shape)
    if kind == "4":
        return random_4(generator, *shape)
    made = random_8(generator, *shape, num_parts=num_parts)
    made.scales.copy_(torch.exp2(torch.randint(-3, 2, made.scales.shape, generator=generator).float()))
    made.codes[made.codes & 0x60 == 0] = 0
    return made

hidden, inner = 160, 72  # neither ends with a block of either kind; columns end with a part of a tile
low, middle, tall = (tile for tile, _ in PACKED_TILES)
for kind, tokens, tile, others, activation in (
    ("4", 3, low, None, LIMITED), ("4", 5, middle, "plain", SILU), ("4", 3, low, "8", LIMITED), ("4", 3, low, "4", None),
    ("8", 3, low, "8", LIMITED), ("8", 3, tall, None, None), ("8", 3, low, "plain", None)):
    chosen = torch.randint(0, 3, (tokens, 2), generator=generator)
    count = 2 * tokens + (0 if others is None else tokens)
    order, ends = experts._group(chosen, 3, count)
    num_parts = 2 if activation else 1
    weight = weights_of(kind, 3, num_parts * inner, hidden, num_parts=num_parts)
    shared = None if others is None else weights_of(others, num_parts * inner, hidden, num_parts=num_parts)
    x = integers(tokens if activation else count, hidden)
    bias = integers(3, num_parts * inner) if others is None else None
    found, expected = (torch.full((count, inner), torch.nan, dtype=HALF) for _ in range(2))
    multiply_packed(x, weight, shared, bias, order, ends, found, chosen, activation, tile)
    shared = None if shared is None else plain(shared, HALF)
    multiply(x, plain(weight, HALF), shared, bias, order, ends, expected, chosen, activation, WIDE)
    assert expected.isfinite().all() and torch.equal(found, expected), (kind, tokens, others, activation)
"""


MIXES = """
hidden, inner = 160, 96
for kind, others in (("4", None), ("8", "8"), ("4", "8"), ("8", "plain")):
    make = {"4": lambda *shape, **_: random_4(generator, *shape), "8": lambda *shape, **more: random_8(generator, *shape, **more),
            "plain": lambda *shape, **_: randn(*shape, scale=0.2)}
    weights = make[kind](3, 2 * inner, hidden, num_parts=2), make[kind](3, hidden, inner)
    shared = None if others is None else (make[others](2 * inner, hidden, num_parts=2), make[others](hidden, inner))
    biases = (randn(3, 2 * inner), randn(3, hidden)) if others is None else (None, None)
    for tokens in (1, 2) if (kind, others) == ("4", "8") else (1,):
        x, routed = randn(tokens, hidden, scale=0.1), routes(tokens, 3, 2)
        found = experts.mix_experts(x, *routed, *weights, *biases, LIMITED, shared)
        plains = [plain(weight, HALF) for weight in weights]
        both = None if shared is None else tuple(plain(weight, HALF) for weight in shared)
        expected = reference.mix_experts(x, *routed, *plains, *biases, LIMITED, both)
        assert torch.equal(reference.mix_experts(x, *routed, *weights, *biases, LIMITED, shared), expected)
        assert found.dtype == HALF and expected.std() > 0.1, expected.std()
        assert_close(found, expected, atol=4e-3 * expected.abs().max().item(), rtol=4e-3)
    if (kind, others) == ("8", "8"):  # without its instructions a GPU gets numbers of 16 bits
        seen, kept = [], (experts._lacks_e4m3, experts.mix_few)
        experts._lacks_e4m3, experts.mix_few = (lambda device: True), (lambda *given: seen.append(given))
        experts.mix_experts(x, *routed, *weights, *biases, LIMITED, shared)
        experts._lacks_e4m3, experts.mix_few = kept
        assert all(torch.equal(each, its) for each, its in zip((*seen[0][3:5], *seen[0][6]), (*plains, *both), strict=True))
    wide = [each.float() for each in (x, *biases) if each is not None]
    if others is None:  # of other types the twin computes
        assert experts.mix_experts(wide[0], *routed, *weights, *wide[1:], LIMITED).dtype == torch.float32
"""


def test_numbers_are_upcast_exactly() -> None:
    run_interpreted(HEADER + NUMBERS)


def test_products_are_those_with_plain_weights() -> None:
    run_interpreted(HEADER + SUMS)


def test_experts_mix_as_their_twin_does() -> None:
    run_interpreted(HEADER + MIXES)
