"""The proposer with a head, or a small model: one forward over what a step computed, then one for each further draft.

The draft slot of a token is computed from its embedding and from what the model showed of the token before it. A step
that computed a row's places c to c + n - 1 thus lets the head compute c to c + n: the last of them, drawn just now,
gives the first draft. Place c, which the step before computed too, is computed again: nothing needs to be known of how
a row came there, by a prompt, a cached prefix, or a step without drafts. The idea of the features is EAGLE's (Li et al.,
arXiv:2401.15077); the slot convention is ours: a page's draft part depends on nothing behind the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiserve.attention.base import Attention
from hiserve.core.drafts import DraftStep
from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.upload import upload
from hiserve.kernels.draft_ops import DraftMetadata, DraftOps
from hiserve.kernels.step_ops import RowState, StepOps
from hiserve.models.draft import DraftHead
from hiserve.sampling.params import SamplingRows


@dataclass(frozen=True, slots=True, eq=False)
class DraftPool:
    """Where a head keeps what it needs of tokens.

    Attributes:
        layers: Keys and values of its layers, in the pages of the tokens that they embed.
        boundary: ``[num_pages, F]``. What the model showed of the last token of each page.
        page_size: Tokens per page.
    """

    layers: Sequence[LayerKV]
    boundary: Tensor
    page_size: int


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
        taps: Layers of the model that the head sees.
    """

    def __init__(
        self,
        head: DraftHead,
        pool: DraftPool,
        attention: Attention,
        state: RowState,
        sampling: SamplingRows,
        step_ops: StepOps,
        draft_ops: DraftOps,
    ) -> None:
        self.taps = head.taps
        self._head = head
        self._pool = pool
        self._attention = attention
        self._state = state
        self._sampling = sampling
        self._step_ops = step_ops
        self._ops = draft_ops
        # Of the last computed token of each row, what the model showed.
        self._last = pool.boundary.new_zeros((state.tokens.shape[0], head.feature_size))

    def propose(self, step: DraftStep) -> None:
        """Writes ``num_draft`` tokens behind what each sampling row knows, and what the head needs of the step's tokens."""
        logits, carried = self._follow(step)
        num_sampling = step.sampling.shape[0]
        if not step.num_draft or not num_sampling:
            return
        rows = step.rows.index_select(0, step.sampling)
        legal = step.legal.index_select(0, step.sampling)
        known = self._state.known_len.index_select(0, rows)
        each_row = torch.arange(num_sampling, device=rows.device)
        one, none = torch.ones_like(each_row), torch.zeros_like(each_row)
        q_lens = np.ones(num_sampling, dtype=np.int32)
        qo_indptr = torch.arange(num_sampling + 1, dtype=torch.int32, device=rows.device)
        for index in range(step.num_draft):
            self._write(self._draw(logits, rows, known + index, is_greedy=step.is_greedy), rows, known + index, legal)
            if index + 1 == step.num_draft:
                return
            max_kv_len = int(step.kv_bounds.max()) + 2 + index
            made = self._inputs(rows, known + index, one, legal, each_row, none, max_kv_len)
            bounds = np.full(num_sampling, max_kv_len, dtype=np.int32)
            inputs = _forward_inputs(
                made, self._head.shift, each_row, qo_indptr, each_row, q_lens, bounds, num_sampling
            )
            logits, carried = self._run(inputs, carried)

    def _follow(self, step: DraftStep) -> tuple[Tensor, Tensor]:
        """Computes the draft slots of a step's tokens, and of the ones behind them: logits and states of sampling rows."""
        rows, state = step.rows, self._state
        q_lens = step.q_lens + np.int32(1)
        num = q_lens.astype(np.int64)
        indptr = np.zeros(num.size + 1, dtype=np.int64)
        np.cumsum(num, out=indptr[1:])
        host_rows = np.repeat(np.arange(num.size), num)
        columns = (num, host_rows, np.arange(indptr[-1]) - indptr[host_rows], indptr.astype(np.int32))
        num_tokens, token_rows, offsets, qo_indptr = upload(columns, rows.device)
        bounds = step.kv_bounds + np.int32(1)
        made = self._inputs(rows, step.first, num_tokens, step.legal, token_rows, offsets, int(bounds.max()))
        features = self._features(step, made, token_rows, offsets, qo_indptr)
        last = state.known_len.index_select(0, rows) - 1 - step.first
        last = torch.minimum(last.clamp_(min=0), num_tokens - 1) + qo_indptr[:-1]
        logits_rows = last.index_select(0, step.sampling)
        inputs = _forward_inputs(made, self._head.shift, token_rows, qo_indptr, logits_rows, q_lens, bounds, 0)
        return self._run(inputs, features)

    def _features(
        self, step: DraftStep, made: DraftMetadata, token_rows: Tensor, offsets: Tensor, qo_indptr: Tensor
    ) -> Tensor:
        """Returns what the model showed of the token before each draft token, and keeps what later steps take."""
        if not self._head.feature_size:
            return self._last.new_empty((token_rows.shape[0], 0))
        assert step.features is not None, f"the model showed nothing of layers {self.taps}"
        fused = self._head.fuse(step.features)
        each_row = torch.arange(step.q_lens.size + 1, dtype=torch.int32, device=fused.device)
        common = (
            fused,
            self._last,
            self._pool.boundary,
            step.rows,
            step.first,
            token_rows,
            offsets,
            step.legal,
            qo_indptr - each_row,  # of the step's own tokens
            made.page_table,
            self._pool.page_size,
        )
        features = self._ops.draft_features(*common)
        self._ops.keep_features(*common, self._state)
        return features

    def _inputs(
        self, rows: Tensor, first: Tensor, num: Tensor, legal: Tensor, token_rows: Tensor, offsets: Tensor, most: int
    ) -> DraftMetadata:
        page_size = self._pool.page_size
        width = min(-(-most // page_size), self._state.page_table.shape[1])
        return self._ops.draft_inputs(
            rows, first, num, legal, token_rows, offsets, self._state, page_size=page_size, width=width
        )

    def _run(self, inputs: ForwardInputs, features: Tensor) -> tuple[Tensor, Tensor]:
        self._attention.plan(inputs)
        return self._head.forward(inputs, features, self._pool.layers, self._attention)

    def _draw(self, logits: Tensor, rows: Tensor, places: Tensor, *, is_greedy: bool) -> Tensor:
        """Draws with the noise that the model's own draw of these places will have: both then agree more often."""
        if is_greedy:
            return self._step_ops.greedy(logits)
        temperature, seed, choice = self._sampling.free_draws(rows)
        return self._step_ops.draw_free(logits, temperature, seed, choice, places, temperature > 0)

    def _write(self, drafts: Tensor, rows: Tensor, places: Tensor, legal: Tensor) -> None:
        """Writes a draft of each row; those without a place, and those of illegal rows, stand in row 0, which means nothing."""
        tokens = self._state.tokens
        flat = torch.where(legal & (places < tokens.shape[1]), rows * tokens.shape[1] + places, 0)
        tokens.view(-1).scatter_(0, flat, drafts.to(tokens.dtype))


def _forward_inputs(
    made: DraftMetadata,
    shift: int,
    token_rows: Tensor,
    qo_indptr: Tensor,
    logits_rows: Tensor,
    q_lens: np.ndarray,
    bounds: np.ndarray,
    num_decode: int,
) -> ForwardInputs:
    return ForwardInputs(
        input_ids=made.input_ids,
        positions=(made.places - shift).clamp_(min=0),
        slots=made.slots,
        token_rows=token_rows,
        qo_indptr=qo_indptr,
        kv_lens=made.kv_lens,
        page_table=made.page_table,
        logits_rows=logits_rows,
        q_lens=q_lens,
        kv_bounds=bounds,
        max_kv_len=int(bounds.max()),
        num_decode=num_decode,
    )
