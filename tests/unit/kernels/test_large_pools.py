"""Pools of more elements than 32 bits count: where a slot lies is computed in 64 bits by every kernel that reads or writes one.

By Triton's interpreter, over memory of which no more is touched than the slots of a small batch: they lie far apart.
"""

from __future__ import annotations

import pytest

from tests.helpers.interpreted import run_interpreted

HEADER = """
from dataclasses import replace
import torch
from torch.testing import assert_close
from hiserve.attention.triton import TritonAttention
from hiserve.core.forward import LayerKV
from tests.helpers.attention import RAGGED, Case

torch.set_num_threads(1)

def spread(x):
    '''The same, with rows so far apart that the last fifth of them lies beyond 2**31 elements.'''
    stride = (2**31 + 2**29) // x.shape[0] // 64 * 64
    apart = torch.empty(x.shape[0] * stride, dtype=x.dtype).as_strided(x.shape, (stride, *x.stride()[1:]))
    assert apart[-1].storage_offset() > 2**31
    return apart.copy_(x)
"""
ATTENDS = """
# all rows of a batch, those that decode, and prompts; adjacent pages and others take other ways through the same kernels
for lengths, adjacent in ((RAGGED, False), (((40, 1), (63, 1), (15, 1)), True), (((0, 40), (33, 30)), True)):
    case = Case(lengths, adjacent=adjacent, dtype=torch.float16)
    keys, values = case.kv.k.contiguous(), case.kv.v.contiguous()
    case.kv = LayerKV(spread(keys), spread(values))
    got = case.run(TritonAttention(case.shape)).double()
    assert_close(got, case.oracle()[0], atol=2e-3, rtol=2e-3)
"""
STORES = """
from hiserve.kernels import fused, reference
generator = torch.Generator().manual_seed(3)
for heads, kv_heads in ((4, 2), (2, 2)):
    qkv = torch.randn((3, heads + 2 * kv_heads, 16), generator=generator)
    cos, sin = reference.rotations(torch.tensor([5, 900, 3]), 0.5 ** torch.arange(8), 1.0, torch.float32)
    slots = torch.tensor([39, 1, 20])
    near = LayerKV(*torch.zeros((2, 40, kv_heads, 16)))
    far = LayerKV(spread(near.k), spread(near.v))
    reference.rotate_and_store(qkv.clone(), None, 1e-6, cos, sin, near, slots)
    fused.rotate_and_store(qkv.clone(), None, 1e-6, cos, sin, far, slots)
    for ours, theirs in ((far.k, near.k), (far.v, near.v)):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert theirs[slots].abs().amin() > 0
"""
DRAFTS = """
from hiserve.kernels import draft_triton, draft_reference
from tests.helpers.draft_cases import draft_case
generator = torch.Generator().manual_seed(7)
num_kept = 0
for _ in range(12):
    case = draft_case(generator)
    made = draft_triton.draft_inputs(*case.columns, case.state, page_size=case.page_size, width=case.width)
    near = case.step_hidden_states(made.page_table)
    far = replace(near, page_hidden=spread(near.page_hidden.contiguous()), last=near.last.clone())
    assert torch.equal(draft_triton.draft_hidden_states(far), draft_reference.draft_hidden_states(near))
    before = near.page_hidden.clone()
    draft_triton.keep_hidden_states(far, case.state)
    draft_reference.keep_hidden_states(near, case.state)
    assert torch.equal(far.page_hidden, near.page_hidden)
    num_kept += int((before != near.page_hidden)[near.page_hidden.shape[0] * 5 // 6 :].any())
assert num_kept > 0
"""
COPIES = """
from hiserve.kernels.page_copy import copy_pages
num_planes, num_pages, piece = 3, 1 << 20, 1031  # bytes; an odd number, so that a word is a byte
planes = torch.empty((num_planes, num_pages, piece), dtype=torch.uint8)
pages = torch.empty((num_pages, num_planes * piece), dtype=torch.uint8)
assert planes.numel() > 2**31
last = num_pages - 1
data = torch.randint(1, 255, (2, num_planes, piece), dtype=torch.uint8)
for index, page in enumerate((0, last)):
    planes[:, page] = data[index]
indices = torch.tensor([[0, last], [1, last]], dtype=torch.int32)
copy_pages(planes, pages, indices, to_planes=False, max_programs=2)
assert all(torch.equal(pages[page], data[index].flatten()) for index, page in enumerate((1, last)))
for page in (0, last):
    planes[:, page] = 0
copy_pages(planes, pages, indices, to_planes=True, max_programs=2)
assert all(torch.equal(planes[:, page], data[index]) for index, page in enumerate((0, last)))
"""
PROGRAMS = {"attention": ATTENDS, "stores": STORES, "drafts": DRAFTS, "copies": COPIES}


@pytest.mark.parametrize("name", PROGRAMS)
def test_slots_beyond_what_32_bits_count_are_found(name: str) -> None:
    run_interpreted(HEADER + PROGRAMS[name])
