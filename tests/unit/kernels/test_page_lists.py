"""The kernel that lists the pages of rows, and its twin; by Triton's interpreter where there is no device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hiserve.kernels.reference import list_pages

ROOT = Path(__file__).parent.parent.parent.parent
PROGRAM = """
import torch
from hiserve.kernels import page_lists, reference

page_lists._BLOCK = 4
generator = torch.Generator().manual_seed(5)
table = torch.randint(1, 90, (6, 11), generator=generator, dtype=torch.int32)
kv_lens = torch.tensor([33, 1, 7, 32, 40, 8])
rows, indptr = torch.tensor([3, 0, 5, 4]), torch.tensor([0, 8, 17, 20, 30], dtype=torch.int32)
for page_size in (4, 3, 16):
    ours, theirs = torch.full((2, 30), -1, dtype=torch.int32)
    page_lists.list_pages(table, kv_lens, rows, indptr, page_size, ours)
    reference.list_pages(table, kv_lens, rows, indptr, page_size, theirs)
    assert torch.equal(ours, theirs), (page_size, ours, theirs)
print("same")
"""


@pytest.mark.timeout(120)
def test_the_kernel_lists_what_its_twin_lists() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


def test_rows_stand_behind_each_other_and_the_sink_stands_for_what_a_shorter_row_does_not_have() -> None:
    table = torch.tensor([[5, 6, 7], [1, 2, -9], [3, -9, -9]], dtype=torch.int32)
    rows, indptr = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 5, 7], dtype=torch.int32)
    out = torch.empty(7, dtype=torch.int32)
    list_pages(table, torch.tensor([9, 8, 1]), rows, indptr, 4, out)
    assert out.tolist() == [3, 0, 5, 6, 7, 1, 2]
