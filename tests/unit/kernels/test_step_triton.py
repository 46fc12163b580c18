"""The device half of a step: the twins against rules applied row by row, Triton against the twins."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hiserve.kernels import step_reference as twins
from hiserve.kernels.step_ops import StepInputs, step_ops_for
from tests.helpers.interpreted import run_interpreted
from tests.helpers.step_cases import STALE, StepCase, copied, filled, is_legal, num_emitted, random_case, tensors_of

NUM_CASES = 150
PROGRAM = """
import torch
from hiserve.kernels import step_inputs, step_triton, step_reference
from tests.helpers.step_cases import copied, filled, random_case, tensors_of

torch.set_num_threads(1)

def same(ours, theirs, what):
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), (what, name, ours, theirs)

def run(ops, case, is_stale):
    state, made = copied(case.state), case.unfilled(is_stale=is_stale)
    ops.fill_inputs(made, state, page_size=case.page_size)
    counts = ops.accept(case.drawn, case.sampling_rows, case.sampling_drafts, state)
    words = ops.advance(made, case.drawn, counts, state)
    return filled(made), counts, words, tensors_of(state)

generator = torch.Generator().manual_seed(SEED)
step_inputs._TABLE_BLOCK, step_triton._SAMPLING_BLOCK, step_inputs._TOKEN_BLOCK = 2, 2, 32
for number in range(NUM_CASES):
    case = random_case(generator)
    made, counts, words, state = run(step_triton, case, number % 2 == 1)
    twin_made, twin_counts, twin_words, twin_state = run(step_reference, case, number % 2 == 1)
    same(made, twin_made, number)
    same(state, twin_state, number)
    assert torch.equal(counts, twin_counts) and torch.equal(words, twin_words), (number, counts, twin_counts)
"""


def cases(seed: int = 11) -> list[StepCase]:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    return [random_case(generator) for _ in range(NUM_CASES)]


def inputs(case: StepCase, *, is_stale: bool = False) -> StepInputs:
    made = case.unfilled(is_stale=is_stale)
    twins.fill_inputs(made, case.state, page_size=case.page_size)
    return made


def test_rows_are_legal_by_the_rules_and_the_others_work_in_the_sink() -> None:
    seen: Counter[object] = Counter()
    for case in cases():
        made, token = inputs(case), 0
        forward = made.forward
        for number, row in enumerate(made.rows.tolist()):
            legal = is_legal(case, number)
            start = int(case.state.computed_len[row]) if legal else 0
            end = start + int(made.num_new[number])
            pages = case.state.page_table[row].tolist() if legal else [0] * case.width
            num_used = -(-end // case.page_size)
            seen[legal] += 1
            seen["drafts"] += legal and bool(made.num_draft[number])
            seen["full"] += legal and end == case.state.tokens.shape[1] - 1
            assert made.legal[number] == legal
            assert forward.kv_lens[number] == end
            assert forward.page_table[number].tolist() == pages[:num_used] + [0] * (case.width - num_used)
            window_pages = pages
            if (windows := case.state.windows) is not None and forward.window_table is not None:
                window_pages = windows.table[row].tolist() if legal else [0] * case.width
                first = max(0, start - windows.size + 1) // case.page_size
                seen["freed"] += bool(first)
                wanted = [0] * first + window_pages[first:num_used] + [0] * (case.width - num_used)
                assert forward.window_table[number].tolist() == wanted
            if (kept := case.state.states) is not None and forward.state is not None:
                seen["states"] += legal
                wanted = [int(each[row]) * legal for each in (kept.lens, kept.snap_at, kept.snap_slot)]
                carried = forward.state
                assert carried.rows[number] == row * legal and carried.starts[number] == start
                assert carried.state_ends[number] == end - int(made.num_draft[number])
                found = (carried.state_lens, carried.snap_at, carried.snap_slots)
                assert [int(each[number]) for each in found] == wanted
            for position in range(start, end):
                entry, offset = position // case.page_size, position % case.page_size
                assert forward.positions[token] == position
                assert forward.slots[token] == pages[entry] * case.page_size + offset
                if forward.window_slots is not None:
                    assert forward.window_slots[token] == window_pages[entry] * case.page_size + offset
                assert forward.input_ids[token] == case.state.tokens[row, position]
                token += 1
        assert token == forward.slots.shape[0]
    print(seen)
    assert min(seen[True], seen[False], seen["drafts"], seen["states"]) > 50
    assert min(seen["full"], seen["freed"]) > 10


def test_buffers_of_a_graph_get_the_same_but_past_the_last_page_keep_theirs() -> None:
    for case in cases()[:40]:
        fresh, out = filled(inputs(case)), filled(inputs(case, is_stale=True))
        is_used = torch.arange(case.width) * case.page_size < fresh["kv_lens"][:, None]
        fresh["page_table"] = torch.where(is_used, fresh["page_table"], STALE)
        if case.state.windows is not None:
            first = (fresh["kv_lens"] - case.inputs.num_new - case.state.windows.size + 1).clamp(0) // case.page_size
            is_used &= torch.arange(case.width) >= first[:, None]
            fresh["window_table"] = torch.where(is_used, fresh["window_table"], STALE)
        for name, expected in fresh.items():
            assert torch.equal(out[name], expected), name


def test_a_row_emits_its_drafts_up_to_the_first_that_was_not_drawn() -> None:
    seen: Counter[int] = Counter()
    for case in cases():
        counts = twins.accept(case.drawn, case.sampling_rows, case.sampling_drafts, case.state).tolist()
        wanted = [num_emitted(case, which) for which in range(len(case.drawn))]
        assert counts == wanted
        seen.update(wanted)
    print(seen)
    assert min(seen[count] for count in (1, 2, 3)) > 10


def test_rows_advance_by_what_was_emitted_and_faulted_ones_forget() -> None:
    for case in cases():
        made, before = inputs(case), copied(case.state)
        counts = twins.accept(case.drawn, case.sampling_rows, case.sampling_drafts, case.state)
        words = twins.advance(made, case.drawn, counts, case.state)
        wanted = copied(before)
        emitted = dict(zip(made.sampling.tolist(), range(len(case.drawn)), strict=True))
        word_counts = [0] * len(emitted)
        for number, row in enumerate(made.rows.tolist()):
            if not made.legal[number]:
                wanted.computed_len[row] = wanted.known_len[row] = 0
                if wanted.states is not None:
                    wanted.states.lens[row] = 0
                continue
            if wanted.states is not None:
                wanted.states.lens[row] = made.forward.kv_lens[number] - made.num_draft[number]
            wanted.computed_len[row] = made.forward.kv_lens[number]
            if number in emitted:
                which, known = emitted[number], int(before.known_len[row])
                count = word_counts[which] = int(counts[which])
                wanted.computed_len[row] = known + count - 1
                wanted.known_len[row] = known + count
                wanted.tokens[row, known : known + count] = case.drawn[which, :count]
        found = tensors_of(case.state)
        for name, tensor in tensors_of(wanted).items():
            assert torch.equal(found[name], tensor), name
        assert words.tolist() == [*made.legal.int().tolist(), *word_counts, *case.drawn.view(-1).tolist()]
        assert case.state.known_len[0] == case.state.computed_len[0] == 0


def test_a_device_finds_its_kernels_by_its_kind() -> None:
    assert step_ops_for(torch.device("cpu")) is twins


@pytest.mark.parametrize("seed", [5])
def test_triton_does_what_the_twins_do(seed: int) -> None:
    print(f"seed {seed}")
    run_interpreted(PROGRAM.replace("SEED", str(seed)).replace("NUM_CASES", "40"))
