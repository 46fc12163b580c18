"""Trees of drafts: grown level by level and cut to the likeliest nodes; ``StepOps.walk`` accepts a path of each.

The growth and the choice of nodes are those of EAGLE-2 (Li et al. 2024): a node is worth the product of the drafts'
probabilities on its path. A chain is the tree of one candidate a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.config.settings import MAX_TREE_NODES


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


def _chances(probabilities: Tensor) -> Tensor:
    """Limits probabilities to 0 to 1, NaN to 0: no node may be worth more than its parent."""
    return probabilities.nan_to_num(nan=0.0).clamp(0.0, 1.0)
