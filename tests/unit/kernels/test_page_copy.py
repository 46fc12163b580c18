"""The kernel that copies pages, run by Triton's interpreter where there is no device."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.interpreted import run_interpreted

PROGRAM = """
import torch
from hiserve.kernels.page_copy import copy_pages

generator = torch.Generator().manual_seed(3)
indices = torch.tensor([[3, 1, 4], [5, 7, 2]], dtype=torch.int32)
ours, theirs = indices.long()

def draw(*shape, dtype):
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)

# (planes, words a piece, type): blocks that fill a page, that do not, and several a page
for num_planes, piece, dtype in ((6, 48, torch.int64), (2, 7, torch.int32), (4, 1500, torch.int64)):
    planes, memory = draw(num_planes, 10, piece, dtype=dtype), draw(12, num_planes * piece + 5, dtype=dtype)
    before_planes, before_memory = planes.clone(), memory.clone()
    copy_pages(planes, memory[:, 3:-2], indices, to_planes=False, max_programs=2)
    expected = before_memory.clone()
    expected[theirs, 3:-2] = before_planes[:, ours].transpose(0, 1).reshape(3, -1)
    assert torch.equal(memory, expected) and torch.equal(planes, before_planes), (num_planes, piece)
    memory.copy_(before_memory)
    copy_pages(planes, memory[:, 3:-2], indices, to_planes=True, max_programs=2)
    before_planes[:, ours] = before_memory[theirs, 3:-2].view(3, num_planes, piece).transpose(0, 1)
    assert torch.equal(memory, before_memory) and torch.equal(planes, before_planes), (num_planes, piece)
copy_pages(planes, memory[:, 3:-2], indices[:, :0], to_planes=True, max_programs=2)
assert torch.equal(planes, before_planes)
"""


def test_pages_are_copied_both_ways_and_nothing_else_is_touched() -> None:
    run_interpreted(PROGRAM)


@pytest.mark.parametrize(
    ("num_bytes", "dtype"), [(48, torch.int64), (12, torch.int32), (6, torch.int16), (7, torch.uint8)]
)
def test_words_are_as_wide_as_pieces_allow(num_bytes: int, dtype: torch.dtype) -> None:
    from hiserve.kernels.page_copy import word_type

    assert word_type(num_bytes) == dtype
