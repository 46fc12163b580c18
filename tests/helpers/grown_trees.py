"""Trees of drafts grown from logits that were drawn before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.config.settings import TreeShape
from hiserve.kernels.draft_ops import DraftNodes, DraftOps, TreeCandidates
from hiserve.kernels.step_ops import RowTensors, TreeTensors

MAX_LEN = 40
SHAPES = TreeShape(3, 3, 9), TreeShape(2, 4, 8), TreeShape(1, 4, 5), TreeShape(4, 1, 4), TreeShape(1, 5, 5)


@dataclass
class Grown:
    """Of four rows, the first at its end, the second with a grammar, the third illegal."""

    candidates: TreeCandidates
    nodes: list[DraftNodes]  # of each level but the last
    state: RowTensors

    def words(self) -> list[Tensor]:
        """Returns all integers that were found."""
        nodes = [each for level in self.nodes for each in (level.tokens, level.positions, level.masks, level.sources)]
        assert self.state.trees is not None
        found = [self.candidates.tokens, self.candidates.parents, self.state.tokens, self.state.trees.masks]
        return found + nodes + [level.candidates for level in self.nodes]


def logits_of(shape: TreeShape, vocab_size: int, generator: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
    """Returns random logits of the root, and of the nodes of each level, of four trees."""
    counts = [4] + [4 * shape.width] * (shape.depth - 1)
    return [2 * torch.randn((count, vocab_size), generator=generator, dtype=dtype) for count in counts]


def grow_trees(
    ops: DraftOps, shape: TreeShape, logits: list[Tensor], *, is_greedy: bool, is_coarse: bool = False
) -> Grown:
    """Grows and writes the trees of four rows; with ``is_coarse``, by worths in quarters, of which many are equal."""
    device, (rows, choice) = logits[0].device, torch.arange(8, device=logits[0].device).view(2, 4)
    nothing, masks = torch.zeros((5, 1), dtype=torch.int32), torch.zeros((5, 1 + shape.num_nodes), dtype=torch.int64)
    positions = torch.tensor([MAX_LEN - 2, 7, 9, 0], device=device)
    is_chain = torch.tensor([False, False, True, False, False])
    state = RowTensors(
        torch.full((5, MAX_LEN), -7, dtype=torch.int32, device=device),
        *(nothing[:, 0],) * 2,
        *(nothing,) * 2,
        nothing[:, 0],
        trees=TreeTensors(masks.to(device), is_chain.to(device), shape.depth),
    )
    state.tokens[0] = 0
    assert state.trees is not None
    state.trees.masks[0] = (2 << torch.arange(1 + shape.num_nodes)) - 1
    noise = torch.tensor([0.0, 0.7, 1.3, 0.2], dtype=torch.float64, device=device), rows + 2**40, choice
    candidates = TreeCandidates.empty(4, shape, logits[0].dtype, device)
    found, nodes = list[DraftNodes](), None
    for level in logits:
        nodes = ops.grow(level, None if is_greedy else noise, positions, candidates, nodes)
        if nodes is not None:
            found.append(nodes)
    assert nodes is None and len(found) == shape.depth - 1
    if is_coarse:
        candidates.worth.mul_(4).round_().div_(4)
    legal = torch.tensor([True, True, False, True], device=device)
    ops.write_trees(candidates, rows + 1, legal, positions, state)
    return Grown(candidates, found, state)
