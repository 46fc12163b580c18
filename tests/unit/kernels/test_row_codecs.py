"""Packed rows, byte by byte, against a dump by hand; the kernels against the twin."""

from __future__ import annotations

import math

import pytest
import torch

from hiserve.core.row_shapes import PACKED_V4, PackedPages, PackedShape, packed_key, packed_row
from hiserve.kernels.row_codecs import load_packed, scale_exponents, store_packed
from tests.helpers.interpreted import run_interpreted

PAGE_ROWS, PAGE_BYTES = 4, 4 * 584
PAGES = PackedPages(PACKED_V4, PAGE_ROWS)


def test_a_row_has_584_bytes_of_which_these_are_known() -> None:
    """1 is 2**8 in tiles of scale 2**-8: 0x78, 119; 3.5 of scale 2**-7 is 448: 0x7E, 120. Zeros have the least scale."""
    assert PACKED_V4.row_bytes == 584
    pages = torch.full((3, PAGE_BYTES), 0xAB, dtype=torch.uint8)
    row = torch.zeros(512)
    row[:64], row[64:128], row[65], row[448:] = 1.0, 3.5, -7.0, -2.0
    store_packed(pages, torch.tensor([6]), row[None], PAGES)
    page = pages[1]
    assert page[2 * 576 : 2 * 576 + 64].tolist() == [0x78] * 64
    assert page[2 * 576 + 64 : 2 * 576 + 67].tolist() == [0x76, 0xFE, 0x76]
    assert page[2 * 576 + 128 : 2 * 576 + 448].tolist() == [0] * 320
    assert page[2 * 576 + 448 : 3 * 576].tolist() == [0x00, 0xC0] * 64
    assert page[4 * 576 + 16 : 4 * 576 + 24].tolist() == [119, 121, *[105] * 5, 0]
    untouched = torch.ones_like(pages, dtype=torch.bool)
    untouched[1, 2 * 576 : 3 * 576] = untouched[1, 4 * 576 + 16 : 4 * 576 + 24] = False
    assert (pages[untouched] == 0xAB).all()
    assert torch.equal(load_packed(pages, torch.tensor([6]), PAGES)[0], row)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 2, 2)])
