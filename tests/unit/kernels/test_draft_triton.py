"""What a head's forwards take: the twins against rules applied token by token, Triton against the twins."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hiserve.core.forward import ForwardInputs
from hiserve.kernels import draft_reference as twins
from hiserve.kernels.draft_ops import StepHiddenStates, draft_ops_for
from hiserve.kernels.step_ops import RowTensors
from tests.helpers.draft_cases import DraftCase, draft_case, own_pages
from tests.helpers.interpreted import run_interpreted
from tests.helpers.step_cases import copied, tensors_of

NUM_CASES = 100
PROGRAM = """
import torch
from hiserve.kernels import draft_triton, draft_reference
from tests.helpers.draft_cases import draft_case

torch.set_num_threads(1)

generator = torch.Generator().manual_seed(SEED)
draft_triton._WINDOW_TABLE_BLOCK = 2
draft_triton._TABLE_BLOCK, draft_triton._TOKEN_BLOCK, draft_triton._HIDDEN_BLOCK = 2, 32, 2
for number in range(NUM_CASES):
    case = draft_case(generator)
    for each in (case, case.drafting(number % 4)):
        ours, theirs = (each.outputs(ops) for ops in (draft_triton, draft_reference))
        assert len(ours) == len(theirs)
        for index, (our, their) in enumerate(zip(ours, theirs)):
            assert torch.equal(our, their), (number, index, our, their)
"""


def cases(seed: int = 17) -> list[DraftCase]:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    return [draft_case(generator) for _ in range(NUM_CASES)]


def inputs(case: DraftCase) -> ForwardInputs:
    return twins.draft_inputs(*case.columns, case.state, page_size=case.page_size, width=case.width)


def test_draft_tokens_stand_in_the_pages_of_their_rows_and_else_in_the_sink() -> None:
    seen: Counter[str] = Counter()
    for each in cases():
        for case in (each, each.drafting(0), each.drafting(3)):
            made, token, capacity = inputs(case), 0, case.state.tokens.shape[1]
            for number, row in enumerate(case.rows.tolist()):
                start = int(case.first[number]) if case.legal[number] else 0
                end, pages = start + int(case.num[number]), own_pages(case, number)
                kv_len = min(end, case.width * case.page_size)
                num_used = -(-kv_len // case.page_size)
                assert made.kv_lens[number] == kv_len
                assert made.page_table[number].tolist() == pages[:num_used] + [0] * (case.width - num_used)
                for place in range(start, end):
                    entry = place // case.page_size
                    page = pages[entry] if entry < case.width and place < capacity else 0
                    assert made.positions[token] == place
                    assert made.slots[token] == page * case.page_size + place % case.page_size
                    assert made.input_ids[token] == case.state.tokens[row, min(place, capacity - 1)]
                    seen["own"] += page > 0
                    seen["past the table"] += entry >= case.width
                    seen["past the row"] += entry < case.width and place >= capacity
                    seen["stale"] += bool(case.legal[number]) and entry < case.width and not pages[entry]
                    token += 1
            assert token == made.slots.shape[0]
    print(seen)
    assert min(seen.values()) > 10
    assert len(seen) == 4


def test_a_draft_token_takes_what_the_model_showed_of_the_token_before_it() -> None:
    seen: Counter[str] = Counter()
    for case in cases():
        table, token = inputs(case).page_table, 0
        taken = twins.draft_hidden_states(case.step_hidden_states(table))
        for number, row in enumerate(case.rows.tolist()):
            first = int(case.first[number]) if case.legal[number] else 0
            if not first:
                source, expected = "nothing", torch.zeros(case.features.shape[1])
            elif first % case.page_size == 0:
                source, expected = "boundary", case.page_hidden[table[number, first // case.page_size - 1].long()]
            else:
                source, expected = "row", case.last[row]
            seen[source] += 1
            num_new = int(case.num[number]) - 1
            assert torch.equal(taken[token], expected), source
            begin = int(case.qo_indptr[number])
            assert torch.equal(taken[token + 1 : token + 1 + num_new], case.features[begin : begin + num_new])
            token += 1 + num_new
        assert token == taken.shape[0]
    print(seen)
    assert min(seen[source] for source in ("nothing", "boundary", "row")) > 20


def test_a_step_keeps_what_the_model_showed_of_the_last_token_computed_and_of_ends_of_pages() -> None:
    seen: Counter[str] = Counter()
    for case in cases():
        table = inputs(case).page_table
        arguments = case.step_hidden_states(table)
        before = copied(case.state)
        twins.keep_hidden_states(arguments, case.state)
        last, page_hidden = case.last.clone(), case.page_hidden.clone()
        for number, row in enumerate(case.rows.tolist()):
            first, computed = int(case.first[number]), int(case.state.computed_len[row])
            if not case.legal[number]:
                continue
            features = case.features[int(case.qo_indptr[number]) :]
            last[row] = features[computed - 1 - first]
            seen["refused"] += computed < first + int(case.num[number]) - 1
            for place in range(first, computed):
                page = int(table[number, place // case.page_size])
                if (place + 1) % case.page_size == 0 and page:
                    page_hidden[page] = features[place - first]
                    seen["page"] += 1
        assert torch.equal(arguments.last, last)
        assert torch.equal(arguments.page_hidden, page_hidden)
        found = tensors_of(case.state)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors_of(before).items())
    print(seen)
    assert min(seen["refused"], seen["page"]) > 20


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_one_step_keeps_the_next_one_takes(page_size: int) -> None:
    """One row in chunks and with drafts refused: each of its tokens takes the features of the one before it."""
    generator = torch.Generator().manual_seed(23)
    shown = torch.randn(40, 2, generator=generator)
    state = RowTensors(
        tokens=torch.zeros((2, 64), dtype=torch.int32),
        computed_len=torch.zeros(2, dtype=torch.int64),
        known_len=torch.zeros(2, dtype=torch.int64),
        page_table=torch.stack((torch.zeros(64), torch.arange(1, 65))).to(torch.int32),
        entry_owner=torch.ones((2, 64), dtype=torch.int32),
        page_owner=torch.ones(65, dtype=torch.int32),
    )
    last, page_hidden = torch.zeros(2, 2), torch.zeros(65, 2)
    for num_new, num_refused in ((5, 0), (3, 0), (4, 2), (1, 0), (4, 3), (4, 0), (2, 1), (8, 0)):
        first = int(state.computed_len[1])
        one, zeros = torch.ones(1, dtype=torch.int64), torch.zeros(num_new + 1, dtype=torch.int64)
        right = num_new - num_refused
        features = torch.cat((shown[first : first + right], torch.full((num_refused, 2), torch.nan)))
        state.computed_len[1] += right
        arguments = StepHiddenStates(
            features,
            last,
            page_hidden,
            one,
            first * one,
            zeros,
            torch.arange(num_new + 1),
            one == 1,
            torch.tensor([0, num_new], dtype=torch.int32),
            state.page_table[1:],
            page_size,
        )
        taken = twins.draft_hidden_states(arguments)
        twins.keep_hidden_states(arguments, state)
        before = shown[first - 1] if first else torch.zeros(2)
        assert torch.equal(taken[: right + 1], torch.cat((before[None], shown[first : first + right])))


def test_a_device_finds_its_kernels_by_its_kind() -> None:
    assert draft_ops_for(torch.device("cpu")) is twins


@pytest.mark.parametrize("seed", [7])
def test_triton_does_what_the_twins_do(seed: int) -> None:
    print(f"seed {seed}")
    run_interpreted(PROGRAM.replace("SEED", str(seed)).replace("NUM_CASES", "16"))
