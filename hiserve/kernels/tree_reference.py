"""Trees of drafts: grown level by level and cut to the likeliest nodes; ``StepOps.walk`` accepts a path of each.

The growth and the choice of nodes are those of EAGLE-2 (Li et al. 2024): a node is worth the product of the drafts'
probabilities on its path. A chain is the tree of one candidate a level. ``grow`` and ``write_trees`` are twins of the
kernels in ``tree_growth``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.config.settings import MAX_TREE_NODES
from hiserve.kernels.draft_ops import DraftNodes, TreeCandidates
from hiserve.kernels.noise import gumbel
from hiserve.kernels.step_ops import RowTensors
from hiserve.kernels.step_reference import SAMPLE_STREAM


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Candidates for the nodes of one depth, C of them in each of B trees.

    Attributes:
        worth: ``[B, C]``, floating, from 0 to 1. That all drafts up to it are accepted; at most its parent's.
        tokens: int64 ``[B, C]``. Those of one parent differ.
        parents: int64 ``[B, C]``. Indices of candidates of the level before; on the first level, whose parent is the
            root, without meaning.
    """

    worth: Tensor
    tokens: Tensor
    parents: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """B trees of N nodes each, parents before children. Node 0, the root, is the last known token.

    Attributes:
        drafts: int64 ``[B, N - 1]``. The tokens of the other nodes.
        masks: int64 ``[B, N]``. Bit j: node j lies on the path from the root to the node, itself included.
    """

    drafts: Tensor
    masks: Tensor


def first_level(probabilities: Tensor, tokens: Tensor) -> Level:
    """Returns the candidates after the root.

    Args:
        probabilities: ``[B, t]``, of the draft's likeliest tokens. NaN counts as 0.
        tokens: int64 ``[B, t]``. These tokens, all different.
    """
    return Level(_chances(probabilities), tokens, torch.zeros_like(tokens))


def beam(level: Level, size: int) -> Tensor:
    """Returns the candidates worth most, best first, of equal ones the first: int64 ``[B, size]``."""
    return level.worth.argsort(dim=-1, descending=True, stable=True)[:, :size]


def next_level(level: Level, expanded: Tensor, probabilities: Tensor, tokens: Tensor) -> Level:
    """Returns the candidates after some of a level.

    Args:
        level: The level before.
        expanded: int64 ``[B, m]``. The candidates that the draft was run for, from ``beam``.
        probabilities: ``[B, m, t]``. As in ``first_level``, after each of them.
        tokens: int64 ``[B, m, t]``.
    """
    worth = level.worth.gather(1, expanded)[:, :, None] * _chances(probabilities)
    return Level(worth.flatten(1), tokens.flatten(1), expanded[:, :, None].expand_as(tokens).flatten(1))


def build_tree(levels: Sequence[Level], num_nodes: int) -> DraftTree:
    """Returns the trees of the candidates that are worth most.

    A parent is worth as much as its child at least, and comes before it: with a candidate, its parent is chosen too.

    Args:
        levels: From the first on.
        num_nodes: N, the root included; at most ``MAX_TREE_NODES``, and no more than there are.
    """
    worth = torch.cat([level.worth for level in levels], 1)
    assert 1 <= num_nodes <= min(MAX_TREE_NODES, 1 + worth.shape[1]), (
        f"{num_nodes} nodes of {worth.shape[1]} candidates"
    )
    chosen = worth.argsort(dim=-1, descending=True, stable=True)[:, : num_nodes - 1].sort(-1).values
    drafts = torch.cat([level.tokens for level in levels], 1).gather(1, chosen)
    starts = [0]  # of the levels among all candidates
    for level in levels:
        starts.append(starts[-1] + level.worth.shape[1])
    parents_of = [levels[0].parents] + [level.parents + start for level, start in zip(levels[1:], starts, strict=False)]
    parents = torch.searchsorted(chosen, torch.cat(parents_of, 1).gather(1, chosen)) + 1
    parents = F.pad(parents.masked_fill(chosen < starts[1], 0), (1, 0))  # of the root itself
    masks = own = (1 << torch.arange(num_nodes, device=chosen.device)).expand_as(parents)
    for _ in levels:
        masks = own | masks.gather(1, parents)
    return DraftTree(drafts, masks)


