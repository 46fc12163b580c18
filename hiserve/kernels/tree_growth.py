"""The growth of trees of drafts in Triton: candidates of a level, and the nodes that are kept; twins in ``tree_reference``."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hiserve.kernels.draft_ops import DraftNodes, TreeCandidates
from hiserve.kernels.draw import gumbel, noise_words
from hiserve.kernels.launch import await_previous, early_launch, start_next
from hiserve.kernels.step_ops import RowTensors
from hiserve.kernels.step_reference import SAMPLE_STREAM

_SCORE_BLOCK = 2048
_SCORE_WARPS = 8
_RANK_BLOCK = tl.constexpr(16)


class _Noise(NamedTuple):
    """Of each row."""

    temperature: Tensor
    seed: Tensor
    choice: Tensor


class _Found(NamedTuple):
    """The best entries of parts of the vocabulary, and of each part the highest score and the sum of exponentials below it."""

    scores: Tensor
    entries: Tensor
    sums: Tensor


class _Candidates(NamedTuple):
    """As ``TreeCandidates``."""

    worth: Tensor
    tokens: Tensor
    parents: Tensor


class _Nodes(NamedTuple):
    """As ``DraftNodes``."""

    tokens: Tensor
    positions: Tensor
    masks: Tensor
    sources: Tensor
    candidates: Tensor


def grow(
    logits: Tensor,
    noise: tuple[Tensor, Tensor, Tensor] | None,
    positions: Tensor,
    candidates: TreeCandidates,
    before: DraftNodes | None,
) -> DraftNodes | None:
    """In two launches: the best of each part of the vocabulary, then the level of each tree."""
    assert logits.is_contiguous(), f"logits {logits.stride()} apart"
    (num_tokens, size), num_rows, width = logits.shape, positions.shape[0], candidates.shape.width
    num_parts, num_each = triton.cdiv(size, _SCORE_BLOCK), num_tokens // num_rows
    values = candidates.worth.new_empty((num_tokens, num_parts, width))
    found = _Found(values, torch.empty_like(values, dtype=torch.int32), values.new_empty((num_tokens, num_parts, 2)))
    depth = 0 if before is None else 1 + before.depth
    _find_candidates[(num_parts, num_tokens)](
        logits, None if noise is None else _Noise(*noise), positions, found, num_each, depth, size, width,
        STREAM=SAMPLE_STREAM, BLOCK=_SCORE_BLOCK, num_warps=_SCORE_WARPS, **early_launch(logits.device),
    )  # fmt: skip
    nodes = None if depth + 1 == candidates.shape.depth else _new_nodes(num_rows, width, depth, logits.device)
    _grow_level[(num_rows,)](
        found, _Candidates(candidates.worth, candidates.tokens, candidates.parents), positions,
        None if before is None else _Nodes(*_parts_of(before)), None if nodes is None else _Nodes(*_parts_of(nodes)),
        num_parts, num_each, depth, candidates.places(depth).start, candidates.shape.num_candidates, width,
        MAX_PARTS=triton.next_power_of_2(num_parts), MAX_VALUES=triton.next_power_of_2(num_parts * width),
        BLOCK=triton.next_power_of_2(width * num_each), num_warps=4, **early_launch(logits.device),
    )  # fmt: skip
    return nodes


def write_trees(candidates: TreeCandidates, rows: Tensor, legal: Tensor, positions: Tensor, state: RowTensors) -> None:
    assert state.trees is not None, "rows without trees"
    trees, shape = state.trees, candidates.shape
    size = shape.num_candidates
    _write_trees[(rows.shape[0],)](
        _Candidates(candidates.worth, candidates.tokens, candidates.parents), rows, legal, positions, trees.is_chain,
        torch.empty_like(candidates.tokens), state.tokens, trees.masks, state.tokens.shape[1], trees.masks.shape[1],
        size, candidates.places(shape.depth - 1).start, shape.depth, shape.num_nodes,
        BLOCK=triton.next_power_of_2(max(size, shape.num_nodes)), num_warps=1 if size <= 128 else 4,
        **early_launch(rows.device),
    )  # fmt: skip


def _new_nodes(num_rows: int, width: int, depth: int, device: torch.device) -> DraftNodes:
    tokens, candidates = torch.empty((2, num_rows, width), dtype=torch.int32, device=device).unbind()
    positions, masks, sources = torch.empty((3, num_rows, width), dtype=torch.int64, device=device).unbind()
    return DraftNodes(tokens, positions, masks, sources, candidates, depth)


def _parts_of(nodes: DraftNodes) -> tuple[Tensor, ...]:
    return nodes.tokens, nodes.positions, nodes.masks, nodes.sources, nodes.candidates


@triton.jit(do_not_specialize=["num_each", "depth"])
def _find_candidates(  # type: ignore[no-untyped-def]
    logits, noise, positions, found, num_each, depth, size, count,
    STREAM: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program finds the best entries of one part of a row of logits, their maximum, and the sum of exponentials below it."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    entry = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + entry, mask=entry < size, other=-float("inf")).to(found.scores.dtype.element_ty)
    if noise is not None:
        its = row // num_each
        scale = tl.load(noise.temperature + its)
        if scale > 0:
            position = tl.load(positions + its) + depth
            words = noise_words(tl.load(noise.seed + its), tl.load(noise.choice + its), position, STREAM, part, BLOCK)
            x += (gumbel(words) * scale).to(found.scores.dtype.element_ty)
    x = tl.where(x != x, -float("inf"), x)
    top = tl.max(x, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    place = row * tl.num_programs(0) + part
    tl.store(found.sums + place * 2, top)
    tl.store(found.sums + place * 2 + 1, tl.sum(tl.exp(x - base), 0))
    is_left = entry < size
    for index in range(count):
        best = tl.max(tl.where(is_left, x, -float("inf")), 0)
        first = tl.min(tl.where(is_left & (x == best), entry, 2147483647), 0)
        tl.store(found.scores + place * count + index, tl.where(first < size, best, -float("inf")))
        tl.store(found.entries + place * count + index, first)
        is_left = is_left & (entry != first)


@triton.jit(do_not_specialize=["num_parts", "num_each", "depth", "start", "num_candidates"])
def _grow_level(  # type: ignore[no-untyped-def]
    found, candidates, positions, before, nodes, num_parts, num_each, depth, start, num_candidates, width,
    MAX_PARTS: tl.constexpr, MAX_VALUES: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program finds the candidates of one tree's level, and the best of them."""
    number = tl.program_id(0).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    worth, tokens = candidates.worth + number * num_candidates, candidates.tokens + number * num_candidates
    for each in range(num_each):
        parent = tl.full([], -1, tl.int32)
        share = tl.full([], 1.0, candidates.worth.dtype.element_ty)
        if before is not None:
            parent = tl.load(before.candidates + number * width + each)
            share = tl.load(worth + parent)
        at = start + each * width
        _join_parts(
            found, number * num_each + each, num_parts, width, worth + at, tokens + at, share, MAX_PARTS, MAX_VALUES
        )
        index = tl.arange(0, BLOCK)
        tl.store(candidates.parents + number * num_candidates + at + index, parent, mask=index < width)
    if nodes is not None:
        tl.debug_barrier()  # what was stored is read by other threads
        index, num_level = tl.arange(0, BLOCK), num_each * width
        is_candidate = index < num_level
        rank = _rank(worth + start, num_level, BLOCK)
        is_node = is_candidate & (rank < width)
        place, source = number * width + rank, index // width
        mask = tl.full([BLOCK], 1, tl.int64) << (depth * width + tl.minimum(rank, width - 1)).to(tl.int64)
        if before is not None:
            mask |= tl.load(before.masks + number * width + source, mask=is_candidate, other=0)
        tl.store(nodes.tokens + place, tl.load(tokens + start + index, mask=is_node, other=0), mask=is_node)
        tl.store(nodes.positions + place, tl.load(positions + number) + depth, mask=is_node)
        tl.store(nodes.masks + place, mask, mask=is_node)
        tl.store(nodes.sources + place, number * num_each + source, mask=is_node)
        tl.store(nodes.candidates + place, start + index, mask=is_node)


