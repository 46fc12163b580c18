"""Packed rows, byte by byte, against a dump by hand; the kernels against the twin."""

from __future__ import annotations

import math

import pytest
import torch

from hiserve.kernels.row_codecs import PACKED_V4, load_keys, load_packed, scale_exponents, store_keys, store_packed
from tests.helpers.interpreted import run_interpreted

PAGE_ROWS, PAGE_BYTES = 4, 4 * 584 + 40


def test_a_row_has_584_bytes_of_which_these_are_known() -> None:
    """1 is 2**8 in tiles of scale 2**-8: 0x78, 119; 3.5 of scale 2**-7 is 448: 0x7E, 120. Zeros have the least scale."""
    assert PACKED_V4.row_bytes == 584
    pages = torch.full((3, PAGE_BYTES), 0xAB, dtype=torch.uint8)
    row = torch.zeros(512)
    row[:64], row[64:128], row[65], row[448:] = 1.0, 3.5, -7.0, -2.0
    store_packed(pages, torch.tensor([6]), row[None], PAGE_ROWS)
    page = pages[1]
    assert page[2 * 576 : 2 * 576 + 64].tolist() == [0x78] * 64
    assert page[2 * 576 + 64 : 2 * 576 + 67].tolist() == [0x76, 0xFE, 0x76]
    assert page[2 * 576 + 128 : 2 * 576 + 448].tolist() == [0] * 320
    assert page[2 * 576 + 448 : 3 * 576].tolist() == [0x00, 0xC0] * 64
    assert page[4 * 576 + 16 : 4 * 576 + 24].tolist() == [119, 121, *[105] * 5, 0]
    untouched = torch.ones_like(pages, dtype=torch.bool)
    untouched[1, 2 * 576 : 3 * 576] = untouched[1, 4 * 576 + 16 : 4 * 576 + 24] = False
    assert (pages[untouched] == 0xAB).all()
    assert torch.equal(load_packed(pages, torch.tensor([6]), PAGE_ROWS)[0], row)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 2, 2)])
def test_slots_of_any_shape_are_read_exactly(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    pages, rows = torch.zeros(6, PAGE_BYTES, dtype=torch.uint8), torch.randn(24, 512) * 3
    store_packed(pages, torch.arange(24), rows, PAGE_ROWS)
    once = load_packed(pages, torch.arange(24), PAGE_ROWS)
    again = torch.zeros_like(pages)
    store_packed(again, torch.arange(24), once, PAGE_ROWS)
    assert torch.equal(load_packed(again, torch.arange(24), PAGE_ROWS), once)
    assert torch.equal(once[:, 448:], rows[:, 448:].bfloat16().float())
    assert ((once - rows)[:, :448].abs() <= rows[:, :448].abs() / 14 + 2e-2).all()
    slots = torch.randint(-1, 24, shape)
    found = load_packed(pages, slots, PAGE_ROWS)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(-1, len(shape)).tolist():
        slot = int(slots[tuple(index)])
        assert torch.equal(found[tuple(index)], torch.zeros(512) if slot < 0 else once[slot])


def test_scales_are_the_least_powers_of_two_that_fit() -> None:
    largest = torch.tensor([0.0, 1e-4, 448.0, 449.0, 896.0, 1.0, 7.0, 3.4e38])
    wanted = [math.ceil(math.log2(max(each, 1e-4) / 448)) for each in largest.tolist()]
    assert scale_exponents(largest).tolist() == wanted


def test_keys_have_a_scale_each_behind_those_of_the_page() -> None:
    pages = torch.full((2, 4 * 132), 0xAB, dtype=torch.uint8)
    key = torch.zeros(128)
    key[0], key[1] = 4.48, -2.24
    store_keys(pages, torch.tensor([5]), key[None], PAGE_ROWS)
    assert pages[1, 128:131].tolist() == [0x7E, 0xF6, 0]
    assert pages[1, 512 + 4 : 512 + 8].view(torch.float32).item() == pytest.approx(0.01)
    assert (pages[0] == 0xAB).all() and (pages[1, 256:516] == 0xAB).all()
    torch.testing.assert_close(
        load_keys(pages, torch.tensor([[5, -1]]), PAGE_ROWS, 128), torch.stack((key, 0 * key))[None]
    )


PROGRAM = """
import torch
from hiserve.kernels import row_codec_triton as fused, row_codecs as reference
from hiserve.kernels.row_codecs import PACKED_V4, PackedShape

torch.set_num_threads(1)
torch.manual_seed(2)
for shape in (PACKED_V4, PackedShape(48, 16, 16)):
    rows = torch.randn(9, shape.width) * torch.tensor([1e-6, 1e-3, 0.1, 1, 7, 448, 1e4, 1e30, 0.0])[:, None]
    slots = torch.randperm(12)[:9]
    ours, theirs = torch.full((2, 3, 4 * shape.row_bytes + 16), 0xAB, dtype=torch.uint8)
    fused.store_packed(ours, slots, rows, 4, shape)
    reference.store_packed(theirs, slots, rows, 4, shape)
    assert torch.equal(ours, theirs), (ours != theirs).nonzero()[:5]
    wanted = torch.stack((slots[:4], torch.full((4,), -1)))
    assert torch.equal(fused.load_packed(ours, wanted, 4, shape), reference.load_packed(theirs, wanted, 4, shape))
"""


def test_triton_writes_and_reads_the_same_bytes() -> None:
    run_interpreted(PROGRAM)
