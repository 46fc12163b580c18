"""Attention in one order of keys, run by Triton's interpreter where there is no device."""

from __future__ import annotations

import pytest

from tests.helpers.interpreted import run_interpreted

HEADER = """
import dataclasses
import torch
from torch.testing import assert_close
from hiserve.attention.exact_triton import ExactTritonAttention
from hiserve.kernels.attention_schedule import KeyTile, ScheduledRows, schedule
from hiserve.kernels.exact_blocks import ExactTile
from hiserve.kernels.exact_decode import decode
from hiserve.kernels.exact_extend import extend
from tests.helpers.attention import NO_PAGE, Case

torch.set_num_threads(1)
empty = torch.empty
torch.empty = lambda *size, **options: empty(*size, **options).fill_(torch.nan)  # results and room for segments

def attend(case, num_extra, *, queries=16, keys=16, segment=32, fresh=False):
    inputs, shape = case.inputs, case.shape
    table = torch.nn.functional.pad(inputs.page_table, (0, 5), value=NO_PAGE)
    rows = ScheduledRows(inputs.qo_indptr, inputs.kv_lens, table, inputs.max_q_len, 2 * inputs.max_kv_len)
    window, sinks = (shape.windows or (None,))[0], (shape.sinks or (None,))[0]
    out, tile = torch.empty(case.q.shape, dtype=case.q.dtype), ExactTile(queries, keys, 4, 2)
    options = {"page_size": shape.page_size, "scale": shape.scale, "out": out, "sinks": sinks}
    if not num_extra:
        limits = {"window": window, "hides_first": shape.hides_first, "has_fresh": fresh}
        extend(case.q, case.k, case.v, case.kv, rows, tile, segment=segment, **limits, **options)
        return out
    heads = (shape.num_heads, shape.num_kv_heads)
    made = schedule(rows, heads, num_extra, KeyTile(segment, 4, 1), window=window, hides_first=shape.hides_first)
    decode(case.q, case.kv, rows, made, tile, **options)
    assert not made.counts.any()  # so that the next layer counts, too
    return out

def check(case, tolerance, *extras, **options):
    expected, whole = case.oracle()[0], attend(case, 0, **options)
    assert_close(whole.double(), expected, atol=tolerance, rtol=tolerance)
    for num_extra in extras:
        assert torch.equal(attend(case, num_extra, **options), whole), num_extra
    assert torch.equal(attend(case, 0, fresh=True, **options), whole)
"""
ORDERS = """
check(Case(((0, 5), (40, 7), (100, 1)), head_dim=16, num_kv_heads=1, adjacent=False), 2e-5, 2, 9)
"""
LIMITS = """
options = {"window": 20, "sinks": True, "hides_first": True}
check(Case(((0, 5), (0, 1), (70, 3)), head_dim=16, num_kv_heads=1, adjacent=False, **options), 2e-5, 4)
check(Case(((30, 5),), head_dim=24, group=3, page_size=4, dtype=torch.float16), 4e-3, 4)
check(Case(((0, 35),), head_dim=20, num_kv_heads=1, dtype=torch.float16), 4e-3)  # no multiple of 16 bytes
"""
CHUNKS = """
# The last tokens of a row alone, and beside others, have the bits that they have in the whole row.
whole = Case(((0, 75),), head_dim=16, num_kv_heads=1)
expected = attend(whole, 0)
for new, num_extra in ((1, 5), (6, 0)):
    part = Case(((75 - new, new), (40, min(new, 6))), head_dim=16, num_kv_heads=1)
    slots = part.inputs.page_table[0, : 5].long()[:, None] * 16 + torch.arange(16)
    old = whole.inputs.page_table[0, :5].long()[:, None] * 16 + torch.arange(16)
    for mine, its in ((part.kv.k, whole.kv.k), (part.kv.v, whole.kv.v)):
        mine[slots] = its[old]
    part.q[:new] = whole.q[-new:]
    assert torch.equal(attend(part, num_extra)[:new], expected[-new:]), (new, num_extra)
"""
BACKEND = """
for lengths in (((40, 1), (0, 33), (20, 40)),):
    case = Case(lengths, head_dim=16, group=4, num_kv_heads=1, window=40, sinks=True, adjacent=False)
    case.shape = dataclasses.replace(case.shape, segment=64)
    attention = ExactTritonAttention(case.shape)
    for layer in (0, 1):
        assert_close(case.run(attention, layer).double(), case.oracle(layer)[0], atol=2e-5, rtol=2e-5)
"""


@pytest.mark.parametrize("program", [ORDERS, LIMITS, CHUNKS, BACKEND], ids=["orders", "limits", "chunks", "backend"])
def test_the_bits_of_a_query_depend_on_its_row_alone(program: str) -> None:
    run_interpreted(HEADER + program)
