"""The kernel of absorbed queries against the reference backend, run by Triton's interpreter."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

HEADER = """
import dataclasses
import numpy as np
import torch
from torch.testing import assert_close
from hiserve.attention.base import AttentionShape
from hiserve.attention.latent_triton import TritonLatentAttention
from hiserve.attention.reference_attention import ReferenceAttention
from hiserve.core.forward import ForwardInputs, LatentKV
from hiserve.kernels import latent_decode
from tests.helpers.latent_case import pack_latents

torch.set_num_threads(1)
RANK, ROPE = 32, 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}

def batch(rows, num_decode, page_size, heads, dtype, hides_first=False, packs=False):
    torch.manual_seed(len(rows) + heads + page_size)
    lengths = [cached + new for cached, new in rows]
    pages = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(pages)).add_(1).split(pages)
    table = torch.full((len(rows), max(pages)), 2**31 - 1, dtype=torch.int32)
    pool = torch.full(((sum(pages) + 1) * page_size, 1, RANK + ROPE), torch.nan, dtype=dtype)
    for row, mine in enumerate(order):
        table[row, : len(mine)] = mine
        positions = torch.arange(lengths[row])
        places = mine[positions // page_size] * page_size + positions % page_size
        pool[places] = torch.randn(len(places), 1, RANK + ROPE).to(dtype)
        if hides_first:
            pool[places[0]] = torch.nan
    q_lens = np.array([new for _, new in rows], dtype=np.int32)
    inputs = ForwardInputs(
        input_ids=torch.zeros(int(q_lens.sum()), dtype=torch.int32),
        positions=torch.cat([torch.arange(cached, cached + new) for cached, new in rows]),
        slots=torch.zeros(int(q_lens.sum()), dtype=torch.int64),
        token_rows=torch.repeat_interleave(torch.arange(len(rows)), torch.from_numpy(q_lens).long()),
        qo_indptr=torch.from_numpy(np.concatenate(([0], q_lens.cumsum())).astype(np.int32)),
        kv_lens=torch.tensor(lengths), page_table=table, logits_rows=torch.zeros(0, dtype=torch.int64),
        q_lens=q_lens, kv_bounds=np.array(lengths, dtype=np.int32), max_kv_len=max(lengths), num_decode=num_decode)
    q = torch.randn(int(q_lens.sum()), heads, RANK + ROPE).to(dtype)
    shape = AttentionShape(1, heads, 1, RANK + ROPE, page_size, dtype, hides_first=hides_first)
    pool, packed = pack_latents(pool, RANK, page_size) if packs else (pool, None)
    unused = torch.zeros(heads, 1, RANK)
    return shape, inputs, q, LatentKV(k=pool, v=pool[..., :RANK], to_keys=unused, to_values=unused, packed=packed)

def attend(attention, inputs, q, kv):
    attention.plan(inputs)
    return attention.forward(q, q[:, :1], q[:, :1, :RANK], kv, 0)

def check(shape, inputs, q, kv):
    expected = attend(ReferenceAttention(shape), inputs, q, kv)
    found = attend(TritonLatentAttention(shape), inputs, q, kv)
    assert found.dtype == q.dtype
    assert_close(found, expected, atol=TOLERANCE[q.dtype], rtol=TOLERANCE[q.dtype])
    return found
"""
RAGGED = """
ROWS = ((5, 1), (0, 1), (33, 1), (40, 3), (0, 9), (17, 5))
for dtype in TOLERANCE:
    for page_size, heads, num_decode in ((16, 4, 4), (4, 20, 3), (16, 3, 0), (1, 5, 6)):
        check(*batch(ROWS, num_decode, page_size, heads, dtype))
"""
PACKED = """
# Of no row but those that are there anything is read: the others are NaN, scales too.
for dtype in TOLERANCE:
    check(*batch(((5, 1), (0, 1), (33, 1), (40, 3), (0, 9)), 3, 4, 5, dtype, packs=True))
check(*batch(((60, 1), (0, 2)), 1, 16, 3, torch.float32, hides_first=True, packs=True))
"""
SPLIT = """
# One row is shorter than a part, one ends with a part.
rows = ((700, 1), (3, 1), (511, 1))
chosen = []
choose = latent_decode.choose_num_parts
for least in (16, 256):
    latent_decode._MIN_PART_KEYS = least
    for dtype in TOLERANCE:
        shape, inputs, q, kv = batch(rows, 3, 16, 2, dtype)
        attention = TritonLatentAttention(shape)
        attention.plan(inputs)
        chosen.append([part.num_parts for part in attention._parts])
        check(shape, inputs, q, kv)
assert all(parts[0] > 1 for parts in chosen), chosen
latent_decode._MIN_PART_KEYS, latent_decode._NUM_JOINED = 16, 2  # as many parts at a time
check(*batch(rows, 3, 16, 2, torch.float32))
# The same launch serves other lengths, as a graph does: parts follow the lengths on the device.
shape, inputs, q, kv = batch(rows, 3, 16, 2, torch.float32)
attention = TritonLatentAttention(shape)
attention.plan(inputs)
for lengths in ([701, 4, 512], [1, 1, 1], [16, 2, 257], [640, 3, 256]):
    inputs.kv_lens.copy_(torch.tensor(lengths))
    found = attention.forward(q, q[:, :1], q[:, :1, :RANK], kv, 0)
    exact = dataclasses.replace(inputs, kv_bounds=np.array(lengths, dtype=np.int32))
    assert_close(found, attend(ReferenceAttention(shape), exact, q, kv), atol=2e-5, rtol=2e-5)
# A short row has fewer parts than its launch: what the others would write is not there, and is not read.
empty = torch.empty
torch.empty = lambda size, **how: torch.full(size, torch.nan, **how)
check(*batch(((700, 1), (3, 1), (40, 1)), 3, 16, 2, torch.float32))
torch.empty = empty
"""
CHOSEN = """
from hiserve.kernels import chosen_reference, chosen_triton

# In parts, and in two launches of one part.
for dtype, heads, most, wanted, most_tokens in ((torch.float32, 3, 30, 2, 65_535), (torch.float16, 20, 7, 0, 2)):
    torch.manual_seed(heads)
    chosen_triton.num_processors = lambda device: wanted * 3
    latent_decode._MIN_PART_KEYS, chosen_triton._MAX_TOKENS = 16, most_tokens
    pool, q = torch.randn(60, RANK + ROPE).to(dtype), torch.randn(3, heads, RANK + ROPE).to(dtype)
    pool[0] = torch.nan
    counts = torch.tensor([most - 1, 2, most])
    slots = torch.rand(3, 59).argsort(-1)[:, :most] + 1
    slots[torch.arange(most) >= counts[:, None]] = 2**40  # what lies behind a token's rows is not read
    expected, found = (
        ops.attend_chosen(q, pool, slots, counts, 0.2, RANK) for ops in (chosen_reference, chosen_triton)
    )
    assert found.dtype == dtype and found.shape == (3, heads, RANK)
    assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    both = pool[slots[1, :2]].float()
    shares = torch.einsum("hn,kn->hk", q[1].float(), both).mul(0.2).softmax(-1)
    assert_close(found[1].float(), shares @ both[:, :RANK], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    pool, packed = pack_latents(pool[:, None], RANK, 4)
    expected, found = (
        ops.attend_chosen(q, pool[:, 0], slots, counts, 0.2, RANK, packed) for ops in (chosen_reference, chosen_triton)
    )
    assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
"""
HIDDEN = """
rows = ((0, 1), (40, 2), (0, 6), (300, 1))
for least in (16, 256):
    latent_decode._MIN_PART_KEYS = least
    shape, inputs, q, kv = batch(rows, 2, 4, 3, torch.float32, hides_first=True)
    found = check(shape, inputs, q, kv)
    assert (found[inputs.positions == 0] == 0).all() and not found.isnan().any()
"""
PADDING = """
# A row without tokens, and tokens of no row: as in a graph for more of both.
shape, inputs, q, kv = batch(((5, 1), (20, 2)), 2, 16, 3, torch.float32)
expected = attend(ReferenceAttention(shape), inputs, q, kv)
more = dataclasses.replace(
    inputs,
    qo_indptr=torch.tensor([0, 1, 1, 3], dtype=torch.int32),
    kv_lens=torch.tensor([6, 1, 22]),
    page_table=torch.stack((inputs.page_table[0], torch.zeros_like(inputs.page_table[0]), inputs.page_table[1])),
    q_lens=np.array([1, 1, 2], dtype=np.int32), num_decode=3)
plain = torch.Tensor.new_empty
torch.Tensor.new_empty = lambda like, size, **how: plain(like, size, **how).fill_(7)
found = attend(TritonLatentAttention(shape).ragged(), more, torch.cat((q, q)), kv)
assert_close(found[:3], expected, atol=2e-5, rtol=2e-5)
assert (found[3:] == 0).all()
def num_parts(num_rows, queries, max_kv_len):
    return latent_decode.choose_num_parts(num_rows, queries, max_kv_len, torch.bfloat16, num_sms=132, room=40960)

assert num_parts(1, 128, 8192) == 64
assert num_parts(32, 128, 8192) == 4
assert num_parts(1, 20, 100) == 2
assert num_parts(1, 20, 1 << 20) == 64
assert num_parts(2, 500 * 128, 1 << 20) == 1
"""


def test_ragged_rows_see_what_the_reference_sees() -> None:
    run_interpreted(HEADER + RAGGED)


def test_rows_in_8_bits_are_read_as_the_reference_reads_them() -> None:
    run_interpreted(HEADER + PACKED)


def test_parts_of_rows_are_joined_by_their_sums_whatever_the_lengths() -> None:
    run_interpreted(HEADER + SPLIT)


def test_chosen_rows_are_those_of_the_twin_and_no_others() -> None:
    run_interpreted(HEADER + CHOSEN)


def test_a_hidden_first_row_is_read_by_nobody() -> None:
    run_interpreted(HEADER + HIDDEN)


def test_rows_without_tokens_and_tokens_without_rows_change_nothing() -> None:
    run_interpreted(HEADER + PADDING)
