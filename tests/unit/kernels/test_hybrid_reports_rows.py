"""Reported failures of hybrid caches as test cases, by number: padding, and steps that are discarded (see ``tests/e2e``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hiserve.cache.index.prefix_cache import TailPool
from hiserve.kernels.step_ops import StepInputs, WindowTensors
from hiserve.kernels.step_reference import accept, advance, fill_inputs
from hiserve.runners.inputs import put_tokens
from tests.helpers.step_cases import StepCase, copied, is_legal, random_case

WINDOW = 5


def with_windows(case: StepCase, inputs: StepInputs) -> tuple[StepInputs, WindowTensors]:
    """Gives the rows of a case window pages: as many as it has others, each moved on by one."""
    state, forward = case.state, inputs.forward
    num_pages = state.page_owner.shape[0]
    table = torch.where(state.page_table > 0, state.page_table.clamp(max=num_pages - 1) % (num_pages - 1) + 1, 0)
    owner = torch.randint(1, 9, (num_pages,), dtype=torch.int32)
    windows = WindowTensors(table, owner[table.long()], owner, WINDOW)
    windows.entry_owner[0] = -1
    room = replace(
        forward,
        window_table=torch.full_like(forward.page_table, -7),
        window_slots=torch.full_like(forward.slots, -7),
    )
    return replace(inputs, forward=room), windows


@pytest.mark.parametrize("seed", range(30))
def test_hb_12_what_pads_a_step_writes_the_padding_page_of_every_space(seed: int) -> None:
    """Row 0 and rows that may not run: their slots are those of page 0, which nobody is given, and none is negative."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    case = random_case(generator)
    inputs, windows = with_windows(case, case.unfilled(is_stale=True))
    fill_inputs(inputs, replace(case.state, windows=windows), page_size=case.page_size)
    forward = inputs.forward
    assert forward.window_slots is not None
    pads = ~inputs.legal | (inputs.rows == 0)
    for slots in (forward.slots, forward.window_slots):
        assert (slots >= 0).all()
        assert (slots[pads[forward.token_rows]] < case.page_size).all()
        assert (slots[~pads[forward.token_rows]] >= case.page_size).all()


def test_hb_12_a_graph_that_is_larger_than_its_step_writes_the_padding_page() -> None:
    case = random_case(torch.Generator().manual_seed(3))
    inputs, windows = with_windows(case, case.unfilled())
    fill_inputs(inputs, replace(case.state, windows=windows), page_size=case.page_size)
    step, size = inputs.forward, inputs.forward.slots.shape[0] + 5
    stale = torch.full((size,), 99)
    static = replace(
        step, input_ids=stale.int(), positions=stale.clone(), slots=stale.clone(), window_slots=stale.clone()
    )
    put_tokens(step, static, size)
    for slots in (static.slots, static.window_slots):
        assert slots is not None and not slots[-5:].any()


def test_hb_12_no_row_is_given_the_padding_page() -> None:
    pool = TailPool(9, page_size=4)
    for _ in range(3):
        pages = pool.allocate(np.zeros(8, dtype=np.int32))
        assert sorted(pages.tolist()) == list(range(1, 9))
        pool.drop(pages)


@pytest.mark.parametrize("seed", range(30))
def test_hb_13_a_discarded_step_of_a_row_leaves_everything_before_it(seed: int) -> None:
    """It accepts nothing, not even a token; no count of 0 names the place before the first, and no other row is touched."""
    generator = torch.Generator().manual_seed(1000 + seed)
    case = random_case(generator)
    inputs = case.unfilled()
    state = copied(case.state)
    fill_inputs(inputs, state, page_size=case.page_size)
    counts = accept(case.drawn, case.sampling_rows, case.sampling_drafts, state)
    advance(inputs, case.drawn, counts, state)
    for number, row in enumerate(inputs.rows.tolist()):
        if row and not is_legal(case, number):
            assert torch.equal(state.tokens[row], case.state.tokens[row])
            assert (int(state.computed_len[row]), int(state.known_len[row])) == (0, 0)
    taken = set(inputs.rows.tolist())
    for row in set(range(state.tokens.shape[0])) - taken - {0}:
        assert torch.equal(state.tokens[row], case.state.tokens[row])
        assert state.computed_len[row] == case.state.computed_len[row]
    assert not state.tokens[0, 1:].any(), "the padding row was given tokens behind its first entry"
