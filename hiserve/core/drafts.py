"""The interface of proposers: a step for which they draft, and their operations, which graphs can capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hiserve.config.settings import TreeShape
from hiserve.core.plan import Int32Array
from hiserve.core.upload import upload


@dataclass(frozen=True, slots=True, eq=False)
class DraftStep:
    """A step of B rows and T tokens whose result is applied to the rows; S of the rows sampled.

    Row b had ``first[b]`` stored tokens before it, and computed ``q_lens[b]`` more, verified drafts included.

    Attributes:
        rows: int64 ``[B]``, on the device.
        first: int64 ``[B]``. Tokens stored before the step; undefined for an illegal row.
        legal: bool ``[B]``. Rows that passed the check; the others write to the padding page.
        sampling: int64 ``[S]``. Indices of the rows that sampled: their last known token is new.
        q_lens: int32 ``[B]``, on the host. Tokens that each row computed.
        kv_bounds: int32 ``[B]``, on the host. Upper bounds of the tokens that each row stores, these included.
        num_draft: Drafts to propose for each sampling row.
        is_greedy: No row samples at random.
        continuations: int32 ``[S, 2 + N]``, on the device, as of the plan.
        hidden_states: ``[T, n]``, the model's output of ``Proposer.aux_layers`` for each token; None if there are none.
        is_static: The tensors are static inputs of a graph. All rows computed the same number of tokens, and sampled.
    """

    rows: Tensor
    first: Tensor
    legal: Tensor
    sampling: Tensor
    q_lens: Int32Array
    kv_bounds: Int32Array
    num_draft: int
    is_greedy: bool
    continuations: Tensor | None = None
    hidden_states: Tensor | None = None
    is_static: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DraftLayout:
    """The tokens of one draft forward: B rows and T tokens in row order.

    Attributes:
        num_tokens: int64 ``[B]``. Tokens of each row.
        token_rows: int64 ``[T]``. Which of the B rows a token belongs to.
        offsets: int64 ``[T]``. The token's index among those of its row.
        qo_indptr: int32 ``[B + 1]``. Row b has tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]``.
        step_indptr: int32 ``[B + 1]``. Likewise of the step before, in which each row had one token less.
        q_lens: int32 ``[B]``, on the host. Tokens of each row.
        kv_bounds: int32 ``[B]``, on the host. Upper bounds of the lengths that rows attend over.
        max_kv_len: Of them all.
        num_decode: Rows whose bounds are not exact: those that drafts were verified for, all of them here.
    """

    num_tokens: Tensor
    token_rows: Tensor
    offsets: Tensor
    qo_indptr: Tensor
    step_indptr: Tensor
    q_lens: Int32Array
    kv_bounds: Int32Array
    max_kv_len: int
    num_decode: int

    @classmethod
    def after(cls, step: DraftStep, max_kv_len: int) -> DraftLayout:
        """Returns, for each row, the tokens of a step and the next one; one copy carries them to the device.

        Args:
            step: Not static.
            max_kv_len: Slots of a row's pages: a token after the last slot attends only to these.
        """
        q_lens = step.q_lens + np.int32(1)
        counts = q_lens.astype(np.int64)
        indptr = np.zeros(q_lens.size + 1, dtype=np.int64)
        np.cumsum(counts, out=indptr[1:])
        rows = np.repeat(np.arange(q_lens.size), counts)
        offsets = np.arange(indptr[-1]) - indptr[rows]
        own = (indptr - np.arange(indptr.size)).astype(np.int32)
        columns = upload((counts, rows, offsets, indptr.astype(np.int32), own), step.rows.device)
        num_tokens, token_rows, token_offsets, qo_indptr, step_indptr = columns
        bounds = np.minimum(step.kv_bounds + np.int32(1), np.int32(max_kv_len))
        return cls(
            num_tokens=num_tokens,
            token_rows=token_rows,
            offsets=token_offsets,
            qo_indptr=qo_indptr,
            step_indptr=step_indptr,
            q_lens=q_lens,
            kv_bounds=bounds,
            max_kv_len=int(bounds.max()),
            num_decode=q_lens.size,
        )

    @classmethod
    def uniform(cls, num_rows: int, width: int, max_kv_len: int, device: torch.device) -> DraftLayout:
        """Returns ``width`` tokens of each row, made on the device."""
        each_row, each_token = torch.arange(num_rows, device=device), torch.arange(num_rows * width, device=device)
        indptr = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        q_lens = np.full(num_rows, width, dtype=np.int32)
        return cls(
            num_tokens=torch.full_like(each_row, width),
            token_rows=each_token // width,
            offsets=each_token % width,
            qo_indptr=indptr * width,
            step_indptr=indptr * (width - 1),
            q_lens=q_lens,
            kv_bounds=np.full_like(q_lens, max_kv_len),
            max_kv_len=max_kv_len,
            num_decode=num_rows,
        )

    def within(self, max_kv_len: int) -> DraftLayout:
        """Returns the same tokens with an upper bound of all lengths."""
        return replace(self, kv_bounds=np.full_like(self.kv_bounds, max_kv_len), max_kv_len=max_kv_len)


@dataclass(slots=True, eq=False)
class DraftChain:
    """S rows that get drafts one by one.

    Attributes:
        rows: int64 ``[S]``. Row numbers.
        legal: bool ``[S]``.
        positions: int64 ``[S]``. Of each row's next draft. Changed.
        logits: ``[S, vocab_size]``, of that draft. Changed.
        carried: ``[S, F]``. The proposer's state at the token before it. Changed.
        layout: Of forwards of one token per row. Replaced as rows grow, unless the chain is static.
        is_static: As ``DraftStep.is_static``.
    """

    rows: Tensor
    legal: Tensor
    positions: Tensor
    logits: Tensor
    carried: Tensor
    layout: DraftLayout
    is_static: bool = False

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that drafting reads and changes, besides the rows."""
        return self.rows, self.legal, self.positions, self.logits, self.carried


