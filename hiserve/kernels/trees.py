"""Trees of drafts in Triton: candidates, the walk, the move of accepted nodes; twins in ``draft_reference`` and ``step_reference``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.draw import gumbel, noise_words
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.step_ops import RowTensors
from hiserve.kernels.step_reference import SAMPLE_STREAM

_MOVE_BLOCK = 1024
_SCORE_BLOCK = 2048
_SCORE_WARPS = 8


def walk(drawn: Tensor, sampling_rows: Tensor, num_draft: Tensor, state: RowTensors) -> tuple[Tensor, Tensor]:
    assert state.trees is not None and drawn.is_contiguous(), f"rows without trees, or tokens {drawn.stride()} apart"
    num_sampling, width = drawn.shape
    masks, max_depth = state.trees.masks, state.trees.max_depth
    counts = torch.empty(num_sampling, dtype=torch.int64, device=drawn.device)
    path = counts.new_empty((num_sampling, 1 + max_depth))
    _walk_rows[(num_sampling,)](
        drawn,
        sampling_rows,
        num_draft,
        state.known_len,
        state.tokens,
        masks,
        counts,
        path,
        width,
        state.tokens.shape[1],
        masks.shape[1],
        max_depth,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
        **early_launch(drawn.device),
    )
    return counts, path


def move(storages: Sequence[Tensor], slots: Tensor, starts: Tensor, path: Tensor, counts: Tensor) -> None:
    for storage in storages:
        num_layers, num_planes, num_slots = storage.shape[:3]
        rows = storage.view(num_layers * num_planes, num_slots, -1)
        num_bytes = rows.shape[2] * rows.element_size()
        rows = rows.view(torch.int32 if num_bytes % 4 == 0 else torch.uint8)
        _move_rows[(path.shape[0], rows.shape[0])](
            rows,
            slots,
            starts,
            path,
            counts,
            num_slots,
            path.shape[1],
            SIZE=rows.shape[2],
            BLOCK=min(_MOVE_BLOCK, triton.next_power_of_2(rows.shape[2])),
            num_warps=4,
            **early_launch(storage.device),
        )


def likeliest(logits: Tensor, noise: tuple[Tensor, Tensor, Tensor, Tensor] | None, count: int) -> tuple[Tensor, Tensor]:
    """In two launches: the best of each part of the vocabulary, then of all."""
    assert logits.is_contiguous(), f"logits {logits.stride()} apart"
    num_rows, num_each, size = logits.shape
    dtype, num_parts = torch.promote_types(logits.dtype, torch.float32), triton.cdiv(size, _SCORE_BLOCK)
    values = torch.empty((num_rows * num_each, num_parts, count), dtype=dtype, device=logits.device)
    entries, sums = torch.empty_like(values, dtype=torch.int32), values.new_empty((num_rows * num_each, num_parts, 2))
    temperature, seed, choice, position = (None,) * 4 if noise is None else noise
    _find_candidates[(num_parts, num_rows * num_each)](
        logits,
        temperature,
        seed,
        choice,
        position,
        values,
        entries,
        sums,
        num_each,
        size,
        count,
        STREAM=SAMPLE_STREAM,
        BLOCK=_SCORE_BLOCK,
        num_warps=_SCORE_WARPS,
        **early_launch(logits.device),
    )
    probabilities = values.new_empty((num_rows, num_each, count))
    tokens = torch.empty_like(probabilities, dtype=torch.int64)
    _join_candidates[(num_rows * num_each,)](
        values,
        entries,
        sums,
        probabilities,
        tokens,
        num_parts,
        count,
        MAX_PARTS=triton.next_power_of_2(num_parts),
        MAX_VALUES=triton.next_power_of_2(num_parts * count),
        num_warps=4,
        **early_launch(logits.device),
    )
    return probabilities, tokens


@triton.jit(do_not_specialize=["sampling_rows", "num_draft", "width", "num_nodes", "max_depth"])  # type: ignore[untyped-decorator]
def _walk_rows(  # type: ignore[no-untyped-def]
    drawn,
    sampling_rows,
    num_draft,
    known_len,
    tokens,
    masks,
    counts,
    path,
    width,
    capacity,
    num_nodes,
    max_depth,
    BLOCK: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
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


@triton.jit(do_not_specialize=["slots", "starts", "num_nodes"])  # type: ignore[untyped-decorator]
def _move_rows(  # type: ignore[no-untyped-def]
    rows,
    slots,
    starts,
    path,
    counts,
    num_slots,
    num_nodes,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
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


@triton.jit(do_not_specialize=["temperature", "seed", "choice", "position", "num_each"])  # type: ignore[untyped-decorator]
def _find_candidates(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    seed,
    choice,
    position,
    values,
    entries,
    sums,
    num_each,
    size,
    count,
    STREAM: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program finds the best entries of one part of a row of logits, their maximum, and the sum of exponentials below it."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    entry = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + entry, mask=entry < size, other=-float("inf")).to(values.dtype.element_ty)
    if temperature is not None:
        its = row // num_each
        scale = tl.load(temperature + its)
        if scale > 0:
            words = noise_words(
                tl.load(seed + its), tl.load(choice + its), tl.load(position + its), STREAM, part, BLOCK
            )
            x += (gumbel(words) * scale).to(values.dtype.element_ty)
    x = tl.where(x != x, -float("inf"), x)
    top = tl.max(x, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    place = row * tl.num_programs(0) + part
    tl.store(sums + place * 2, top)
    tl.store(sums + place * 2 + 1, tl.sum(tl.exp(x - base), 0))
    is_left = entry < size
    for index in range(count):
        best = tl.max(tl.where(is_left, x, -float("inf")), 0)
        first = tl.min(tl.where(is_left & (x == best), entry, 2147483647), 0)
        tl.store(values + place * count + index, tl.where(first < size, best, -float("inf")))
        tl.store(entries + place * count + index, first)
        is_left = is_left & (entry != first)


@triton.jit(do_not_specialize=["num_parts"])  # type: ignore[untyped-decorator]
def _join_candidates(  # type: ignore[no-untyped-def]
    values,
    entries,
    sums,
    probabilities,
    tokens,
    num_parts,
    count,
    MAX_PARTS: tl.constexpr,  # noqa: N803
    MAX_VALUES: tl.constexpr,  # noqa: N803
    IS_EARLY: tl.constexpr,  # noqa: N803
):
    """Each program finds the best of all parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    part, index = tl.arange(0, MAX_PARTS), tl.arange(0, MAX_VALUES)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    at = sums + (row * num_parts + part) * 2
    top = tl.load(at, mask=part < num_parts, other=-float("inf"))
    highest = tl.max(top, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    below = tl.load(at + 1, mask=part < num_parts, other=0.0)
    total = tl.sum(below * tl.exp(tl.where(top == -float("inf"), base, top) - base), 0)
    is_left = index < num_parts * count
    value = tl.load(values + row * num_parts * count + index, mask=is_left, other=-float("inf"))
    entry = tl.load(entries + row * num_parts * count + index, mask=is_left, other=2147483647)
    for number in range(count):
        best = tl.max(tl.where(is_left, value, -float("inf")), 0)
        first = tl.min(tl.where(is_left & (value == best), entry, 2147483647), 0)
        tl.store(probabilities + row * count + number, tl.exp(best - base) / total)
        tl.store(tokens + row * count + number, first.to(tl.int64))
        is_left = is_left & (entry != first)
