"""Steps in the places of a graph: rows that decode first, prompts behind, and padding that reads row 0 at position 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hiserve.core.forward import ForwardInputs
from hiserve.runners.mixed import StaticInputs

PLACES = {"max_decode": 3, "max_prompts": 2, "table_width": 4, "device": torch.device("cpu"), "has_windows": True}


def step(num_new: Sequence[int], num_decode: int) -> ForwardInputs:
    """Rows of so many tokens, all values of which are their own."""
    count, rows = sum(num_new), len(num_new)
    token_rows = torch.repeat_interleave(torch.arange(rows), torch.tensor(num_new))
    empty = StaticInputs(count, rows, 0, 2, torch.device("cpu"), has_windows=True).inputs
    ends = torch.tensor([0, *num_new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return replace(
        empty,
        input_ids=torch.arange(count, dtype=torch.int32) + 50,
        positions=torch.arange(count) + 7,
        slots=torch.arange(count) + 100,
        window_slots=torch.arange(count) + 200,
        token_rows=token_rows,
        qo_indptr=ends,
        page_table=torch.arange(2 * rows, dtype=torch.int32).view(rows, 2) + 1,
        q_lens=np.array(num_new, dtype=np.int32),
        num_decode=num_decode,
    )


def test_every_token_has_its_place_and_padding_reads_nothing_of_the_step_before() -> None:
    static = StaticInputs(12, **PLACES)
    static.fill(step((1, 2, 1, 3, 5), 3), 12)
    assert static.inputs.token_rows.tolist() == [0, 1, 1, 2, 3, 3, 3, 4, 4, 4, 4, 4]
    static.fill(step((2, 4), 1), 8)  # unused places between those that decode and the prompt
    inputs = static.inputs
    assert inputs.token_rows[:8].tolist() == [0, 0, 3, 3, 3, 3, 0, 0]
    assert inputs.qo_indptr.tolist() == [0, 2, 2, 2, 6, 6]
    assert inputs.positions[:8].tolist() == [7, 8, 9, 10, 11, 12, 0, 0]
    assert inputs.slots[:8].tolist() == [100, 101, 102, 103, 104, 105, 0, 0]
    assert inputs.window_slots is not None and inputs.window_slots[6:8].tolist() == [0, 0]
    for token in range(6):
        place = int(inputs.token_rows[token])
        assert inputs.qo_indptr[place] <= token < inputs.qo_indptr[place + 1]


def test_nodes_of_the_step_before_are_causal_again() -> None:
    static = StaticInputs(12, **PLACES, has_trees=True)
    nodes = torch.arange(12) + 1
    static.fill(replace(step((1, 2, 1, 3, 5), 3), tree_mask=nodes), 12)
    mask = static.inputs.tree_mask
    assert mask is not None and torch.equal(mask, nodes)
    static.fill(replace(step((2, 4), 1), tree_mask=nodes[:6]), 8)
    assert mask[:8].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    static.fill(step((2, 4), 1), 8)  # no row verifies drafts
    assert not mask[:8].any()