def grow(
    logits: Tensor,
    noise: tuple[Tensor, Tensor, Tensor] | None,
    positions: Tensor,
    candidates: TreeCandidates,
    before: DraftNodes | None,
) -> DraftNodes | None:
    width, num_rows = candidates.shape.width, positions.shape[0]
    depth = 0 if before is None else 1 + before.depth
    drawn = None if noise is None else (*noise, positions + depth)
    probabilities, tokens = likeliest(logits.view(num_rows, -1, logits.shape[1]), drawn, width)
    if before is None:
        level, first = first_level(probabilities[:, 0], tokens[:, 0]), torch.full_like(tokens[:, 0], -1)
    else:
        of_before = candidates.places(before.depth)
        level = next_level(
            _level(candidates, before.depth), before.candidates.long() - of_before.start, probabilities, tokens
        )
        first = level.parents + of_before.start
    places = candidates.places(depth)
    candidates.worth[:, places], candidates.tokens[:, places] = level.worth, level.tokens.int()
    candidates.parents[:, places] = first.int()
    if depth + 1 == candidates.shape.depth:
        return None
    best = beam(level, width)
    sources, place = best // width, torch.arange(width, device=logits.device)
    masks = (1 << (depth * width + place)).expand_as(best)
    num_each = logits.shape[0] // num_rows
    return DraftNodes(
        tokens=level.tokens.gather(1, best).int(),
        positions=(positions + depth)[:, None].expand_as(best),
        masks=masks if before is None else masks | before.masks.gather(1, sources),
        sources=torch.arange(num_rows, device=logits.device)[:, None] * num_each + sources,
        candidates=(best + places.start).int(),
        depth=depth,
    )


def write_trees(candidates: TreeCandidates, rows: Tensor, legal: Tensor, positions: Tensor, state: RowTensors) -> None:
    assert state.trees is not None, "rows without trees"
    shape, row_len = candidates.shape, state.tokens.shape[1]
    tree = build_tree([_level(candidates, depth) for depth in range(shape.depth)], shape.num_nodes)
    is_chain, path = state.trees.is_chain.index_select(0, rows)[:, None], _best_path(candidates)
    index = torch.arange(shape.num_nodes - 1, device=rows.device)
    drafts = torch.where(is_chain, path[:, index.clamp(max=shape.depth - 1)], tree.drafts)
    places = positions[:, None] + index
    is_written = legal[:, None] & (places < row_len) & (~is_chain | (index < shape.depth))
    flat = torch.where(is_written, rows[:, None] * row_len + places, 0)
    state.tokens.view(-1).scatter_(0, flat.flatten(), torch.where(is_written, drafts, 0).int().flatten())
    chain = (2 << torch.arange(shape.num_nodes, device=rows.device)) - 1
    masks = torch.where(is_chain | ~legal[:, None], chain, tree.masks)  # row 0, which illegal rows write, is a chain
    state.trees.masks[:, : shape.num_nodes].index_copy_(0, torch.where(legal, rows, 0), masks)


def likeliest(logits: Tensor, noise: tuple[Tensor, Tensor, Tensor, Tensor] | None, count: int) -> tuple[Tensor, Tensor]:
    """Finds the tokens of the highest scores: logits, plus temperature times the noise that a draw of the position has.

    Args:
        logits: ``[S, m, vocab_size]``, of m tokens for the same position. Unchanged.
        noise: Temperature float64, seed, choice and position int64, ``[S]`` each, as of ``StepOps.draw_free``; None is no
            temperature.
        count: Tokens of each.

    Returns:
        Their probabilities with scores as logits, in float32 or wider, and themselves, int64; both ``[S, m, count]``, the
        highest first. Tokens whose logits are -inf have a probability of 0, or NaN where all have.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if noise is not None:
        temperature, seed, choice, position = noise
        drawn = gumbel(seed, choice, position, SAMPLE_STREAM, logits.shape[2]) * temperature[:, None]
        scores = scores + drawn.to(scores.dtype)[:, None]
    top = scores.topk(count)
    return (top.values - scores.logsumexp(-1, keepdim=True)).exp_(), top.indices


def _level(candidates: TreeCandidates, depth: int) -> Level:
    places = candidates.places(depth)
    start_before = candidates.places(depth - 1).start if depth else 0
    parents = candidates.parents[:, places].long() - start_before
    return Level(candidates.worth[:, places], candidates.tokens[:, places].long(), parents)


def _best_path(candidates: TreeCandidates) -> Tensor:
    """Returns the tokens on the path to the last level's best candidate, int64 ``[S, depth]``."""
    depth = candidates.shape.depth
    node = beam(_level(candidates, depth - 1), 1) + candidates.places(depth - 1).start
    path = []
    for _ in range(depth):
        path.append(candidates.tokens.gather(1, node).long())
        node = candidates.parents.gather(1, node).long().clamp_(min=0)
    return torch.cat(path[::-1], 1)


def _chances(probabilities: Tensor) -> Tensor:
    """Limits probabilities to 0 to 1, NaN to 0: no node may be worth more than its parent."""
    return probabilities.nan_to_num(nan=0.0).clamp(0.0, 1.0)
