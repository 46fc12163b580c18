"""Trees of drafts in Triton: the walk, and the move of accepted nodes; twins in ``step_reference``, the growth in ``tree_growth``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.step_ops import RowTensors

_MOVE_BLOCK = 1024


def walk(drawn: Tensor, sampling_rows: Tensor, num_draft: Tensor, state: RowTensors) -> tuple[Tensor, Tensor]:
    assert state.trees is not None and drawn.is_contiguous(), f"rows without trees, or tokens {drawn.stride()} apart"
    num_sampling, width = drawn.shape
    masks, max_depth = state.trees.masks, min(state.trees.max_depth, width - 1)
    counts = torch.empty(num_sampling, dtype=torch.int64, device=drawn.device)
    path = counts.new_empty((num_sampling, 1 + max_depth))
    _walk_rows[(num_sampling,)](
        drawn, sampling_rows, num_draft, state.known_len, state.tokens, masks, counts, path, width,
        state.tokens.shape[1], masks.shape[1], max_depth,
        BLOCK=triton.next_power_of_2(width), num_warps=1, **early_launch(drawn.device),
    )  # fmt: skip
    return counts, path


def move(storages: Sequence[Tensor], slots: Tensor, starts: Tensor, path: Tensor, counts: Tensor) -> None:
    for storage in storages:
        num_layers, num_planes, num_slots = storage.shape[:3]
        rows = storage.view(num_layers * num_planes, num_slots, -1)
        num_bytes = rows.shape[2] * rows.element_size()
        rows = rows.view(torch.int32 if num_bytes % 4 == 0 else torch.uint8)
        _move_rows[(path.shape[0], rows.shape[0])](
            rows, slots, starts, path, counts, num_slots, path.shape[1],
            SIZE=rows.shape[2], BLOCK=min(_MOVE_BLOCK, triton.next_power_of_2(rows.shape[2])), num_warps=4,
            **early_launch(storage.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["sampling_rows", "num_draft", "width", "num_nodes", "max_depth"])
def _walk_rows(  # type: ignore[no-untyped-def]
    drawn, sampling_rows, num_draft, known_len, tokens, masks, counts, path, width, capacity, num_nodes, max_depth,
    BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program walks the tree of one row."""
    number = tl.program_id(0).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row, index = tl.load(sampling_rows + number), tl.arange(0, BLOCK)
    is_draft = (index > 0) & (index <= tl.load(num_draft + number)) & (index < width)
    place = tl.load(known_len + row) - 1 + index
    draft = tl.load(tokens + row * capacity + place, mask=is_draft & (place < capacity), other=-1)
    mask = tl.load(masks + row * num_nodes + index, mask=index < width, other=0)
    parent = mask ^ (tl.full([BLOCK], 1, tl.int64) << index.to(tl.int64))
    node, count = tl.min(index, 0), tl.min(index, 0) + 1  # the root
    path += number * (1 + max_depth)
    tl.store(path, 0)
    for depth in range(1, 1 + max_depth):
        token, at = tl.load(drawn + number * width + node), tl.sum(tl.where(index == node, mask, 0), 0)
        following = tl.min(tl.where(is_draft & (parent == at) & (draft == token), index, BLOCK), 0)
        count += (following < BLOCK).to(tl.int32)
        node = tl.where(following < BLOCK, following, node)
        tl.store(path + depth, node.to(tl.int64))
    tl.store(counts + number, count.to(tl.int64))


@triton.jit(do_not_specialize=["slots", "starts", "num_nodes"])
def _move_rows(  # type: ignore[no-untyped-def]
    rows, slots, starts, path, counts, num_slots, num_nodes,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program moves one plane of the nodes of one path, one after the other: a thread reads an element before it writes there."""
    number, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    start, count = tl.load(starts + number), tl.load(counts + number)
    rows += plane * num_slots * SIZE
    for depth in tl.range(1, count, num_stages=1):
        node = tl.load(path + number * num_nodes + depth)
        if node != depth:
            source, target = tl.load(slots + start + node) * SIZE, tl.load(slots + start + depth) * SIZE
            for first in tl.range(0, SIZE, BLOCK, num_stages=1):
                element = first + tl.arange(0, BLOCK)
                moved = tl.load(rows + source + element, mask=element < SIZE)
                tl.store(rows + target + element, moved, mask=element < SIZE)
