"""The proposer with a head, or a small model: one forward over a step's tokens, then one for each draft after the first.

The draft slot of a token is computed from its embedding and the model's hidden state of the token before it. After a step
that computed a row's places c to c + n - 1 the head computes c to c + n: the last of them, drawn just now, gives the first
draft. Place c, which the previous step computed too, is computed again, so that prompts,
cached prefixes and steps without drafts are one case. The use of hidden states is EAGLE's idea (Li et al.,
arXiv:2401.15077); the slot convention is ours: a page's draft part depends on no later page.

The head may skip steps. Pages with a token of a skipped step are not drafted, in whatever tier they are, and drafts attend
over the pages after the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.config.settings import TreeShape
from hiserve.core.drafts import DraftChain, DraftLayout, DraftStep
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.kernels.draft_ops import DraftNodes, DraftOps, DraftProgress, StepHiddenStates, TreeCandidates
from hiserve.kernels.step_ops import RowTensors
from hiserve.models.draft_heads import DraftHead
from hiserve.sampling.logit_shares import DrawOps
from hiserve.sampling.params import SamplingRows


@dataclass(frozen=True, slots=True, eq=False)
class DraftPool:
    """The head's part of the device pool.

    Attributes:
        layers: Keys and values of its layers, in the pages of the tokens that they embed.
        page_hidden: ``[num_pages, F]``. The hidden state of the last token of each page.
        is_drafted: ``[num_pages]``, and
        taken_len: int64 ``[R]``, as in ``DraftProgress``.
        page_size: Tokens per page.
    """

    layers: Sequence[LayerKV]
    page_hidden: Tensor
    is_drafted: Tensor
    taken_len: Tensor
    page_size: int


class HeadProposer:
    """Drafts with a head, token by token."""

    def __init__(
        self,
        head: DraftHead,
        pool: DraftPool,
        attention: Attention,
        state: RowTensors,
        sampling: SamplingRows,
        draw_ops: DrawOps,
        draft_ops: DraftOps,
    ) -> None:
        self.aux_layers = head.aux_layers  # layers of the model whose output the head takes
        self._head = head
        self._pool = pool
        self._attention = attention
        self._state = state
        self._sampling = sampling
        self._draw_ops = draw_ops
        self._ops = draft_ops
        # Drafts past a row's end attend to its last pages.
        self._max_kv_len = state.page_table.shape[1] * pool.page_size
        # The hidden state of the last computed token of each row.
        num_rows = state.tokens.shape[0]
        self._last = pool.page_hidden.new_zeros((num_rows, head.feature_size))
        self._progress = DraftProgress(
            is_drafted=pool.is_drafted,
            start_page=torch.zeros(num_rows, dtype=torch.int64, device=state.tokens.device),
            taken_len=pool.taken_len,
        )
        # Layouts and attentions that graphs of static steps read, by rows and tokens of each.
        self._static: dict[tuple[int, int], tuple[DraftLayout, Attention]] = {}

    def tree_of(self, num_draft: int) -> None:
        """Returns None: drafts are chains."""

    def is_capturable(self, num_rows: int, width: int) -> bool:
        """As the protocol."""
        return self.reserve(num_rows, 1) and self.reserve(num_rows, 1 + width)

    def reserve(self, num_rows: int, num_tokens: int) -> bool:
        """Allocates what graphs of forwards of so many tokens of each row share; returns whether they can be captured."""
        if (num_rows, num_tokens) not in self._static:
            attention = self._attention.captured(num_rows, num_tokens)
            if attention is None:
                return False
            layout = DraftLayout.uniform(num_rows, num_tokens, self._state.tokens.shape[1], self._last.device)
            self._static[num_rows, num_tokens] = layout, attention
        return True

    def prepare(self, step: DraftStep) -> DraftChain | None:
        """Computes the draft slots of a step's tokens and of the next token of each row: ``n + 1`` where a row computed n."""
        layout, attention = self._forward_after(step)
        rows, state = step.rows, self._state
        made, hidden_states = self._take_in(step, layout)
        last = state.known_len.index_select(0, rows) - 1 - step.first
        last = torch.minimum(last.clamp_(min=0), layout.num_tokens - 1) + layout.qo_indptr[:-1]
        logits, carried = self._run(made, hidden_states, last.index_select(0, step.sampling), attention)
        num_sampling = step.sampling.shape[0]
        if not num_sampling:
            return None
        sampling = rows.index_select(0, step.sampling)
        return DraftChain(
            rows=sampling,
            legal=step.legal.index_select(0, step.sampling),
            positions=state.known_len.index_select(0, sampling),
            logits=logits,
            carried=carried,
            layout=(
                self._static[num_sampling, 1][0]
                if step.is_static
                else DraftLayout.uniform(num_sampling, 1, layout.max_kv_len, rows.device)
            ),
            is_static=step.is_static,
        )

    def update_only(self, step: DraftStep) -> None:
        """As ``prepare``, where no draft is wanted: most of the head has nothing to do."""
        layout, attention = self._forward_after(step)
        made, hidden_states = self._take_in(step, layout)
        self._run(made, hidden_states, step.sampling[:0], attention)

    def draft(self, chain: DraftChain, tree: TreeShape | None = None, *, is_greedy: bool) -> None:
        """Draws a draft of each row with the noise that the model's own draw of that position will have, and writes it.

        Both then agree more often. Drafts past a row's last slot, and those of illegal rows, are not written: row 0 keeps
        its first token, which padded steps compute.
        """
        assert tree is None, f"a chain of shape {tree}"
        if is_greedy:
            drafts = self._draw_ops.greedy(chain.logits)
        else:
            temperature, seed, choice = self._sampling.free_draws(chain.rows)
            drafts = self._draw_ops.draw_free(chain.logits, temperature, seed, choice, chain.positions, temperature > 0)
        tokens, positions = self._state.tokens, chain.positions
        has_slot = chain.legal & (positions < tokens.shape[1])
        flat = torch.where(has_slot, chain.rows * tokens.shape[1] + positions, 0)
        tokens.view(-1).scatter_(0, flat, torch.where(has_slot, drafts, 0).int())
        positions.add_(1)

    def extend(self, chain: DraftChain) -> None:
        """Computes the token drawn last of each row; logits and the state of the chain are replaced."""
        attention, num_rows = self._attention, chain.rows.shape[0]
        if chain.is_static:
            _, attention = self._static[num_rows, 1]
        else:
            chain.layout = chain.layout.within(min(chain.layout.max_kv_len + 1, self._max_kv_len))
        first = chain.positions - 1
        made = self._inputs(chain.rows, first, chain.legal, chain.layout)
        made = self._window(chain.rows, first, chain.legal, made)
        logits, carried = self._run(made, chain.carried, made.token_rows, attention)
        chain.logits.copy_(logits)
        chain.carried.copy_(carried)

    def compute(self, chain: DraftChain, nodes: DraftNodes, states: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the nodes of a level of each row, stored after those of the levels before; returns logits and states.

        A node sees its row's known tokens and, of the nodes, its ancestors. The chain is unchanged.

        Args:
            chain: Of S rows.
            nodes: n of each row.
            states: ``[m, F]``, at the rows of logits that ``nodes.sources`` counts.

        Returns:
            ``[S * n, vocab_size]`` and ``[S * n, F]``.
        """
        num_rows, num_tokens = nodes.tokens.shape
        if chain.is_static:
            layout, attention = self._static[num_rows, num_tokens]
        else:
            most = min(chain.layout.max_kv_len + nodes.num_before + num_tokens, self._max_kv_len)
            layout = DraftLayout.uniform(num_rows, num_tokens, most, chain.rows.device)
            attention = self._attention
        made = self._inputs(chain.rows, chain.positions + nodes.num_before, chain.legal, layout)
        made = self._window(chain.rows, chain.positions, chain.legal, made)
        made = replace(
            made,
            input_ids=nodes.tokens.flatten(),
            positions=nodes.positions.flatten(),
            tree_mask=nodes.masks.flatten(),
            num_nodes_before=nodes.num_before,
        )
        each = torch.arange(num_rows * num_tokens, device=chain.rows.device)
        return self._run(made, states.index_select(0, nodes.sources.flatten()), each, attention)

    def _forward_after(self, step: DraftStep) -> tuple[DraftLayout, Attention]:
        """Returns the tokens of the forward that computes a step's, and its attention."""
        if step.is_static:
            return self._static[len(step.q_lens), 1 + int(step.q_lens[0])]
        return DraftLayout.after(step, self._max_kv_len), self._attention

    def _take_in(self, step: DraftStep, layout: DraftLayout) -> tuple[ForwardInputs, Tensor]:
        """Returns the inputs of a forward over a step, and the hidden state of the token before each."""
        made = self._inputs(step.rows, step.first, step.legal, layout)
        assert step.hidden_states is not None or not self.aux_layers, f"no hidden states of layers {self.aux_layers}"
        nothing = self._last.new_empty((layout.token_rows.shape[0], 0))
        kept = StepHiddenStates(
            hidden_states=nothing if step.hidden_states is None else self._head.fuse(step.hidden_states),
            last=self._last,
            page_hidden=self._pool.page_hidden,
            rows=step.rows,
            first=step.first,
            token_rows=layout.token_rows,
            offsets=layout.offsets,
            legal=step.legal,
            qo_indptr=layout.step_indptr,
            page_table=made.page_table,
            page_size=self._pool.page_size,
        )
        hidden_states = nothing
        if self._head.feature_size:
            hidden_states = self._ops.draft_hidden_states(kept)
            self._ops.keep_hidden_states(kept, self._state)
        self._ops.note_drafted(kept, self._state, self._progress)
        return self._window(step.rows, step.first, step.legal, made), hidden_states

    def _window(self, rows: Tensor, first: Tensor, legal: Tensor, made: ForwardInputs) -> ForwardInputs:
        return self._ops.draft_window(rows, first, legal, made, self._progress, page_size=self._pool.page_size)

    def _inputs(self, rows: Tensor, first: Tensor, legal: Tensor, layout: DraftLayout) -> ForwardInputs:
        page_size, state = self._pool.page_size, self._state
        width = min(-(-layout.max_kv_len // page_size), state.page_table.shape[1])
        return self._ops.draft_inputs(rows, first, legal, layout, state, page_size=page_size, width=width)

    def _run(
        self, made: ForwardInputs, hidden_states: Tensor, logits_rows: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        positions = (made.positions - self._head.shift).clamp_(min=0)
        inputs = replace(made, positions=positions, logits_rows=logits_rows)
        attention.plan(inputs)
        return self._head.forward(inputs, hidden_states, self._pool.layers, attention)


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
