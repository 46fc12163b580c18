"""The kernel that lists the pages of rows, and its twin; by Triton's interpreter where there is no device."""

from __future__ import annotations

import torch

from hiserve.kernels.reference import list_pages
from tests.helpers.interpreted import run_interpreted

PROGRAM = """
import torch
from hiserve.kernels import page_lists, reference

page_lists._BLOCK = 4
generator = torch.Generator().manual_seed(5)
table = torch.randint(1, 90, (6, 11), generator=generator, dtype=torch.int32)
kv_lens = torch.tensor([33, 1, 7, 32, 40, 8])
rows, indptr = torch.tensor([3, 0, 5, 4]), torch.tensor([0, 8, 17, 20, 30], dtype=torch.int32)
starts = torch.tensor([1, 0, 8, 1], dtype=torch.int32)
for page_size in (4, 3, 16):
    for first in (None, starts):
        ours, theirs = torch.full((2, 30), -1, dtype=torch.int32)
        page_lists.list_pages(table, kv_lens, rows, indptr, page_size, ours, first)
        reference.list_pages(table, kv_lens, rows, indptr, page_size, theirs, first)
        assert torch.equal(ours, theirs), (page_size, first, ours, theirs)
"""


def test_the_kernel_lists_what_its_twin_lists() -> None:
    run_interpreted(PROGRAM)


def test_rows_stand_behind_each_other_and_the_sink_stands_for_what_a_shorter_row_does_not_have() -> None:
    table = torch.tensor([[5, 6, 7], [1, 2, -9], [3, -9, -9]], dtype=torch.int32)
    rows, indptr = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 5, 7], dtype=torch.int32)
    out = torch.empty(7, dtype=torch.int32)
    list_pages(table, torch.tensor([9, 8, 1]), rows, indptr, 4, out)
    assert out.tolist() == [3, 0, 5, 6, 7, 1, 2]


def test_a_list_starts_at_the_first_entry_that_is_wanted_of_each_row() -> None:
    table = torch.tensor([[-9, 6, 7, 8], [1, 2, -9, -9]], dtype=torch.int32)
    out = torch.empty(6, dtype=torch.int32)
    first = torch.tensor([1, 0], dtype=torch.int32)
    list_pages(table, torch.tensor([13, 8]), torch.tensor([0, 1]), torch.tensor([0, 3, 6]), 4, out, first)
    assert out.tolist() == [6, 7, 8, 1, 2, 0]
