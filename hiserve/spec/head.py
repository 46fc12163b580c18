"""The proposer with a head, or a small model: one forward over what a step computed, then one for each further draft.

The draft slot of a token is computed from its embedding and from what the model showed of the token before it. A step
that computed a row's places c to c + n - 1 thus lets the head compute c to c + n: the last of them, drawn just now,
gives the first draft. Place c, which the step before computed too, is computed again: nothing needs to be known of how
a row came there, by a prompt, a cached prefix, or a step without drafts. The idea of the features is EAGLE's (Li et al.,
arXiv:2401.15077); the slot convention is ours: a page's draft part depends on nothing behind the page.

The head need not take part in every step. Pages with a token whose step it left out are not drafted, wherever they move,
and drafts attend over what stands behind the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.drafts import DraftStep, DraftWork
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.kernels.draft_ops import DraftMetadata, DraftOps, DraftProgress, StepHiddenStates
from hiserve.kernels.step_ops import RowTensors, StepOps
from hiserve.models.draft_heads import DraftHead
from hiserve.sampling.params import SamplingRows
from hiserve.spec.draft_layout import DraftLayout, draft_layout_of, even_draft_layout


@dataclass(frozen=True, slots=True, eq=False)
class DraftPool:
    """Where a head keeps what it needs of tokens.

    Attributes:
        layers: Keys and values of its layers, in the pages of the tokens that they embed.
        page_hidden: ``[num_pages, F]``. What the model showed of the last token of each page.
        is_drafted: ``[num_pages]`` and
        taken_len: int64 ``[R]``, as ``DraftProgress`` has them.
        page_size: Tokens per page.
    """

    layers: Sequence[LayerKV]
    page_hidden: Tensor
    is_drafted: Tensor
    taken_len: Tensor
    page_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """S rows while they are drafted for, token by token.

    Attributes:
        rows: int64 ``[S]``. Row numbers.
        legal: bool ``[S]``.
        places: int64 ``[S]``. Where each row's next draft will stand. Changed.
        logits: ``[S, vocab_size]``, of that draft. Changed.
        carried: ``[S, F]``. What the head goes on with. Changed.
        layout: Of forwards that compute one token of each.
    """

    rows: Tensor
    legal: Tensor
    places: Tensor
    logits: Tensor
    carried: Tensor
    layout: DraftLayout


class HeadProposer:
    """Drafts with a head, token by token.

    Args:
        head: The head.
        pool: Its part of the device pool.
        attention: A backend of its shape.
        state: The rows.
        sampling: Their parameters.
        step_ops: Draws and
        draft_ops: the rest of the device's kernels.

    Attributes:
        aux_layers: Layers of the model that the head sees.
    """

    def __init__(
        self,
        head: DraftHead,
        pool: DraftPool,
        attention: Attention,
        state: RowTensors,
        sampling: SamplingRows,
        step_ops: StepOps,
        draft_ops: DraftOps,
    ) -> None:
        self.aux_layers = head.aux_layers
        self._head = head
        self._pool = pool
        self._attention = attention
        self._state = state
        self._sampling = sampling
        self._step_ops = step_ops
        self._ops = draft_ops
        self._max_kv_len = state.page_table.shape[1] * pool.page_size  # drafts past a row's end see its last pages
        # Of the last computed token of each row, what the model showed.
        num_rows = state.tokens.shape[0]
        self._last = pool.page_hidden.new_zeros((num_rows, head.feature_size))
        self._progress = DraftProgress(
            is_drafted=pool.is_drafted,
            start_page=torch.zeros(num_rows, dtype=torch.int64, device=state.tokens.device),
            taken_len=pool.taken_len,
        )

    def propose(self, step: DraftStep) -> None:
        """Writes ``num_draft`` tokens behind what each sampling row knows, and what the head needs of the step's tokens."""
        layout = draft_layout_of(step, self._max_kv_len)
        if not step.num_draft:
            self.update_only(step, layout, self._attention)
            return
        chain = self.prepare(step, layout, self._attention)
        if not chain.rows.shape[0]:
            return
        for index in range(step.num_draft):
            if index:
                self.extend(chain, self._attention, int(step.kv_bounds.max()) + 1 + index)
            self.draw(chain, is_greedy=step.is_greedy)

    def draft_work(self, num_rows: int) -> DraftWork | None:
        """As the protocol."""
        further = self._attention.captured(num_rows, 1)
        return (
            None
            if further is None
            else HeadDraftWork(self, num_rows, self._attention, further, self._state.tokens.shape[1])
        )

    def prepare(self, step: DraftStep, layout: DraftLayout, attention: Attention) -> Chain:
        """Computes the draft slots of a step's tokens, and of the ones behind them.

        Args:
            step: Recorded in the rows.
            layout: Of ``n + 1`` tokens where a row computed n.
            attention: Plans this forward, and computes it.

        Returns:
            The rows that sampled, ready for their first draft.
        """
        rows, state = step.rows, self._state
        made, hidden_states = self._take_in(step, layout)
        last = state.known_len.index_select(0, rows) - 1 - step.first
        last = torch.minimum(last.clamp_(min=0), layout.num_tokens - 1) + layout.qo_indptr[:-1]
        logits, carried = self._run(made, layout, hidden_states, last.index_select(0, step.sampling), attention)
        sampling = rows.index_select(0, step.sampling)
        return Chain(
            rows=sampling,
            legal=step.legal.index_select(0, step.sampling),
            places=state.known_len.index_select(0, sampling),
            logits=logits,
            carried=carried,
            layout=even_draft_layout(sampling.shape[0], 1, layout.max_kv_len, rows.device),
        )

    def update_only(self, step: DraftStep, layout: DraftLayout, attention: Attention) -> None:
        """As ``prepare``, where no draft is wanted: most of the head has nothing to do."""
        made, hidden_states = self._take_in(step, layout)
        self._run(made, layout, hidden_states, step.sampling[:0], attention)

    def draw(self, chain: Chain, *, is_greedy: bool) -> None:
        """Draws a draft of each row with the noise that the model's own draw of that place will have, and writes it.

        Both then agree more often. Those without a place, and those of illegal rows, are not written: row 0 keeps its first
        token, which steps that are padded with it compute.
        """
        if is_greedy:
            drafts = self._step_ops.greedy(chain.logits)
        else:
            temperature, seed, choice = self._sampling.free_draws(chain.rows)
            drafts = self._step_ops.draw_free(chain.logits, temperature, seed, choice, chain.places, temperature > 0)
        tokens, places = self._state.tokens, chain.places
        has_place = chain.legal & (places < tokens.shape[1])
        flat = torch.where(has_place, chain.rows * tokens.shape[1] + places, 0)
        tokens.view(-1).scatter_(0, flat, torch.where(has_place, drafts, 0).int())
        places.add_(1)

    def extend(self, chain: Chain, attention: Attention, max_kv_len: int | None = None) -> None:
        """Computes the token drawn last of each row.

        Args:
            chain: The rows. Logits and what is carried are replaced.
            attention: Plans this forward, and computes it.
            max_kv_len: Upper bound of what any row attends over, were there no end to it; None is that of the layout.
        """
        layout = chain.layout if max_kv_len is None else chain.layout.within(min(max_kv_len, self._max_kv_len))
        first = chain.places - 1
        made = self._inputs(chain.rows, first, chain.legal, layout)
        made = self._window(chain.rows, first, chain.legal, made)
        logits, carried = self._run(made, layout, chain.carried, layout.token_rows, attention)
        chain.logits.copy_(logits)
        chain.carried.copy_(carried)

    def _take_in(self, step: DraftStep, layout: DraftLayout) -> tuple[DraftMetadata, Tensor]:
        """Returns what a forward over a step takes, with what the model showed of the token before each."""
        made = self._inputs(step.rows, step.first, step.legal, layout)
        assert step.hidden_states is not None or not self.aux_layers, (
            f"the model showed nothing of layers {self.aux_layers}"
        )
        nothing = self._last.new_empty((layout.token_rows.shape[0], 0))
        shown = StepHiddenStates(
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
            hidden_states = self._ops.draft_hidden_states(shown)
            self._ops.keep_hidden_states(shown, self._state)
        self._ops.note_drafted(shown, self._state, self._progress)
        return self._window(step.rows, step.first, step.legal, made), hidden_states

    def _window(self, rows: Tensor, first: Tensor, legal: Tensor, made: DraftMetadata) -> DraftMetadata:
        return self._ops.draft_window(rows, first, legal, made, self._progress, page_size=self._pool.page_size)

    def _inputs(self, rows: Tensor, first: Tensor, legal: Tensor, layout: DraftLayout) -> DraftMetadata:
        page_size, state = self._pool.page_size, self._state
        width = min(-(-layout.max_kv_len // page_size), state.page_table.shape[1])
        return self._ops.draft_inputs(
            rows,
            first,
            layout.num_tokens,
            legal,
            layout.token_rows,
            layout.offsets,
            state,
            page_size=page_size,
            width=width,
        )

    def _run(
        self, made: DraftMetadata, layout: DraftLayout, hidden_states: Tensor, logits_rows: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        inputs = ForwardInputs(
            input_ids=made.input_ids,
            positions=(made.places - self._head.shift).clamp_(min=0),
            slots=made.slots,
            token_rows=layout.token_rows,
            qo_indptr=layout.qo_indptr,
            kv_lens=made.kv_lens,
            page_table=made.page_table,
            logits_rows=logits_rows,
            q_lens=layout.q_lens,
            kv_bounds=layout.kv_bounds,
            max_kv_len=layout.max_kv_len,
            num_decode=layout.num_decode,
        )
        attention.plan(inputs)
        return self._head.forward(inputs, hidden_states, self._pool.layers, attention)


class HeadDraftWork:
    """As ``DraftWork``, of a head.

    Args:
        proposer: Whose head it is.
        num_rows: Rows.
        attention: The backend.
        further: What it has for graphs of each further draft.
        max_kv_len: Upper bound of what any row will attend over.
    """

    def __init__(
        self, proposer: HeadProposer, num_rows: int, attention: Attention, further: Attention, max_kv_len: int
    ) -> None:
        self._proposer = proposer
        self._num_rows = num_rows
        self._attention = attention
        self._further = further
        self._max_kv_len = max_kv_len
        self._chain: Chain | None = None  # of the first step that is taken in; others go on in its tensors

    @property
    def results(self) -> tuple[Tensor, ...]:
        """As the protocol."""
        chain = self._taken()
        return chain.logits, chain.carried

    def prepare(self, step: DraftStep) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """As the protocol."""
        width = 1 + int(step.q_lens[0])
        attention = self._attention.captured(self._num_rows, width)
        if attention is None:
            return None
        layout = even_draft_layout(self._num_rows, width, self._max_kv_len, step.rows.device)
        self._proposer.update_only(step, layout, attention)
        made = self._proposer.prepare(step, layout, attention)
        self._chain = self._chain or made
        return partial(self._prepare, step, layout, attention), partial(
            self._proposer.update_only, step, layout, attention
        )

    def draw(self, *, is_greedy: bool) -> None:
        """As the protocol."""
        self._proposer.draw(self._taken(), is_greedy=is_greedy)

    def extend(self) -> None:
        """As the protocol."""
        self._proposer.extend(self._taken(), self._further)

    def _prepare(self, step: DraftStep, layout: DraftLayout, attention: Attention) -> None:
        made, chain = self._proposer.prepare(step, layout, attention), self._taken()
        for ours, theirs in (
            (chain.rows, made.rows),
            (chain.legal, made.legal),
            (chain.places, made.places),
            (chain.logits, made.logits),
            (chain.carried, made.carried),
        ):
            ours.copy_(theirs)

    def _taken(self) -> Chain:
        assert self._chain is not None, "no step was taken in"
        return self._chain
