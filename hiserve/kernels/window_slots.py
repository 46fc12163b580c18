"""The slots of a window, in Triton; ``kernels.union_rows`` is the twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.union_rows import RangeRows


def slots_behind_first(source: RangeRows, kv_lens: Tensor, qo_indptr: Tensor) -> Tensor:
    """Like ``union_rows.slots_behind_first``."""
    assert source.window is not None and source.ratio == 1 and source.table.stride(1) == 1, source.table.stride()
    num_tokens, width = source.token_rows.shape[0], source.width
    slots = torch.empty((num_tokens, width), dtype=torch.int64, device=kv_lens.device)
    _list_slots[(num_tokens,)](
        source.token_rows, kv_lens, qo_indptr, source.table, slots, source.table.stride(0), width,
        WINDOW=source.window, PAGE_ROWS=source.page_rows, BLOCK=triton.next_power_of_2(source.window), num_warps=1,
        **early_launch(kv_lens.device),
    )  # fmt: skip
    return slots


@triton.jit(do_not_specialize=["table_stride", "width"])
def _list_slots(  # type: ignore[no-untyped-def]
    token_rows, kv_lens, qo_indptr, table, slots, table_stride, width,
    WINDOW: tl.constexpr, PAGE_ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program lists those of one token."""
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row = tl.load(token_rows + token)
    position = tl.load(kv_lens + row) - tl.load(qo_indptr + row + 1) + token
    number = tl.maximum(position - WINDOW + 1, 0) + place
    is_seen = (place < width) & (number > 0) & (number <= position)
    page = tl.load(table + row * table_stride + number // PAGE_ROWS, mask=is_seen, other=0).to(tl.int64)
    slot = tl.where(is_seen, page * PAGE_ROWS + number % PAGE_ROWS, -1)
    tl.store(slots + token * width + place, slot, mask=place < width)
