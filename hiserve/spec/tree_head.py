"""The proposer of trees: a head's likeliest tokens, level by level, of which the best nodes are verified (EAGLE-2)."""

from __future__ import annotations

from collections.abc import Sequence

from hiserve.config.settings import TreeShape
from hiserve.core.drafts import DraftChain, DraftStep
from hiserve.kernels.draft_ops import DraftOps, TreeCandidates
from hiserve.kernels.step_ops import RowTensors
from hiserve.sampling.params import SamplingRows
from hiserve.spec.head import HeadProposer


class TreeProposer:
    """Grows trees with a head: it computes a step's tokens as for a chain, then the best candidates of each level together.

    A node gets as candidates the tokens of the highest scores: logits, plus the noise that the model's own draw of that position
    will have, times the temperature. Its probabilities are those of scores as logits. Without a temperature these are the
    head's own; with one, the token that the head would draw comes first.

    Nodes are computed once, in the places after the known tokens, and later levels attend to their ancestors there; the next step
    computes all that is accepted in its own place.

    Args:
        head: Computes logits, and drafts chains.
        shapes: Of the trees, each of another number of drafts; other numbers are chains.
    """

    def __init__(
        self,
        head: HeadProposer,
        shapes: Sequence[TreeShape],
        state: RowTensors,
        sampling: SamplingRows,
        ops: DraftOps,
    ) -> None:
        assert state.trees is not None, "rows without trees"
        self.aux_layers = head.aux_layers
        self._head = head
        self._shapes = {shape.num_draft: shape for shape in shapes}
        self._state = state
        self._masks = state.trees.masks
        self._sampling = sampling
        self._ops = ops
        self._chain = self._masks[:1].clone()

    def tree_of(self, num_draft: int) -> TreeShape | None:
        """As the protocol."""
        return self._shapes.get(num_draft)

    def is_capturable(self, num_rows: int, width: int) -> bool:
        """As the protocol."""
        sizes = {1, 1 + width, *(shape.width for shape in self._shapes.values())}
        return all(self._head.reserve(num_rows, num_tokens) for num_tokens in sorted(sizes))

    def prepare(self, step: DraftStep) -> DraftChain | None:
        """As for a chain, which the drafts are until a tree is written."""
        chain = self._head.prepare(step)
        if chain is not None:
            self._masks.index_copy_(0, chain.rows, self._chain.expand(chain.rows.shape[0], -1))
        return chain

    def update_only(self, step: DraftStep) -> None:
        """As for a chain."""
        self._head.update_only(step)

    def extend(self, chain: DraftChain) -> None:
        """As for a chain."""
        self._head.extend(chain)

    def draft(self, chain: DraftChain, tree: TreeShape | None, *, is_greedy: bool) -> None:
        """Writes the next draft of a chain; or grows the tree of each row and writes its nodes, and leaves the chain unchanged.

        Nodes past a row's last slot, and those of illegal rows, are not written.
        """
        if tree is None:
            self._head.draft(chain, is_greedy=is_greedy)
            return
        noise = None if is_greedy else self._sampling.free_draws(chain.rows)
        candidates = TreeCandidates.empty(chain.rows.shape[0], tree, chain.logits.dtype, chain.logits.device)
        states = chain.carried
        nodes = self._ops.grow(chain.logits, noise, chain.positions, candidates, None)
        while nodes is not None:
            logits, states = self._head.compute(chain, nodes, states)
            nodes = self._ops.grow(logits, noise, chain.positions, candidates, nodes)
        self._ops.write_trees(candidates, chain.rows, chain.legal, chain.positions, self._state)
