"""The proposer without a model: which rows it writes, and that it waits for nothing it was not given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiserve.core.drafts import DraftStep, propose
from hiserve.kernels import draft_reference
from hiserve.kernels.step_ops import RowTensors
from hiserve.spec.ngram import NgramProposer
from tests.helpers.draft_cases import looked_up, repeating_state

KNOWN_LENS = [0, 9, 7, 0, 12]


def step(num_draft: int, sampling: list[int], continuations: torch.Tensor | None = None) -> DraftStep:
    """Rows 4, 1, 2, one that forgot its tokens, and padding; row 2 is in the midst of its prompt."""
    rows = torch.tensor([4, 1, 2, 3, 0])
    known = np.array(KNOWN_LENS, dtype=np.int32)[rows.numpy()]
    return DraftStep(
        rows=rows,
        first=torch.zeros(5, dtype=torch.int64),
        legal=torch.tensor([True, True, True, False, False]),
        sampling=torch.tensor(sampling, dtype=torch.int64),
        q_lens=np.ones(5, dtype=np.int32),
        kv_bounds=np.maximum(known - 1, 1),
        num_draft=num_draft,
        is_greedy=True,
        continuations=continuations,
    )


def repeating() -> RowTensors:
    return repeating_state(torch.Generator().manual_seed(41), 16, KNOWN_LENS, 2)


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(1, 3), (2, 2)])
def test_rows_that_sample_get_drafts_and_the_others_none(min_ngram: int, max_ngram: int) -> None:
    state, wanted = repeating(), repeating().tokens.tolist()
    proposer = NgramProposer(state, draft_reference, min_ngram, max_ngram)
    propose(proposer, step(num_draft=3, sampling=[0, 1, 3, 4]))
    for row in (4, 1):
        known = KNOWN_LENS[row]
        wanted[row][known : known + 3] = looked_up(wanted[row][:known], 3, min_ngram, max_ngram)
    assert state.tokens.tolist() == wanted
    assert state.known_len.tolist() == KNOWN_LENS


def test_rows_follow_the_continuations_of_their_step() -> None:
    """Each its own: continuations are those of the rows that sample, in their order."""
    state, wanted = repeating(), repeating().tokens.tolist()
    continuations = torch.tensor([[KNOWN_LENS[4], 9, 71, 72, 73], [KNOWN_LENS[1], 9, 81, 82, 83]], dtype=torch.int32)
    propose(NgramProposer(state, draft_reference), step(num_draft=3, sampling=[0, 1], continuations=continuations))
    for row, drafts in ((4, [71, 72, 73]), (1, [81, 82, 83])):
        wanted[row][KNOWN_LENS[row] : KNOWN_LENS[row] + 3] = drafts
    assert state.tokens.tolist() == wanted


@pytest.mark.parametrize(("num_draft", "sampling"), [(0, [0, 1]), (3, [])])
def test_without_drafts_or_rows_for_them_nothing_is_written(num_draft: int, sampling: list[int]) -> None:
    state = repeating()
    propose(NgramProposer(state, draft_reference), step(num_draft, sampling))
    assert torch.equal(state.tokens, repeating().tokens)


def test_it_asks_the_model_for_nothing() -> None:
    assert NgramProposer(repeating(), draft_reference).aux_layers == ()
