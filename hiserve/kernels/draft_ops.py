"""Device operations around a draft head's forward."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from hiserve.config.settings import TreeShape
from hiserve.core.drafts import DraftLayout
from hiserve.core.forward import ForwardInputs
from hiserve.kernels.step_ops import RowTensors

_MODULES = {"cpu": "hiserve.kernels.draft_reference", "cuda": "hiserve.kernels.draft_triton"}


@dataclass(frozen=True, slots=True, eq=False)
class StepHiddenStates:
    """Hidden states of a step of B rows and T tokens, the stored ones, and the draft tokens that take them.

    Attributes:
        hidden_states: ``[T, F]``, of the step's tokens in row order; elements adjacent, as in the next two.
        last: ``[R, F]``, of each row's last computed token, by row number.
        page_hidden: ``[num_pages, F]``, of each page's last token.
        rows: int64 ``[B]``. Row numbers.
        first: int64 ``[B]``. Tokens stored before the step; arbitrary for an illegal row.
        token_rows: int64 ``[T + B]``. Which of the B rows a draft token belongs to.
        offsets: int64 ``[T + B]``. Its index among those of its row.
        legal: bool ``[B]``. Rows that passed the check.
        qo_indptr: int32 ``[B + 1]``. Row b computed the tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]``.
        page_table: int32 ``[B, W]``, of ``draft_inputs``.
        page_size: Tokens per page.
    """

    hidden_states: Tensor
    last: Tensor
    page_hidden: Tensor
    rows: Tensor
    first: Tensor
    token_rows: Tensor
    offsets: Tensor
    legal: Tensor
    qo_indptr: Tensor
    page_table: Tensor
    page_size: int


@dataclass(frozen=True, slots=True, eq=False)
class DraftProgress:
    """The pages and rows for which a head has computed keys and values; it does not take part in every step.

    A page is drafted if a head has computed all of its tokens, each in the step that computed the token itself. A
    head attends over a row's pages after the last one that is not drafted.

    Attributes:
        is_drafted: ``[num_pages]``, of any type. 1 for a drafted page, any other value for one that is not.
        start_page: int64 ``[R]``, by row number. First entry of the row's table that its drafts attend over.
        taken_len: int64 ``[R]``. Tokens of the row that were computed when the head last took part.
    """

    is_drafted: Tensor
    start_page: Tensor
    taken_len: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TreeCandidates:
    """Candidates for the nodes of S trees, C of each, level by level.

    Attributes:
        worth: ``[S, C]``, float32 or wider, from 0 to 1. That all drafts up to a candidate are accepted.
        tokens: int32 ``[S, C]``.
        parents: int32 ``[S, C]``. Each one's candidate of the level before; -1 on the first level.
        shape: Has ``width`` candidates after the root, then as many after each of the ``width`` best of the level before.
    """

    worth: Tensor
    tokens: Tensor
    parents: Tensor
    shape: TreeShape

    @classmethod
    def empty(cls, num_trees: int, shape: TreeShape, dtype: torch.dtype, device: torch.device) -> TreeCandidates:
        """Returns memory for S trees; ``dtype`` is that of the logits."""
        size, wide = (num_trees, shape.num_candidates), torch.promote_types(dtype, torch.float32)
        tokens, parents = torch.empty((2, *size), dtype=torch.int32, device=device).unbind()
        return cls(torch.empty(size, dtype=wide, device=device), tokens, parents, shape)

    def places(self, depth: int) -> slice:
        """Returns which of the C candidates a level has, from depth 0."""
        width = self.shape.width
        return slice(width + (depth - 1) * width**2, width + depth * width**2) if depth else slice(0, width)


@dataclass(frozen=True, slots=True, eq=False)
class DraftNodes:
    """The ``width`` best candidates of a level of S trees, for the head to compute.

    Attributes:
        tokens: int32 ``[S, width]``.
        positions: int64 ``[S, width]``. Absolute.
        masks: int64 ``[S, width]``. Bit j: the j-th node that the head computes lies on the path to this one, itself included.
        sources: int64 ``[S, width]``. The row of the logits that each was found in.
        candidates: int32 ``[S, width]``. Which of the C candidates it is.
        depth: Of the level, from 0.
    """

    tokens: Tensor
    positions: Tensor
    masks: Tensor
    sources: Tensor
    candidates: Tensor
    depth: int

    @property
    def num_before(self) -> int:
        """Nodes that the head has computed of each tree."""
        return self.depth * self.tokens.shape[1]


class DraftOps(Protocol):
    """Operations of fixed shape that do not wait for the device, so that a graph can record them.

    Hidden states are vectors of F elements per token, from the model. A head computes the draft slot of a token from
    the hidden state of the token before it. The hidden state of each row's last computed token is kept for the next
    step, and that of each page's last token with the page. B rows that computed T tokens in a step have ``T + B`` draft
    tokens: those of the step and, for each row, the next one.
    """

    def draft_inputs(
        self,
        rows: Tensor,
        first: Tensor,
        legal: Tensor,
        layout: DraftLayout,
        state: RowTensors,
        *,
        page_size: int,
        width: int,
    ) -> ForwardInputs:
        """Gathers tokens, positions, slots and page tables of rows.

        An illegal row starts at 0, and its pages are all the padding page. The padding page also replaces pages that no
        longer belong to the row. Tokens past the row's capacity, or past the last page of its table, are written to the
        padding page; their values are meaningless.

        Args:
            rows: int64 ``[B]``. Row numbers; row 0 may occur several times.
            first: int64 ``[B]``. Position of each row's first token; arbitrary for an illegal row.
            legal: bool ``[B]``.
            layout: Tokens of each row, from 1 to ``W * page_size``.
            state: Unchanged.
            page_size: Tokens per page.
            width: W, entries of a row's page table; at most the row's own.

        Returns:
            Inputs without ``logits_rows``. ``kv_lens`` are ``first + num_tokens``, at most ``W * page_size``;
            ``positions`` at the row's end may exceed its capacity. Entries of the page table past a row's last page
            are the padding page.
        """

    def draft_hidden_states(self, step: StepHiddenStates) -> Tensor:
        """Returns for each draft token of a step the hidden state of the token before it, ``[T + B, F]``.

        For tokens after a computed one it is the step's. For a row's first token it is zero at position 0, that of the
        previous page's end at the start of a page, and the row's kept one elsewhere. It is zero for rows that failed
        the check.
        """

    def keep_hidden_states(self, step: StepHiddenStates, state: RowTensors) -> None:
        """Stores the hidden states that later steps need: of the last token that counts as computed, and of pages' ends.

        Refused drafts do not count as computed; ``state`` is that after the step. Entries of row 0 and the padding page
        are meaningless. Rows that failed the check store nothing. Call it after ``draft_hidden_states``.
        """

    def note_drafted(self, step: StepHiddenStates, state: RowTensors, progress: DraftProgress) -> None:
        """Records that a head takes part in a step: updates drafted pages and each row's ``start_page``.

        In a step that begins at a page's start, drafts attend after the row's last page that is not drafted. In one
        that begins inside a page, ``start_page`` stays if the head took part in the row's previous step; otherwise that
        page and the tokens of the step count as not drafted. Rows that failed the check change only entries of row 0
        and the padding page.

        Hidden states are not read. ``state`` is that after the step.
        """

    def draft_window(
        self,
        rows: Tensor,
        first: Tensor,
        legal: Tensor,
        made: ForwardInputs,
        progress: DraftProgress,
        *,
        page_size: int,
    ) -> ForwardInputs:
        """Removes from a head's forward the pages before the rows' ``start_page``, but no page that it writes itself.

        ``made`` is the result of ``draft_inputs`` for these arguments. Returns the same tokens, positions and slots;
        ``kv_lens`` and ``page_table`` of the remaining pages.
        """

    def draft_ngrams(
        self,
        rows: Tensor,
        state: RowTensors,
        continuations: Tensor,
        *,
        num_draft: int,
        min_ngram: int,
        max_ngram: int,
        max_known: int,
    ) -> None:
        """Writes after each row's tokens those that followed an earlier occurrence of its last tokens.

        Of the earlier occurrences of a row's last tokens, at most ``max_ngram`` of them, the longest is used,
        and of these the latest; its continuation is repeated if it is shorter than the drafts. If fewer than
        ``min_ngram`` tokens agree anywhere, the last token is repeated. Drafts past the row's capacity are not written.

        The row's continuation is used instead if all tokens that the row got since are its first ones, and more tokens agree
        with it: these, and those before it.

        Args:
            rows: int64 ``[S]``. Row numbers, each at most once except row 0. A row without known tokens gets no drafts.
            state: The rows; tokens from ``known_len`` on are changed, and those of row 0, which are meaningless.
            continuations: int32 ``[S, 2 + N]``, elements adjacent; N at most ``MAX_FOLLOWING``. The place in the row that its continuation begins at,
                how many tokens before it agree, 0 without a continuation, and its tokens.
            num_draft: Drafts for each row, at least 1.
            min_ngram: Fewest tokens that agree, at least 1.
            max_ngram: Most tokens that are compared.
            max_known: Upper bound of ``known_len`` of these rows; in a captured graph that of any replay.
        """

    def grow(
        self,
        logits: Tensor,
        noise: tuple[Tensor, Tensor, Tensor] | None,
        positions: Tensor,
        candidates: TreeCandidates,
        before: DraftNodes | None,
    ) -> DraftNodes | None:
        """Finds the candidates of the next level: after each node the tokens of the highest scores.

        Scores are logits, plus temperature times the noise that a draw of the position has. A candidate is worth its probability,
        with scores as logits, times the worth of its parent; NaN counts as 0.

        Args:
            logits: ``[S * m, vocab_size]``, of the root (m = 1) or the nodes of the level before (m = width). Unchanged.
            noise: Temperature float64, seed and choice int64, ``[S]`` each, as of ``StepOps.draw_free``; None is no
                temperature.
            positions: int64 ``[S]``. Of the first draft.
            candidates: Get those of the level.
            before: The nodes of the level before; None for the first level.

        Returns:
            The candidates worth most, best first, of equal ones the first; None after the last level.
        """

    def write_trees(
        self, candidates: TreeCandidates, rows: Tensor, legal: Tensor, positions: Tensor, state: RowTensors
    ) -> None:
        """Writes the candidates that are worth most, of equal ones the first, in their order as trees after the known tokens.

        A row of ``TreeTensors.is_chain`` gets instead the path to the last level's best candidate, and the masks of a chain.

        Args:
            candidates: Of S trees, all levels.
            rows: int64 ``[S]``. Row numbers, each at most once except row 0.
            legal: bool ``[S]``. Of other rows nothing is written.
            positions: int64 ``[S]``. Of the first draft. Nodes past the row's capacity are not written.
            state: With ``trees``, whose first nodes are written; and their tokens.
        """


def draft_forward(
    layout: DraftLayout, *, kv_lens: Tensor, page_table: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor
) -> ForwardInputs:
    """Returns the inputs of a draft forward, without rows of logits."""
    return ForwardInputs(
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        token_rows=layout.token_rows,
        qo_indptr=layout.qo_indptr,
        kv_lens=kv_lens,
        page_table=page_table,
        logits_rows=layout.token_rows[:0],
        q_lens=layout.q_lens,
        kv_bounds=layout.kv_bounds,
        max_kv_len=layout.max_kv_len,
        num_decode=layout.num_decode,
    )


def draft_ops_for(device: torch.device) -> DraftOps:
    """Returns the kernels for a device: plain torch on the CPU, Triton elsewhere."""
    return cast("DraftOps", import_module(_MODULES[device.type]))
