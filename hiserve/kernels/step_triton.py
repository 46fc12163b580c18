"""The step kernels in Triton. ``StepOps`` documents each; ``step_reference`` has their twins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.draw import draw_free, greedy
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.share_draw import best_entries, join_entries
from hiserve.kernels.step_inputs import fill_inputs
from hiserve.kernels.step_ops import RowTensors, StepInputs

__all__ = ["accept", "advance", "best_entries", "draw_free", "fill_inputs", "greedy", "join_entries", "move", "walk"]

_SAMPLING_BLOCK = 256
# Most of these are views of one upload, at any multiple of 8 bytes: do not compile a variant for each alignment.
_VARYING = [
    *("rows", "num_draft", "sampling", "sampling_rows", "legal", "kv_lens", "drawn", "counts", "words"),
    *("width", "num_sampling"),
]
_MOVE_BLOCK = 1024


def accept(drawn: Tensor, sampling_rows: Tensor, num_draft: Tensor, state: RowTensors) -> Tensor:
    assert drawn.is_contiguous(), f"tokens {drawn.stride()} apart"
    num_sampling, width = drawn.shape
    counts = torch.empty(num_sampling, dtype=torch.int64, device=drawn.device)
    _count_accepted[(num_sampling,)](
        drawn, sampling_rows, num_draft, state.known_len, state.tokens, counts, width, state.tokens.shape[1],
        BLOCK=triton.next_power_of_2(width), num_warps=1, **early_launch(drawn.device),
    )  # fmt: skip
    return counts


def advance(inputs: StepInputs, drawn: Tensor, counts: Tensor, state: RowTensors) -> Tensor:
    rows = inputs.rows
    assert drawn.is_contiguous(), f"tokens {drawn.stride()} apart"
    num_rows, (num_sampling, width) = rows.shape[0], drawn.shape
    words = torch.empty(num_rows + num_sampling + drawn.numel(), dtype=torch.int32, device=rows.device)
    _advance_rows[(num_rows,)](
        rows, inputs.forward.kv_lens, inputs.legal, inputs.num_draft, inputs.sampling, drawn, counts,
        state.computed_len, state.known_len, state.tokens, None if state.states is None else state.states.lens, words,
        num_sampling, width, state.tokens.shape[1],
        BLOCK=triton.next_power_of_2(width), SAMPLING_BLOCK=_SAMPLING_BLOCK, num_warps=1, **early_launch(rows.device),
    )  # fmt: skip
    return words


@triton.jit(do_not_specialize=_VARYING)
def _count_accepted(  # type: ignore[no-untyped-def]
    drawn, sampling_rows, num_draft, known_len, tokens, counts, width, capacity,
    BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program finds the first drawn token of one row that differs from its draft."""
    number = tl.program_id(0).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row = tl.load(sampling_rows + number)
    index = tl.arange(0, BLOCK)
    is_draft = index < tl.load(num_draft + number)
    place = tl.load(known_len + row) + index
    draft = tl.load(tokens + row * capacity + place, mask=is_draft & (place < capacity), other=-1)
    token = tl.load(drawn + number * width + index, mask=index < width, other=0)
    is_last = ~is_draft | (draft != token)
    tl.store(counts + number, tl.min(tl.where(is_last, index, BLOCK), 0).to(tl.int64) + 1)


@triton.jit(do_not_specialize=_VARYING)
def _advance_rows(  # type: ignore[no-untyped-def]
    rows, kv_lens, legal, num_draft, sampling, drawn, counts, computed_len, known_len, tokens, state_lens, words,
    num_sampling, width, capacity,
    BLOCK: tl.constexpr, SAMPLING_BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program advances one row; it searches the row among those that sampled."""
    number = tl.program_id(0)
    num_rows = tl.num_programs(0)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    row = tl.load(rows + number)
    is_legal = tl.load(legal + number) != 0
    tl.store(words + number, is_legal.to(tl.int32))
    which = -1
    for start in range(0, num_sampling, SAMPLING_BLOCK):
        index = start + tl.arange(0, SAMPLING_BLOCK)
        is_mine = tl.load(sampling + index, mask=index < num_sampling, other=-1) == number
        which = tl.maximum(which, tl.max(tl.where(is_mine, index, -1), 0))
    computed, known = tl.load(kv_lens + number), tl.load(known_len + row)
    if which >= 0:
        count = tl.where(is_legal, tl.load(counts + which), 0)
        index = tl.arange(0, BLOCK)
        token = tl.load(drawn + which * width + index, mask=index < width, other=0).to(tl.int32)
        tl.store(words + num_rows + which, count.to(tl.int32))
        tl.store(words + num_rows + num_sampling + which * width + index, token, mask=index < width)
        tl.store(tokens + row * capacity + known + index, token, mask=index < count)
        computed -= tl.load(num_draft + number) + 1 - count
        known += count
    # Programs of the padding row run concurrently: they all store zeros.
    if state_lens is not None:
        certain = tl.load(kv_lens + number) - tl.load(num_draft + number)
        tl.store(state_lens + row, tl.where(is_legal, certain, 0))
    tl.store(computed_len + row, tl.where(is_legal, computed, 0))
    tl.store(known_len + row, tl.where(is_legal, known, 0))


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
