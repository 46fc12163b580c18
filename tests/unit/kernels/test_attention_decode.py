"""Attention of few tokens a row and how its rows are split, run by Triton's interpreter where there is no device."""

from __future__ import annotations

import pytest

from tests.helpers.interpreted import run_interpreted

HEADER = """
import dataclasses
import math
import random
from itertools import product
import torch
import triton.language as tl
from torch.testing import assert_close
from hiserve.attention.triton import TritonAttention
from hiserve.core.forward import LayerKV
from hiserve.kernels import attention_join, attention_schedule
from hiserve.kernels.attention_decode import decode
from hiserve.kernels.attention_schedule import KeyTile, ScheduledRows, choose_num_extra, schedule
from hiserve.kernels.reference import merge
from tests.helpers.attention import NO_PAGE, Case

torch.set_num_threads(1)
attention_join._MAX_LOADED = tl.constexpr(2)
empty = torch.empty
torch.empty = lambda *size, **options: empty(*size, **options).fill_(torch.nan)  # results and room for parts

def rows_of(inputs):
    table = torch.nn.functional.pad(inputs.page_table, (0, 5), value=NO_PAGE)
    return ScheduledRows(inputs.qo_indptr, inputs.kv_lens, table, inputs.max_q_len, 10 * inputs.max_kv_len)

def attend(case, num_extra, layer=0, keys=16, **options):
    rows, shape = rows_of(case.inputs), case.shape
    window = shape.windows[layer] if shape.windows else None
    heads = (shape.num_heads, shape.num_kv_heads)
    made = schedule(rows, heads, num_extra, KeyTile(keys, 4, 2), window=window, hides_first=shape.hides_first)
    lse = torch.full(case.q.shape[:2], torch.nan)
    options = {"sinks": shape.sinks[layer] if shape.sinks else None, "tree_mask": case.inputs.tree_mask} | options
    scale = shape.head_dim**-0.5
    out = decode(case.q, case.kv, rows, made, page_size=shape.page_size, scale=scale, lse=lse, **options)
    assert not made.counts.any()  # so that the next layer counts, too
    return out, lse

def check(case, num_extra, layer=0, keys=16):
    ours = attend(case, num_extra, layer, keys)
    for our, its in zip(ours, case.oracle(layer), strict=True):
        assert_close(our.double(), its, atol=2e-5, rtol=2e-5)
"""
LENGTHS = """
attention_join._GROUP = tl.constexpr(4)  # of 24 parts six groups
for page_size, num_extra, kv_lens in ((16, 1, (1, 15, 16, 17, 31, 32, 33)), (1, 4, (1, 17, 50)), (64, 30, (64, 65, 380))):
    lengths = tuple((kv_len - 1, 1) for kv_len in kv_lens)
    check(Case(lengths, page_size=page_size, group=4, head_dim=16, num_kv_heads=1, adjacent=False), num_extra)
check(Case(lengths[:2], page_size=4, group=3, head_dim=20, adjacent=False), 3, keys=32)
half = Case(lengths[:2], head_dim=16, num_kv_heads=1, dtype=torch.float16)
out, lse = attend(half, 6, keys=64)
assert out.dtype == torch.float16
assert_close(out.double(), half.oracle()[0], atol=4e-3, rtol=4e-3)
"""
WINDOWS = """
for window, options in ((1, {}), (16, {"hides_first": True}), (20, {"sinks": True})):
    edges = tuple((kv_len - 1, 1) for kv_len in (max(window - 1, 1), window, window + 1, 2 * window, 70))
    case = Case((*edges, (40, 4), (0, 1)), window=window, head_dim=16, num_kv_heads=1, adjacent=False, **options)
    check(case, 5)
check(case, 5, layer=1)
"""
WIDTHS = """
check(Case(((0, 4), (60, 4), (13, 4)), group=4, head_dim=16, adjacent=False), 5)
ragged = ((24, 64), (0, 33), (50, 1), (0, 1))
check(Case(ragged, head_dim=16, num_kv_heads=1, sinks=True, hides_first=True), 4, keys=32)
trees = ((30, 9), (23, 4), (0, 7), (5, 1), (50, 16))
for window in (None, 12):
    check(Case(trees, head_dim=16, num_kv_heads=1, trees=True, window=window, adjacent=False), 6)
check(Case(((20, 63),), group=1, head_dim=16, num_kv_heads=1, trees=True), 4, keys=32)
"""
PARTS = """
case = Case(((48, 3), (80, 2), (16, 5)), head_dim=16, num_kv_heads=1, adjacent=False)
inputs, expected = case.inputs, case.oracle()
# A mask of a token that no row has sees the prefix alone; a table from its end on holds the new tokens alone.
nobody = torch.full((case.q.shape[0],), 1 << 62)
prefix = attend(case, 5, tree_mask=nobody)
prefixes = [cached // 16 for cached, _ in case.lengths]
tables = [torch.roll(row, -cut) for row, cut in zip(inputs.page_table, prefixes, strict=True)]
case.inputs = dataclasses.replace(inputs, page_table=torch.stack(tables), kv_lens=inputs.qo_indptr.diff().long())
own = attend(case, 5)
for our, its in zip(merge(*prefix, *own), expected, strict=True):
    assert_close(our.double(), its, atol=2e-5, rtol=2e-5)
"""
SCHEDULES = """
attention_schedule._BLOCK = tl.constexpr(4)
generator = random.Random(SEED)
for number in range(NUM_CASES):
    num_rows, num_extra = generator.choice((1, 2, 4, 9)), generator.choice((1, 2, 7, 24))
    window, hides_first = generator.choice((None, 5, 40)), generator.random() < 0.5
    news = [generator.randint(1, 4) for _ in range(num_rows)]
    lengths = [new + generator.choice((0, generator.randint(0, 60), generator.randint(0, 3000))) for new in news]
    indptr = torch.tensor([0, *news]).cumsum(0).int()
    rows = ScheduledRows(indptr, torch.tensor(lengths), torch.empty(0), 4, max(lengths))
    made = schedule(rows, (8, 2), num_extra, KeyTile(16, 4, 2), window=window, hides_first=hides_first)
    firsts = [max(int(hides_first), 0 if window is None else length - new + 1 - window) // 16
              for length, new in zip(lengths, news)]
    counts = [math.ceil(length / 16) - first for length, first in zip(lengths, firsts)]
    num_more = [count - 1 for count in counts]
    most = max(1, math.ceil(sum(num_more) / num_extra))
    least = sum(num_more) // (num_extra + sum(map(bool, num_more))) + 1
    assert least == 1 or sum(more // (least - 1) for more in num_more) > num_extra
    tried = [least + (most - least) * number // 31 for number in range(32)]
    share = min(share for share in tried if sum(more // share for more in num_more) <= num_extra)
    parts = []
    for row in sorted(range(num_rows), key=lambda row: -counts[row]):
        num_parts = math.ceil(counts[row] / share)
        whole = [int(indptr[row]), news[row], lengths[row] - news[row], len(parts), num_parts]
        cuts = [firsts[row] + part * counts[row] // num_parts for part in range(num_parts + 1)]
        assert all(0 < end - cut <= share for cut, end in zip(cuts, cuts[1:]))
        parts += [[row, cut * 16, min(end * 16, lengths[row]), *whole] for cut, end in zip(cuts, cuts[1:])]
    assert len(parts) <= num_rows + num_extra and sum(part[-1] > 1 for part in parts) <= 2 * num_extra
    padding = [[0] * 8]
    assert made.parts.tolist() == parts + padding * (num_rows + num_extra - len(parts)), (number, lengths)
    assert made.counts.shape == (2 * num_extra, 2) and not made.counts.any()
"""
LAUNCHES = """
def rows(num_rows, max_q_len=1, max_kv_len=100_000):
    return ScheduledRows(torch.empty(0), torch.empty(num_rows), torch.empty(0), max_q_len, max_kv_len)

tile, larger = KeyTile(64, 4, 3), KeyTile(64, 4, 4, num_programs=2)
for heads, its in product(((32, 8), (16, 8), (4, 1), (64, 64)), (tile, larger)):
    for num_rows in range(1, 400):
        num_extra = choose_num_extra(rows(num_rows), heads, 132, its)
        num_parts = num_rows * (1 + num_extra // num_rows) * heads[1]  # of rows alike
        assert num_parts <= its.num_programs * 132 or num_parts == num_rows * heads[1], (heads, num_rows, num_parts)
        assert num_parts >= 132, (heads, num_rows, num_parts)
        assert num_extra * heads[1] > 132 - heads[1], (heads, num_rows)
assert [choose_num_extra(rows(num_rows), (32, 8), 132, larger) for num_rows in (1, 8, 16, 17)] == [31, 24, 16, 16]
assert [choose_num_extra(rows(num_rows), (32, 8), 132, tile) for num_rows in (1, 8, 16, 17)] == [32, 32, 32, 16]
assert [choose_num_extra(rows(num_rows, max_q_len=16), (32, 8), 132, tile) for num_rows in (1, 2, 8, 16)] == [16, 30, 24, 16]
assert choose_num_extra(rows(1, max_q_len=17), (32, 8), 132, tile) == 15
assert choose_num_extra(rows(1, max_q_len=64), (64, 64), 132, tile) == 3
assert choose_num_extra(rows(1, max_q_len=64), (1024, 64), 132, tile) == 1
assert choose_num_extra(rows(2, max_kv_len=200), (8, 1), 132, tile) == 6
assert choose_num_extra(rows(9, max_kv_len=64), (8, 1), 132, tile) == 1
"""
REPLAYS = """
first, second = (Case(lengths, head_dim=16, num_kv_heads=1, window=20, adjacent=False)
                 for lengths in (((140, 1), (40, 1), (5, 1)), ((70, 1), (2, 1), (130, 1))))
width = 32
pool = torch.full((2, 100 * 16, 1, 16), torch.nan)
kv = LayerKV(pool[0], pool[1])
table = torch.zeros((3, width), dtype=torch.int32)
inputs = dataclasses.replace(first.inputs, kv_lens=torch.ones(3).long(), page_table=table, max_kv_len=width * 16)
attention = TritonAttention(first.shape)
attention.plan(inputs)
for case in (first, second):
    pool.fill_(torch.nan)[:, : len(case.kv.k)] = torch.stack((case.kv.k, case.kv.v))
    inputs.page_table.fill_(NO_PAGE)[:, : case.inputs.page_table.shape[1]] = case.inputs.page_table
    inputs.kv_lens.copy_(case.inputs.kv_lens)
    for layer in (0, 1):
        out = attention.forward(case.q, case.k, case.v, kv, layer)
        assert_close(out.double(), case.oracle(layer)[0], atol=2e-5, rtol=2e-5)
"""
PADDING = """
lengths = ((599, 1), (40, 1), (5, 1))
for padded in (lengths, (*lengths, *((0, 1),) * 5)):
    case = Case(lengths, head_dim=16, group=1, num_kv_heads=2)
    inputs = case.inputs
    more = len(padded) - 3
    inputs = dataclasses.replace(
        inputs,
        q_lens=inputs.q_lens.repeat(3)[: len(padded)],
        qo_indptr=torch.arange(len(padded) + 1, dtype=torch.int32),
        kv_lens=torch.nn.functional.pad(inputs.kv_lens, (0, more), value=1),
        page_table=torch.nn.functional.pad(inputs.page_table, (0, 40, 0, more)),
        max_kv_len=case.inputs.max_kv_len if padded is lengths else 2000,
    )
    attention = TritonAttention(case.shape)
    attention.plan(inputs)
    q, k, v = (torch.nn.functional.pad(each, (0, 0, 0, 0, 0, more)) for each in (case.q, case.k, case.v))
    out = attention.forward(q, k, v, case.kv, 0)[:3]
    expected = out if padded is lengths else expected
    assert torch.equal(out, expected)
"""


