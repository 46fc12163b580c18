"""The kernels that choose rows by an index against their twin, run by Triton's interpreter."""

from __future__ import annotations

import random

from hiserve.core.step_memory import INDEX_BYTES, index_memory, index_tokens
from tests.helpers.interpreted import run_interpreted

HEADER = """
import dataclasses
import torch
from hiserve.core import step_memory
from hiserve.kernels import index_topk, union_reference, union_rows
from hiserve.kernels.chosen_bits import unpack_bits
from tests.helpers.compressed_cases import Step

torch.set_num_threads(1)
STEP = Step(cached=(0, 300, 37), new=(5, 2, 1))
NUM_TOKENS, HEADS, WIDTH, SCALE = 8, 5, 16, 0.5

def case(dtype=torch.float32, weight=1):
    # Small whole numbers: every score is exact, and most are there several times.
    keys = STEP.paged(WIDTH, 4, 2, None, dtype)
    keys.pool.copy_(keys.pool.mul(1.5).round())
    q = torch.randn(NUM_TOKENS, HEADS, WIDTH).round().to(dtype)
    return q, torch.randint(-weight, 3, (NUM_TOKENS, HEADS)).float(), keys

def check(q, weights, keys, most):
    expected, found = (each.choose_rows(q, weights, keys, most, SCALE) for each in (union_reference, index_topk))
    assert torch.equal(expected, found), (expected, found)
    if keys.width <= index_topk._chunk(most):
        expected, bits = (each.choose_bits(q, weights, keys, most, SCALE) for each in (union_reference, index_topk))
        assert torch.equal(expected, bits), (expected, bits)
        slots = union_rows.slots_of(keys)
        chosen = slots.masked_fill(~unpack_bits(bits, keys.width), -1)
        assert all(torch.equal(a[a >= 0], b[b >= 0]) for a, b in zip(chosen, found, strict=True))
    return found
"""
BEST = """
for dtype, most, chunk in ((torch.float32, 8, 32), (torch.float16, 40, 4096)):
    torch.manual_seed(most)
    index_topk._MIN_CHUNK = chunk  # several parts of a token's scores in three rounds, or one part
    check(*case(dtype), most)
index_topk._MIN_CHUNK = 256
q, weights, keys = case()
check(q, torch.zeros_like(weights), keys, 7)  # all scores are equal: the first
check(q, -weights.abs(), keys, 7)  # 0 and -0 are equal
check(q * 1e4, weights.abs(), keys, 7)
check(q, weights, keys, 200)  # more than there are
tokens = STEP.paged(WIDTH, 16, 1, None, torch.float32)  # a key of each token
tokens.pool.copy_(tokens.pool.mul(1.5).round())
check(q, weights, tokens, 12)
# Of two tokens one program computes the scores: one sees as many rows as are chosen, or one more. Another token is left alone.
STEP = Step(cached=(0, 63), new=(4, 3))
some = STEP.paged(WIDTH, 16, 1, None, torch.float32)
some.pool.copy_(some.pool.mul(1.5).round())
for most in (2, 3):
    check(q[:7], weights[:7], some, most)
none = dataclasses.replace(keys, most=0, positions=torch.zeros_like(keys.positions))
check(q, weights, none, 7)  # nobody sees a row
# A bound of the rows, and the workspace, change nothing.
found = check(q, weights, keys, 6)
loose = dataclasses.replace(keys, most=900)
assert torch.equal(index_topk.choose_rows(q, weights, loose, 6, SCALE), found)
index_topk.index_tokens = lambda num_tokens, num_rows: 3
assert torch.equal(index_topk.choose_rows(q, weights, loose, 6, SCALE), found)
"""


def test_exactly_the_best_rows_and_of_equal_ones_the_first() -> None:
    run_interpreted(HEADER + BEST)


def test_scores_of_any_batch_stay_within_the_workspace() -> None:
    chance = random.Random(3)
    for _ in range(200):
        num_tokens, num_rows = chance.randint(1, 9000), chance.randint(1, 1 << 18)
        step = index_tokens(num_tokens, num_rows)
        assert 1 <= step <= num_tokens
        assert index_memory(num_tokens, num_rows) == 8 * step * num_rows <= INDEX_BYTES
        assert step == num_tokens or 8 * (step + 1) * num_rows > INDEX_BYTES
    assert index_tokens(5, INDEX_BYTES // 8) == 1
