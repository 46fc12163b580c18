"""Trees of drafts: grown level by level, cut to the likeliest nodes, verified in one forward, walked by the drawn tokens.

The growth and the choice of nodes are those of EAGLE-2 (Li et al. 2024): a node is worth the product of the drafts'
probabilities on its path. A chain is the tree of one candidate a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NODES = 63  # of a tree: a node's mask is one int64


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
        tokens: int64 ``[B, N]``.
        parents: int64 ``[B, N]``; -1 of the root.
        depths: int64 ``[B, N]``; 0 of the root.
        masks: int64 ``[B, N]``. Bit j: node j lies on the path from the root to the node, itself included.
        max_depth: No node is deeper.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    masks: Tensor
    max_depth: int


@dataclass(frozen=True, slots=True, eq=False)
class TreeLinks:
    """The same trees as lists of children, all int64 ``[B, N]``, -1 where there is none."""

    retrieve_index: Tensor  # each node's index among the nodes of all trees
    next_token: Tensor
    next_sibling: Tensor  # the next child of the same parent


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """The accepted paths of B trees.

    Attributes:
        counts: int64 ``[B]``. Accepted drafts + 1: as many tokens are emitted.
        nodes: int64 ``[B, max_depth + 1]``. The path from the root on; after it -1.
        tokens: int64 ``[B, max_depth + 1]``. The token drawn at each node of the path; after it -1.
    """

    counts: Tensor
    nodes: Tensor
    tokens: Tensor


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


def build_tree(root_tokens: Tensor, levels: Sequence[Level], num_nodes: int) -> DraftTree:
    """Returns the trees of the candidates that are worth most.

    A parent is worth as much as its child at least, and comes before it: with a candidate, its parent is chosen too.

    Args:
        root_tokens: int64 ``[B]``. The last known tokens.
        levels: From the first on.
        num_nodes: N, the root included; at most ``MAX_NODES``, and no more than there are.
    """
    worth = torch.cat([level.worth for level in levels], 1)
    assert 1 <= num_nodes <= min(MAX_NODES, 1 + worth.shape[1]), f"{num_nodes} nodes of {worth.shape[1]} candidates"
    chosen = worth.argsort(dim=-1, descending=True, stable=True)[:, : num_nodes - 1].sort(-1).values
    tokens = torch.cat([level.tokens for level in levels], 1).gather(1, chosen)
    starts = [0]  # of the levels among all candidates
    for level in levels:
        starts.append(starts[-1] + level.worth.shape[1])
    parents_of = [levels[0].parents] + [level.parents + start for level, start in zip(levels[1:], starts, strict=False)]
    parents = torch.searchsorted(chosen, torch.cat(parents_of, 1).gather(1, chosen)) + 1
    parents = parents.masked_fill(chosen < starts[1], 0)
    return _tree(torch.cat((root_tokens[:, None], tokens), 1), parents, len(levels))


def chain(root_tokens: Tensor, drafts: Tensor) -> DraftTree:
    """Returns trees without branches; int64 ``[B]`` and ``[B, k]`` tokens, k below ``MAX_NODES``."""
    num_draft = drafts.shape[1]
    assert num_draft < MAX_NODES, f"{num_draft} drafts"
    parents = torch.arange(num_draft, device=drafts.device).expand_as(drafts)
    return _tree(torch.cat((root_tokens[:, None], drafts), 1), parents, num_draft)


def link(tree: DraftTree) -> TreeLinks:
    """Returns the lists of children."""
    num_trees, num_nodes = tree.tokens.shape
    nodes = torch.arange(num_nodes, device=tree.tokens.device)
    is_child = tree.parents[:, None] == nodes[:, None]
    is_later = (tree.parents[:, :, None] == tree.parents[:, None]) & (nodes > nodes[:, None])
    first, after = (
        torch.where(which, nodes, num_nodes).amin(-1).masked_fill(~which.any(-1), -1) for which in (is_child, is_later)
    )
    index = torch.arange(num_trees * num_nodes, device=nodes.device).view(num_trees, num_nodes)
    return TreeLinks(index, first, after)


def place(tree: DraftTree, first: Tensor) -> tuple[Tensor, Tensor]:
    """Returns positions and indices into rows for the forward that verifies, both int64 ``[B * N]``.

    A node stands at the position of its depth, and is stored at its number: accepted tokens must be moved before
    the next step. ``ForwardInputs.tree_mask`` is ``masks``, flat.

    Args:
        tree: Of B rows.
        first: int64 ``[B]``. Tokens stored of each row; its root comes next.
    """
    nodes = torch.arange(tree.tokens.shape[1], device=first.device)
    return (first[:, None] + tree.depths).flatten(), (first[:, None] + nodes).flatten()


def walk(tree: DraftTree, drawn: Tensor) -> Walk:
    """Accepts the child that was drawn, from the root on, as long as there is one.

    All emitted tokens were drawn, so drafts change the number of tokens of a step alone.

    Args:
        tree: B trees of N nodes.
        drawn: int64 ``[B, N]``. The token drawn at each node, as if its path were all there is.
    """
    node = torch.zeros_like(tree.tokens[:, :1])
    goes_on = torch.ones_like(node, dtype=torch.bool)
    nodes, tokens = [], []
    for _ in range(tree.max_depth + 1):
        token = drawn.gather(1, node)
        nodes.append(node.masked_fill(~goes_on, -1))
        tokens.append(token.masked_fill(~goes_on, -1))
        is_next = (tree.parents == node) & (tree.tokens == token)
        goes_on = goes_on & is_next.any(1, keepdim=True)
        node = is_next.int().argmax(1, keepdim=True)
    path = torch.cat(nodes, 1)
    return Walk(counts=(path >= 0).sum(1), nodes=path, tokens=torch.cat(tokens, 1))


def _chances(probabilities: Tensor) -> Tensor:
    """Limits probabilities to 0 to 1, NaN to 0: no node may be worth more than its parent."""
    return probabilities.nan_to_num(nan=0.0).clamp(0.0, 1.0)


def _tree(tokens: Tensor, draft_parents: Tensor, max_depth: int) -> DraftTree:
    """Returns trees of tokens int64 ``[B, N]`` and of the parents of all but the root, int64 ``[B, N - 1]``."""
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    root = torch.zeros_like(tokens[:, :1])
    up = torch.cat((root, draft_parents), 1)
    masks = own = (1 << nodes).expand_as(tokens)
    depths = torch.zeros_like(tokens)
    for _ in range(max_depth):
        masks = own | masks.gather(1, up)
        depths = (depths.gather(1, up) + 1).masked_fill(nodes == 0, 0)
    return DraftTree(tokens, torch.cat((root - 1, draft_parents), 1), depths, masks, max_depth)
