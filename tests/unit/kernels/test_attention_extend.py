"""Attention of rows with many new tokens, run by Triton's interpreter where there is no device."""

from __future__ import annotations

import pytest

from tests.helpers.interpreted import run_interpreted

HEADER = """
import dataclasses
import torch
import triton.language as tl
from torch.testing import assert_close
from hiserve.core.forward import LayerKV
from hiserve.kernels import attention_blocks
from hiserve.kernels.attention_extend import ExtendTile, choose_num_parts, extend, tile_for
from tests.helpers.attention import Case

torch.set_num_threads(1)
attention_blocks.RUN = tl.constexpr(2)
empty = torch.empty
torch.empty = lambda *size, **options: empty(*size, **options).fill_(torch.nan)  # room for parts
SMALL = dict(head_dim=16, num_kv_heads=1)
GARBAGE = torch.tensor([2**31 - 1, -7, -(2**31), 10**6, -1], dtype=torch.int32)

def stale(case):
    # Entries behind a row's pages lead nowhere: neither up nor down, nor back into the pool.
    table = torch.nn.functional.pad(case.inputs.page_table, (0, 9))
    for row, own in enumerate(case.tables):
        table[row, len(own):] = GARBAGE.repeat(table.shape[1])[: table.shape[1] - len(own)]
    return table

def attend(case, layer=0, *, fresh=False, prefixed=True, parts=1, queries=32, keys=16, rows=slice(None), k=None, v=None):
    shape, inputs = case.shape, case.inputs
    first, end, _ = rows.indices(len(case.lengths))
    out, lse = torch.full(case.q.shape, 99, dtype=shape.dtype), torch.full(case.q.shape[:2], 99.0)
    extend(
        case.q, case.k if k is None else k, case.v if v is None else v, case.kv,
        inputs.qo_indptr[first : end + 1], inputs.kv_lens[rows], stale(case)[rows],
        max_q_len=int(inputs.q_lens[rows].max()), page_size=shape.page_size, scale=shape.head_dim**-0.5, out=out, lse=lse,
        window=shape.windows[layer] if shape.windows else None, sinks=shape.sinks[layer] if shape.sinks else None,
        hides_first=shape.hides_first, tree_mask=inputs.tree_mask, has_fresh=fresh, has_prefixed=prefixed,
        num_parts=parts, tile=ExtendTile(queries, keys, 4, 1),
    )
    return out, lse

def close(ours, case, layer=0, at=slice(None)):
    tolerance = 4e-3 if case.shape.dtype == torch.float16 else 2e-5
    for our, its in zip(ours, case.oracle(layer), strict=True):
        assert_close(our[at].double(), its[at], atol=tolerance, rtol=tolerance)

def check(case, layer=0, **options):
    close(attend(case, layer, **options), case, layer)
"""
EDGES = """
for page_size, adjacent, fresh in ((16, False, False), (16, True, True), (1, False, False), (64, False, True)):
    lengths = ((0, 1), (0, 16), (15, 1), (16, 17), (2 * page_size - 1, 2), (70, 3))
    check(Case(lengths, page_size=page_size, adjacent=adjacent, **SMALL), fresh=fresh)
check(Case(((40, 20), (0, 9)), page_size=12, group=3, num_kv_heads=1, head_dim=20, adjacent=False), fresh=True, queries=16, keys=32)
check(Case(((40, 20), (0, 9)), dtype=torch.float16, head_dim=16), fresh=True)
check(Case(((40, 20), (0, 9)), dtype=torch.float16, head_dim=20, num_kv_heads=1), fresh=True, parts=2)  # no multiple of 16 bytes
"""
RUNS = """
# A row of 20 blocks of 16 keys: adjacency is asked of 2 blocks at once, and changes inside and between them.
for page_size, pieces, parts in ((8, (8, 3, 21, 8), 1), (8, (1,) * 40, 1), (8, (9, 7, 2, 22), 3), (1, (100, 33, 187), 1), (32, (1,) * 10, 1)):
    case = Case(((310, 10),), page_size=page_size, **SMALL)
    pool, (table,) = case.kv, case.tables
    ends = torch.tensor(pieces).cumsum(0)
    order = torch.cat([table[end - piece : end] for piece, end in list(zip(pieces, ends))[::-1]])
    place = torch.cat((torch.zeros(1, dtype=torch.int64), order.argsort() + 1))
    slots = (place[:, None] * page_size + torch.arange(page_size)).flatten()
    moved = [torch.full_like(x, torch.nan) for x in (pool.k, pool.v)]
    for new, old in zip(moved, (pool.k, pool.v)):
        new[slots] = old
    case.kv, case.tables = LayerKV(*moved), [place[table]]
    case.inputs.page_table.copy_(place[case.inputs.page_table.long()])
    check(case, parts=parts)
"""
WINDOWS = """
lengths = ((0, 33), (33, 20), (100, 3), (16, 1))
for window, options in ((1, {}), (16, {"hides_first": True}), (37, {"sinks": True})):
    case = Case(lengths, window=window, adjacent=False, **SMALL, **options)
    check(case, fresh=True, parts=2)
check(case, layer=1)
for fresh in (True, False):
    check(Case(((50, 20), (1, 1), (0, 3), (0, 1)), hides_first=True, sinks=fresh, **SMALL), fresh=fresh)
"""
TREES = """
trees = ((40, 9), (0, 7), (5, 1), (30, 17))
for window in (None, 9):
    check(Case(trees, trees=True, window=window, adjacent=False, **SMALL), fresh=True, parts=2)
check(Case(((20, 63),), group=1, trees=True, **SMALL), keys=32)
"""
PARTS = """
case = Case(((16, 1), (70, 40), (0, 20), (150, 3), (9, 1)), group=3, sinks=True, adjacent=False, **SMALL)
for num_parts in (2, 9):
    ours = attend(case, fresh=True, parts=num_parts, rows=slice(1, 4))
    close(ours, case, at=slice(1, 64))
    for our in ours:
        assert (our[:1] == 99).all() and (our[64:] == 99).all(), num_parts
"""
FRESH = """
case = Case(((0, 40), (40, 20), (0, 17)), **SMALL)
starts = case.inputs.qo_indptr.tolist()
pool = LayerKV(case.kv.k.clone(), case.kv.v.clone())
fresh = torch.cat([case._slots(row) for row in (0, 2)])
case.kv.k[fresh] = case.kv.v[fresh] = torch.nan
close(attend(case, fresh=True), case)  # rows without a prefix do not read the pool
for alone in (0, 2):  # nor their neighbours' keys
    k, v = (torch.full_like(x, torch.nan) for x in (case.k, case.v))
    at = slice(starts[alone], starts[alone + 1])
    k[at], v[at] = case.k[at], case.v[at]
    close(attend(case, fresh=True, prefixed=False, k=k, v=v), case, at=at)
assert all((our[40:60] == 99).all() for our in attend(case, fresh=True, prefixed=False))
case.kv, k = pool, torch.full_like(case.k, torch.nan)
close(attend(case, k=k, v=k), case)  # the others read nothing else
"""
CHOICE = """
def parts(q_lens, kv_len, heads=(32, 8), dtype=torch.bfloat16):
    return choose_num_parts(torch.tensor(q_lens).int().numpy(), kv_len, heads, 128, dtype, num_sms=132)

assert [parts([8192], 8192), parts([2048] * 4, 2048), parts([1024], 8192)] == [1, 1, 1]  # enough programs
assert parts([64] * 64, 2112) == 1
for q_len in (20, 64, 100, 256, 500):
    num_programs = -(-q_len // 32) * 8
    for kv_len in (8192, 32_768):
        chosen = parts([q_len], kv_len)
        assert chosen == 1 or num_programs * chosen <= 264, (q_len, kv_len, chosen)
        assert num_programs * chosen >= 128, (q_len, kv_len, chosen)
assert parts([64], 200) == 1  # too short to split
assert parts([20], 10**6, heads=(8, 1)) == 16
for dtype in (torch.bfloat16, torch.float32):  # a program computes whole tokens, whatever their heads
    for group in (1, 3, 32, 33, 128):
        for q_len in (1, 5, 8192):
            assert tile_for(q_len, group, 128, dtype).num_queries >= group, (dtype, group, q_len)
"""


@pytest.mark.parametrize("program", [EDGES + TREES, RUNS + WINDOWS], ids=["edges", "runs"])
def test_equals_the_oracle_and_follows_no_entry_that_a_row_does_not_own(program: str) -> None:
    """Slots without an owner and the room for parts hold NaN; table entries past a row's end lead nowhere."""
    run_interpreted(HEADER + program)


def test_keys_are_split_where_rows_are_too_few_and_the_parts_join_to_the_whole() -> None:
    """Nothing is written for other rows."""
    run_interpreted(HEADER + CHOICE + PARTS)


def test_rows_without_a_prefix_read_their_own_new_keys_and_the_others_the_pool() -> None:
    run_interpreted(HEADER + FRESH)