class Proposer(Protocol):
    """Guesses the next tokens of rows at a lower cost than the model.

    After each step that is not cold, either ``update_only`` runs, or ``prepare``, then ``draft``, then ``extend`` and
    ``draft`` for each later draft of a chain. No operation waits for the device. Drafts do not change the output, only the number of
    accepted tokens.
    """

    # Layers of the model, from 0, whose outputs for every token, concatenated, the proposer reads; the number of layers is
    # the input of the output head
    aux_layers: tuple[int, ...]

    def tree_of(self, num_draft: int) -> TreeShape | None:
        """Returns the shape of so many drafts, which one call of ``draft`` writes; None for a chain, of which each call writes one."""

    def is_capturable(self, num_rows: int, width: int) -> bool:
        """Returns whether its operations after static steps of this shape can be captured; then allocates shared tensors."""

    def prepare(self, step: DraftStep) -> DraftChain | None:
        """Computes the logits of the first draft of each sampling row; None if no row samples or all drafts are written."""

    def draft(self, chain: DraftChain, tree: TreeShape | None, *, is_greedy: bool) -> None:
        """Samples the next draft of each row, or all drafts of a tree, and writes them after the row's known tokens."""

    def extend(self, chain: DraftChain) -> None:
        """Computes the latest draft, for the logits of the next one."""

    def update_only(self, step: DraftStep) -> None:
        """Updates the proposer's state by a step without drafts."""


def propose(proposer: Proposer, step: DraftStep) -> None:
    """Writes ``num_draft`` drafts after the known tokens of each sampling row; ``runners.draft_graphs`` does it by graphs."""
    if not step.num_draft:
        proposer.update_only(step)
        return
    chain = proposer.prepare(step)
    if chain is None:
        return
    tree = proposer.tree_of(step.num_draft)
    for index in range(step.num_draft if tree is None else 1):
        if index:
            proposer.extend(chain)
        proposer.draft(chain, tree, is_greedy=step.is_greedy)