@pytest.mark.parametrize(
    "program",
    [LENGTHS, WINDOWS, WIDTHS],
    ids=["edges", "windows", "trees"],
)
def test_equals_the_oracle_and_reads_nothing_that_a_row_does_not_own(program: str) -> None:
    """Slots without an owner, results and the room for parts hold NaN; table entries past a row's end lead nowhere."""
    run_interpreted(HEADER + program)


def test_attention_over_the_prefix_and_over_new_tokens_merge_to_the_whole() -> None:
    run_interpreted(HEADER + PARTS)


def test_long_rows_are_split_first_into_parts_of_at_most_a_share() -> None:
    print("seed 3")
    run_interpreted(HEADER + SCHEDULES.replace("SEED", "3").replace("NUM_CASES", "12"))


def test_rows_alike_fill_the_device_once_whatever_their_number() -> None:
    run_interpreted(HEADER + LAUNCHES)


def test_a_graph_splits_rows_by_the_lengths_of_each_replay() -> None:
    """Planned once; the tensors then hold other lengths and pages."""
    run_interpreted(HEADER + REPLAYS)


def test_rows_that_pad_a_batch_change_not_one_bit_of_the_others() -> None:
    """Nor does a larger bound of the lengths: a graph gives what an eager step gives."""
    run_interpreted(HEADER + PADDING)
