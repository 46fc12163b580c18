"""The kernels of drafting around a head, as each device implements them, and the tensors that they read and write."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from hiserve.core.drafts import DraftLayout
from hiserve.core.forward import ForwardInputs
from hiserve.kernels.step_ops import RowTensors

_MODULES = {"cpu": "hiserve.kernels.draft_reference", "cuda": "hiserve.kernels.draft_triton"}


@dataclass(frozen=True, slots=True, eq=False)
class StepHiddenStates:
    """The hidden states of a step of B rows and T tokens, where they are kept, and the draft tokens that take them.

    Attributes:
        hidden_states: ``[T, F]``, of the step's tokens in row order; elements adjacent, as in the next two.
        last: ``[R, F]``, by row number.
        page_hidden: ``[num_pages, F]``.
        rows: int64 ``[B]``. Row numbers.
        first: int64 ``[B]``. Tokens stored before the step; of an illegal row anything.
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
    """The pages and rows that a head has computed: it may skip steps.

    A page is drafted if the head has computed all of its places, each in the step that computed the token itself. A head
    attends over a row's pages after the last that is not drafted.

    Attributes:
        is_drafted: ``[num_pages]``, of any type. 1 for a page that is drafted; anything else is none.
        start_page: int64 ``[R]``, by row number. Page of the row's table that its drafts attend from.
        taken_len: int64 ``[R]``. Tokens of the row that were computed when the head took part last.
    """

    is_drafted: Tensor
    start_page: Tensor
    taken_len: Tensor


class DraftOps(Protocol):
    """Work of fixed shape that never waits for the device, so that a graph can hold it.

    A hidden state is a vector of F elements, the model's output of a token. A head computes the draft slot of a token from
    the hidden state of the token before it. That of the last computed token of each row is kept for the next step, and
    that of the last token of each page with the page. B rows that computed T tokens in a step have ``T + B`` draft
    tokens: row b those of the step and the next one.
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
        """Gathers tokens, positions, slots and page tables of rows, from given places on.

        An illegal row starts at 0, and has the sink for every page. The sink also stands for each page that is no
        longer the row's own. Tokens past the row's last place, or past the last page of its table, go to the sink;
        what they are means nothing.

        Args:
            rows: int64 ``[B]``. Row numbers; row 0 may occur several times.
            first: int64 ``[B]``. Place of each row's first token; of an illegal row anything.
            legal: bool ``[B]``.
            layout: Tokens of each row, from 1 to ``W * page_size``.
            state: The rows. Unchanged.
            page_size: Tokens per page.
            width: W, entries of a row's page table; at most the row's own.

        Returns:
            Inputs without ``logits_rows``. ``kv_lens`` are ``first + num_tokens``, at most ``W * page_size``;
            ``positions`` at the row's end may exceed its last place. Entries of the page table past a row's last page
            are the sink.
        """

    def draft_hidden_states(self, step: StepHiddenStates) -> Tensor:
        """Gathers for each draft token of a step the hidden state of the token before it.

        That of a token that the step computed is its own. Before a row's first token it is zero at place 0, that of the
        previous page where a page begins, and else that of the row. Rows that failed the check have zeros.

        Args:
            step: Unchanged.

        Returns:
            ``[T + B, F]``.
        """

    def keep_hidden_states(self, step: StepHiddenStates, state: RowTensors) -> None:
        """Keeps the hidden states that later steps read: of the last token that counts as computed, and of pages' last tokens.

        Row 0 and the sink keep nothing of use. After ``draft_hidden_states``, if both stand in a step.

        Args:
            step: ``last`` and ``page_hidden`` are changed, but for rows that failed the check.
            state: The rows after the step: drafts that were refused do not count as computed.
        """

    def note_drafted(self, step: StepHiddenStates, state: RowTensors, progress: DraftProgress) -> None:
        """Records that a head takes part in a step: the pages that are drafted then, and the page that drafts attend from.

        A step that begins with a page continues after the row's last page that is not drafted. One that begins inside a page
        continues if the head took part in the row's previous step; else neither that page nor the tokens of the step count
        as drafted. Rows that failed the check change nothing but what stands for row 0 and the sink.

        Args:
            step: Its hidden states are not read.
            state: The rows after the step.
            progress: Changed.
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
        """Drops the pages that a head's forward must not attend over: those before the rows' ``start_page``.

        A page with a place of the forward itself always counts.

        Args:
            rows: int64 ``[B]``. Row numbers.
            first: int64 ``[B]``. Place of each row's first token; of an illegal row anything.
            legal: bool ``[B]``.
            made: Of these rows, from ``draft_inputs``. Unchanged.
            progress: Unchanged.
            page_size: Tokens per page.

        Returns:
            The same tokens, positions and slots; ``kv_lens`` and ``page_table`` of the remaining pages.
        """

    def draft_ngrams(
        self, rows: Tensor, state: RowTensors, *, num_draft: int, min_ngram: int, max_ngram: int, max_known: int
    ) -> None:
        """Writes after each row the tokens that followed an earlier occurrence of its last known tokens.

        Of the earlier occurrences of a row's last tokens, at most ``max_ngram`` of them, it takes one of the longest,
        and of these the latest; what followed is repeated if it is shorter than the drafts. Where fewer than
        ``min_ngram`` tokens agree anywhere, the last token is repeated. Drafts without a place are not written.

        Args:
            rows: int64 ``[S]``. Row numbers, each at most once but for row 0. A row that knows nothing gets nothing.
            state: The rows; tokens from ``known_len`` on are changed, and those of row 0, which mean nothing.
            num_draft: Drafts for each row, at least 1.
            min_ngram: Fewest tokens that agree, at least 1.
            max_ngram: Most tokens that are compared.
            max_known: Upper bound of ``known_len`` of these rows; in a captured graph that of any replay.
        """


def draft_forward(
    layout: DraftLayout, *, kv_lens: Tensor, page_table: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor
) -> ForwardInputs:
    """Returns the inputs of a draft forward from what ``DraftOps.draft_inputs`` made; no logits are wanted yet."""
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
