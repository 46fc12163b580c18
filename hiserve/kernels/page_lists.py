"""Flattens rows of a page table into one list, for attention libraries that take pages as a list."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def list_pages(
    page_table: Tensor,
    kv_lens: Tensor,
    rows: Tensor,
    indptr: Tensor,
    page_size: int,
    out: Tensor,
    first: Tensor | None = None,
) -> None:
    """Like ``kernels.reference.list_pages``; entries of a row of ``page_table`` are adjacent."""
    assert page_table.stride(1) == 1, f"table entries {page_table.stride()} apart"
    grid = (rows.shape[0], triton.cdiv(page_table.shape[1], _BLOCK))
    _list_pages[grid](
        page_table, kv_lens, rows, indptr, first, out, page_table.stride(0), PAGE_SIZE=page_size, BLOCK=_BLOCK
    )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "rows", "indptr", "first"],
)
def _list_pages(  # type: ignore[no-untyped-def]
    page_table, kv_lens, rows, indptr, first, out, table_stride,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program copies one block of entries of one row."""
    begin = tl.load(indptr + tl.program_id(0))
    count = tl.load(indptr + tl.program_id(0) + 1) - begin
    row = tl.load(rows + tl.program_id(0))
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_listed = place < count
    entry = place
    if first is not None:
        entry += tl.load(first + tl.program_id(0))
    is_used = is_listed & (entry.to(tl.int64) * PAGE_SIZE < tl.load(kv_lens + row))
    pages = tl.load(page_table + row * table_stride + entry, mask=is_used, other=0)
    tl.store(out + begin + place, pages, mask=is_listed)