@triton.jit
def _join_parts(found, row, num_parts, count, worth, tokens, share, MAX_PARTS: tl.constexpr, MAX_VALUES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the best entries of all parts of a row of logits, and their probabilities times ``share``."""
    part, index = tl.arange(0, MAX_PARTS), tl.arange(0, MAX_VALUES)
    at = found.sums + (row * num_parts + part) * 2
    top = tl.load(at, mask=part < num_parts, other=-float("inf"))
    highest = tl.max(top, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    below = tl.load(at + 1, mask=part < num_parts, other=0.0)
    total = tl.sum(below * tl.exp(tl.where(top == -float("inf"), base, top) - base), 0)
    is_left = index < num_parts * count
    value = tl.load(found.scores + row * num_parts * count + index, mask=is_left, other=-float("inf"))
    entry = tl.load(found.entries + row * num_parts * count + index, mask=is_left, other=2147483647)
    for number in range(count):
        best = tl.max(tl.where(is_left, value, -float("inf")), 0)
        first = tl.min(tl.where(is_left & (value == best), entry, 2147483647), 0)
        chance = tl.exp(best - base) / total
        chance = tl.where(chance != chance, 0.0, tl.minimum(chance, 1.0))
        tl.store(worth + number, share * chance)
        tl.store(tokens + number, first)
        is_left = is_left & (entry != first)


@triton.jit
def _rank(worth, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of ``count`` candidates are worth more than each, or as much and come before it."""
    index, rank = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32)
    own = tl.load(worth + index, mask=index < count, other=-1.0)
    for start in range(0, count, _RANK_BLOCK):
        other = start + tl.arange(0, _RANK_BLOCK)
        its = tl.load(worth + other, mask=other < count, other=-1.0)
        is_before = (its[None, :] == own[:, None]) & (other[None, :] < index[:, None])
        rank += tl.sum(((its[None, :] > own[:, None]) | is_before).to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["num_candidates", "last_start", "depth"])