def test_slots_of_any_shape_are_read_exactly(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    pages, rows = torch.zeros(6, PAGE_BYTES, dtype=torch.uint8), torch.randn(24, 512) * 3
    store_packed(pages, torch.arange(24), rows, PAGES)
    once = load_packed(pages, torch.arange(24), PAGES)
    again = torch.zeros_like(pages)
    store_packed(again, torch.arange(24), once, PAGES)
    assert torch.equal(load_packed(again, torch.arange(24), PAGES), once)
    assert torch.equal(once[:, 448:], rows[:, 448:].bfloat16().float())
    assert ((once - rows)[:, :448].abs() <= rows[:, :448].abs() / 14 + 2e-2).all()
    slots = torch.randint(-1, 24, shape)
    found = load_packed(pages, slots, PAGES)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(-1, len(shape)).tolist():
        slot = int(slots[tuple(index)])
        assert torch.equal(found[tuple(index)], torch.zeros(512) if slot < 0 else once[slot])


def test_scales_are_the_least_powers_of_two_that_fit() -> None:
    largest = torch.tensor([0.0, 1e-4, 448.0, 449.0, 896.0, 1.0, 7.0, 3.4e38])
    wanted = [math.ceil(math.log2(max(each, 1e-4) / 448)) for each in largest.tolist()]
    assert scale_exponents(largest).tolist() == wanted


def test_keys_have_a_scale_each_behind_those_of_the_page() -> None:
    shape = packed_key(128)
    assert shape is not None and shape.row_bytes == 132
    pool, pages = torch.full((8, 132), 0xAB, dtype=torch.uint8), PackedPages(shape, PAGE_ROWS)
    key = torch.zeros(128)
    key[0], key[1] = 4.5, -2.25
    store_packed(pool, torch.tensor([5]), key[None], pages)
    page = pool.view(2, 4 * 132)
    assert page[1, 128:131].tolist() == [0x7E, 0xF6, 0]
    assert page[1, 512 + 4 : 512 + 8].view(torch.float32).item() == pytest.approx(4.5 / 448)
    assert (page[0] == 0xAB).all() and (page[1, 256:516] == 0xAB).all()
    torch.testing.assert_close(load_packed(pool, torch.tensor([[5, -1]]), pages), torch.stack((key, 0 * key))[None])


def test_a_row_of_v3_2_has_656_bytes_and_a_scale_of_float32_for_128_numbers() -> None:
    pages = PackedPages(PackedShape(512, 64, 128, has_wide_scales=True), PAGE_ROWS)
    assert pages.shape.row_bytes == 656
    pool, rows = torch.zeros(8, 656, dtype=torch.uint8), torch.randn(8, 576) * 50
    store_packed(pool, torch.arange(8), rows, pages)
    found = load_packed(pool, torch.arange(8), pages)
    assert torch.equal(found[:, 512:], rows[:, 512:].bfloat16().float())
    assert ((found - rows)[:, :512].abs() <= rows[:, :512].abs() / 14 + 50 * 2**-9).all()


def test_shapes_that_do_not_fit_are_none() -> None:
    assert packed_row(512, 64) == PACKED_V4
    assert packed_row(32, 8) == PackedShape(24, 8, 8)
    assert not any(packed_row(*each) for each in ((512, 0), (512, 4), (512, 128), (512, 24), (520, 64), (64, 64)))
    assert not any(packed_key(width) for width in (4, 48, 0))


HEADER = """
import torch
from dataclasses import replace
from torch.testing import assert_close
from hiserve.core.row_shapes import PACKED_V4, PackedPages, packed_key, packed_row
from hiserve.kernels import compressed_fused as fused, compressed_reference as reference, latent_union
from hiserve.kernels.row_codecs import load_packed
from hiserve.kernels.union_rows import ChosenRows
from tests.helpers.compressed_cases import Compressed, Step, packed_rows, random_compression

torch.set_num_threads(1)
torch.manual_seed(2)
"""
STORED = """
for shape in (PACKED_V4, packed_row(32, 8), packed_key(16)):
    width = shape.width
    x = torch.randint(0, 2, (7, 1, width)) * 2.0 - 1  # of these the norm changes nothing, so that both have the same numbers
    sizes = torch.tensor([1e-6, 1e-3, 0.1, 1, 448, 1e4, 1e30]).repeat_interleave(width // 8)
    norm = torch.randn(width) * torch.cat((sizes, torch.ones(width - len(sizes))))[torch.randperm(width)]
    cos, sin = torch.ones(7, 4), torch.zeros(7, 4)
    slots, pools = torch.randperm(12)[:7], torch.full((2, 12, shape.row_bytes), 0xAB, dtype=torch.uint8)
    for ops, pool in zip((fused, reference), pools):
        ops.store_rows(x, x[:, 0], norm, 0.0, cos, sin, pool, slots, PackedPages(shape, 4))
    assert torch.equal(*pools), (pools[0] != pools[1]).nonzero()[:5]
    assert (pools[0] != 0xAB).any()
how = random_compression(32, 4, 2, torch.float32)
values, scores = torch.randn(2, 30, 64)
pools = []
for ops in (fused, reference):
    case = Compressed(how, values, scores, torch.randn(30, 4, generator=torch.Generator().manual_seed(1)), ring=16)
    case.pool = torch.zeros(case.pool.shape[0], packed_row(32, 8).row_bytes, dtype=torch.uint8)
    case.table[1] = torch.arange(len(case.table[1])) + 1
    case.table[1, -1] = 0
    pages = PackedPages(packed_row(32, 8), case.page_rows)
    for start, end in ((0, 13), (13, 30)):
        case.step(lambda *given: ops.compress(*given[:5], replace(given[5], packed=pages), given[6]), start, end)
    pools.append(load_packed(case.pool, torch.arange(case.page_rows, case.page_rows + 7), pages))
assert pools[0].abs().min(1).values.gt(0).all()
assert_close(*pools, rtol=0.13, atol=1e-3)  # what lies between two numbers of 8 bits may be rounded either way
assert (pools[0] != pools[1]).float().mean() < 0.02
"""
READ = """
STEP = Step(cached=(0, 37, 90), new=(2, 1, 3))
row, key = packed_row(32, 8), packed_key(16)
choose = latent_union.choose_parts
for dtype, close, num_parts in ((torch.float32, 2e-6, 1), (torch.float16, 2e-3, 3)):
    latent_union.choose_parts = lambda *given: (choose(*given)[0], num_parts)
    window, prefix = STEP.paged(32, 16, 1, 12, dtype), STEP.paged(32, 2, 4, None, dtype)
    slots = torch.randint(-1, 60, (6, 20))
    some = ChosenRows(torch.randn(60, 32).to(dtype), slots)
    some.pool[torch.ones(60, dtype=torch.bool).index_fill_(0, slots.clamp(min=0).flatten(), False)] = torch.nan
    q, sink = torch.randn(6, 3, 32).to(dtype), torch.randn(3)
    window, prefix, some = packed_rows(window, row, 16), packed_rows(prefix, row, 2), packed_rows(some, row, 4)
    for sources in {1: ([window, prefix], [some]), 3: ([window, some],)}[num_parts]:
        found, expected = (ops.attend(q, sources, sink, 0.3) for ops in (fused, reference))
        assert not found[0].isnan().any()
        assert_close(found, expected, atol=close, rtol=close)
    if num_parts == 1:
        continue
    keys = packed_rows(STEP.paged(16, 4, 2, None, dtype), key, 4)
    q, weights = torch.randn(6, 5, 16).to(dtype), torch.randn(6, 5)
    found, expected = (ops.choose_rows(q, weights, keys, 7, 0.5) for ops in (fused, reference))
    assert torch.equal(found, expected) and (found >= 0).any()
"""


def test_kernels_write_the_bytes_of_the_twin() -> None:
    run_interpreted(HEADER + STORED)


def test_kernels_read_packed_rows_as_the_twin_does() -> None:
    run_interpreted(HEADER + READ)
