"""The proposer of trees: a head's likeliest tokens, level by level, of which the best nodes are verified (``spec.tree``)."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.config.settings import TreeShape
from hiserve.core.drafts import DraftChain, DraftStep
from hiserve.kernels.draft_ops import DraftOps
from hiserve.kernels.step_ops import RowTensors
from hiserve.sampling.params import SamplingRows
from hiserve.spec.head import DraftNodes, HeadProposer
from hiserve.spec.tree import DraftTree, beam, build_tree, first_level, next_level


class TreeProposer:
    """Grows trees with a head: it computes a step's tokens as for a chain, then each level's candidates together.

    A node gets as candidates the tokens of the highest scores: logits, plus the noise that the model's own draw of that position
    will have, times the temperature. Its probabilities are those of scores as logits. Without a temperature these are the
    head's own; with one, the token that the head would draw comes first.

    Candidates are computed in the places after the known tokens. Each level computes those before it again, so that a
    token sees its ancestors by the mask of one forward; the next step computes all that is accepted in its own place.

    Args:
        head: Computes logits; its own drafts are never asked for.
    """

    def __init__(
        self, head: HeadProposer, shape: TreeShape, state: RowTensors, sampling: SamplingRows, ops: DraftOps
    ) -> None:
        assert state.trees is not None, "rows without trees"
        self.aux_layers = head.aux_layers
        self._head = head
        self._shape = shape
        self._state = state
        self._masks = state.trees.masks
        self._sampling = sampling
        self._ops = ops
        device, width = state.tokens.device, shape.width
        self._nodes = torch.arange(shape.num_nodes, device=device)
        self._depths = torch.arange(shape.num_computed, device=device) // width
        self._chain = (2 << self._nodes) - 1  # masks of illegal rows

    def num_rounds(self, num_draft: int) -> int:
        """Returns 1: all drafts are written at once."""
        return 1

    def is_capturable(self, num_rows: int, width: int) -> bool:
        """As the protocol."""
        levels = range(self._shape.width, self._shape.num_computed + 1, self._shape.width)
        return all(self._head.reserve(num_rows, num_tokens) for num_tokens in (1, 1 + width, *levels))

    def prepare(self, step: DraftStep) -> DraftChain | None:
        """As for a chain."""
        return self._head.prepare(step)

    def update_only(self, step: DraftStep) -> None:
        """As for a chain."""
        self._head.update_only(step)

    def extend(self, chain: DraftChain) -> None:
        """Does nothing: there is one round."""

    def draft(self, chain: DraftChain, *, is_greedy: bool) -> None:
        """Grows the tree of each row and writes its nodes after the known tokens; the chain is unchanged.

        Nodes past a row's last slot, and those of illegal rows, are not written.
        """
        draws = None if is_greedy else self._sampling.free_draws(chain.rows)
        num_rows, width = chain.rows.shape[0], self._shape.width

        def likeliest(logits: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            noise = None if draws is None else (*draws, chain.positions + depth)
            return self._ops.likeliest(logits.view(num_rows, -1, logits.shape[1]), noise, width)

        probabilities, tokens = likeliest(chain.logits, 0)
        levels = [first_level(probabilities[:, 0], tokens[:, 0])]
        nodes: DraftNodes | None = None
        carried = chain.carried
        for depth in range(1, self._shape.depth):
            expanded = beam(levels[-1], width)
            chosen = levels[-1].tokens.gather(1, expanded)
            if nodes is None:
                nodes = self._after_root(chosen, carried)
            else:  # the candidates of a level follow in the order of their parents
                nodes = self._after(nodes, chosen, carried, expanded // width)
            logits, carried = self._head.compute(chain, nodes)
            levels.append(next_level(levels[-1], expanded, *likeliest(logits, depth)))
        self._write(chain, build_tree(levels, self._shape.num_nodes))

    def _after_root(self, tokens: Tensor, carried: Tensor) -> DraftNodes:
        """Returns the nodes of the first level, of tokens int64 ``[S, width]`` after the states ``[S, F]``."""
        width = tokens.shape[1]
        return DraftNodes(
            tokens=tokens,
            states=carried[:, None].expand(-1, width, -1),
            depths=self._depths[:width],
            masks=(1 << self._nodes[:width]).expand_as(tokens),
            num_last=width,
        )

    def _after(self, nodes: DraftNodes, tokens: Tensor, carried: Tensor, parents: Tensor) -> DraftNodes:
        """Returns nodes and those of the next level.

        Args:
            nodes: Of the levels until now.
            tokens: int64 ``[S, width]``, of the next level.
            carried: ``[S * width, F]``. States at the last level.
            parents: int64 ``[S, width]``. The node of the last level that each comes after.
        """
        width, num_nodes = tokens.shape[1], nodes.tokens.shape[1]
        at_parents = parents[:, :, None].expand(-1, -1, carried.shape[1])
        own = 1 << self._nodes[num_nodes : num_nodes + width]
        return DraftNodes(
            tokens=torch.cat((nodes.tokens, tokens), 1),
            states=torch.cat((nodes.states, carried.view(*parents.shape, -1).gather(1, at_parents)), 1),
            depths=self._depths[: num_nodes + width],
            masks=torch.cat((nodes.masks, own | nodes.masks[:, -width:].gather(1, parents)), 1),
            num_last=width,
        )

    def _write(self, chain: DraftChain, tree: DraftTree) -> None:
        rows, tokens = chain.rows, self._state.tokens
        places = chain.positions[:, None] + self._nodes[:-1]
        has_slot = chain.legal[:, None] & (places < tokens.shape[1])
        flat = torch.where(has_slot, rows[:, None] * tokens.shape[1] + places, 0)
        tokens.view(-1).scatter_(0, flat.flatten(), torch.where(has_slot, tree.drafts, 0).int().flatten())
        masks = torch.where(chain.legal[:, None], tree.masks, self._chain)
        self._masks.index_copy_(0, torch.where(chain.legal, rows, 0), masks)