def _write_trees(  # type: ignore[no-untyped-def]
    candidates, rows, legal, positions, is_chain, numbers, tokens, masks, capacity, mask_stride, num_candidates,
    last_start, depth, num_nodes,
    BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """Each program chooses the nodes of one tree: numbers them, then follows the parents of each for its mask."""
    tree = tl.program_id(0).to(tl.int64)
    start_next(IS_EARLY)
    await_previous(IS_EARLY)
    if tl.load(legal + tree) == 0:
        return
    row, position, index = tl.load(rows + tree), tl.load(positions + tree), tl.arange(0, BLOCK)
    worth, parents = candidates.worth + tree * num_candidates, candidates.parents + tree * num_candidates
    numbers += tree * num_candidates
    is_candidate, is_path = index < num_candidates, tl.load(is_chain + row) != 0
    if is_path:
        own = tl.load(worth + index, mask=is_candidate & (index >= last_start), other=-1.0)
        node = tl.min(tl.where(own == tl.max(own, 0), index, BLOCK), 0)
        is_node = index == node
        for _ in range(1, depth):
            node = tl.load(parents + node)
            is_node |= index == node
    else:
        is_node = is_candidate & (_rank(worth, num_candidates, BLOCK) < num_nodes - 1)
    number = tl.cumsum(is_node.to(tl.int32), 0)
    is_node &= number < num_nodes
    tl.store(numbers + index, number, mask=is_candidate)
    tl.debug_barrier()  # other threads read them
    mask, ancestor = tl.full([BLOCK], 1, tl.int64), index
    for _ in range(depth):
        is_below = is_node & (ancestor >= 0)
        passed = tl.load(numbers + ancestor, mask=is_below, other=0)
        mask |= tl.full([BLOCK], 1, tl.int64) << passed.to(tl.int64)
        ancestor = tl.load(parents + ancestor, mask=is_below, other=-1)
    place = position - 1 + number
    token = tl.load(candidates.tokens + tree * num_candidates + index, mask=is_node, other=0)
    tl.store(tokens + row * capacity + place, token, mask=is_node & (place < capacity))
    masks += row * mask_stride
    tl.store(masks + number, mask, mask=is_node)
    num_found = tl.where(is_path, tl.minimum(depth, num_nodes - 1), num_nodes - 1)
    is_rest = (index < num_nodes) & ((index == 0) | (index > num_found))  # the root, and what continues a chain
    chain = (tl.full([BLOCK], 2, tl.int64) << tl.minimum(index, 62).to(tl.int64)) - 1
    tl.store(masks + index, chain, mask=is_rest)
