"""Copies pages between memory with one plane per layer and memory where a page is contiguous.

The second may be pinned host memory: the kernel then reads or writes it over the link.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_BYTES = 16384
_NUM_WARPS = 8
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def word_type(num_bytes: int) -> torch.dtype:
    """Returns the widest integer type of which ``num_bytes`` is a multiple."""
    return next(dtype for size, dtype in _WORDS if num_bytes % size == 0)


def copy_pages(planes: Tensor, pages: Tensor, indices: Tensor, *, to_planes: bool, max_programs: int) -> None:
    """Copies ``planes[:, indices[0, i]]`` to ``pages[indices[1, i]]`` for each i, or back, without waiting.

    Args:
        planes: ``[num_planes, num_pages, piece_words]``, contiguous, on the device.
        pages: ``[n, num_planes * piece_words]`` of the same integer type, rows at any distance; on the device, or
            on the host if all pages named are pinned and mapped.
        indices: int32 ``[2, m]`` on the device, rows at any distance. Written pages are named once each.
        to_planes: The direction.
        max_programs: Bound on concurrent programs, and so on the multiprocessors taken from forwards.
    """
    PreparedCopy(planes, pages, to_planes=to_planes, max_programs=max_programs)(indices)


class PreparedCopy:
    """``copy_pages`` for repeated calls with the same memory: everything but the indices is computed once."""

    def __init__(self, planes: Tensor, pages: Tensor, *, to_planes: bool, max_programs: int) -> None:
        num_planes, num_plane_pages, piece_words = planes.shape
        num_words = num_planes * piece_words
        assert planes.is_contiguous() and pages.stride(1) == 1, f"{planes.stride()} and {pages.stride()} apart"
        assert pages.shape[1] == num_words, f"{planes.shape} and {pages.shape}"
        assert planes.dtype == pages.dtype, f"{planes.dtype} and {pages.dtype}"
        block = min(_BLOCK_BYTES // planes.element_size(), triton.next_power_of_2(num_words))
        self._planes, self._pages = planes, pages
        self._strides = num_plane_pages * piece_words, pages.stride(0)
        self._blocks_per_page, self._max_programs = triton.cdiv(num_words, block), max_programs
        self._constants = {
            "NUM_WORDS": num_words,
            "PIECE_WORDS": piece_words,
            "TO_PLANES": to_planes,
            "BLOCK": block,
            "num_warps": _NUM_WARPS,
        }

    def __call__(self, indices: Tensor) -> None:
        """Copies the pages named by ``indices``; see ``copy_pages``."""
        index_stride, one = indices.stride()
        count = indices.shape[1]
        assert not count or one == 1, f"page numbers {indices.stride()} apart"
        num_programs = max(1, min(count * self._blocks_per_page, self._max_programs))
        _copy_pages[(num_programs,)](
            self._planes, self._pages, indices, count, index_stride, *self._strides, **self._constants
        )


@triton.jit(do_not_specialize=["count", "index_stride"], do_not_specialize_on_alignment=["indices"])
def _copy_pages(  # type: ignore[no-untyped-def]
    planes, pages, indices, count, index_stride, plane_stride, page_stride,
    NUM_WORDS: tl.constexpr, PIECE_WORDS: tl.constexpr, TO_PLANES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program copies every n-th block of the pages. Offsets are 64 bits wide: pools have more than 2**31 words."""
    blocks_per_page: tl.constexpr = (NUM_WORDS + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), count * blocks_per_page, tl.num_programs(0)):
        number = item // blocks_per_page
        word = (item % blocks_per_page) * BLOCK + tl.arange(0, BLOCK)
        plane_page = tl.load(indices + number).to(tl.int64)
        page = tl.load(indices + index_stride + number).to(tl.int64)
        plane = (word // PIECE_WORDS).to(tl.int64)
        ours = planes + plane * plane_stride + plane_page * PIECE_WORDS + word % PIECE_WORDS
        theirs = pages + page * page_stride + word
        mask = word < NUM_WORDS
        if TO_PLANES:
            tl.store(ours, tl.load(theirs, mask=mask), mask=mask)
        else:
            tl.store(theirs, tl.load(ours, mask=mask), mask=mask)
