"""A step's inputs: lengths from the device, slots from the table, illegal rows to the sink."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import hiserve.kernels.step_reference
from hiserve.core.plan import BatchPlan
from hiserve.core.request import SamplingParams
from hiserve.kernels.step_ops import StepInputs
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.inputs import build_inputs
from hiserve.runners.step_output import record
from tests.helpers.plans import HandPlanner, int32

PAGE, NUM_PAGES = 4, 16


@pytest.fixture
def rows() -> DeviceRows:
    return DeviceRows(max_rows=4, max_len=24, page_size=PAGE, num_pages=NUM_PAGES, device="cpu")


@pytest.fixture
def planner() -> HandPlanner:
    return HandPlanner(PAGE, NUM_PAGES)


def build(plan: BatchPlan, rows: DeviceRows) -> StepInputs:
    rows.apply(plan)
    return build_inputs(plan, rows)


def bare(
    num_new: dict[int, int], samples: list[bool], max_len: list[int], num_scored: list[int] | None = None
) -> BatchPlan:
    """A plan that changes no state, right or wrong."""
    return BatchPlan(
        step_id=9,
        rows=int32(list(num_new)),
        num_new=int32(list(num_new.values())),
        num_draft=int32([0] * len(num_new)),
        samples=np.array(samples),
        num_scored=int32(num_scored or [0] * len(num_new)),
        max_len=int32(max_len),
    )


def finish(step: StepInputs, rows: DeviceRows, token: int = 3) -> None:
    record(step, torch.full_like(step.sampling, token)[:, None], rows)


def test_a_chunk_and_a_decode_share_a_batch(rows: DeviceRows, planner: HandPlanner) -> None:
    planner.admit(1, list(range(10, 16)))
    planner.admit(3, list(range(20, 29)))
    first = build(planner.step({1: 6, 3: 5}), rows)
    finish(first, rows, token=7)
    step = build(planner.step({3: 3, 1: 1}), rows)
    inputs = step.forward
    assert step.legal.all()
    assert inputs.input_ids.tolist() == [25, 26, 27, 7]
    assert inputs.positions.tolist() == [5, 6, 7, 6]
    assert inputs.token_rows.tolist() == [0, 0, 0, 1]
    assert inputs.qo_indptr.tolist() == [0, 3, 4]
    assert inputs.kv_lens.tolist() == [8, 7]
    assert inputs.page_table.tolist() == [planner.pages[3], planner.pages[1]]
    assert inputs.slots.tolist() == [
        planner.pages[3][1] * PAGE + 1,
        planner.pages[3][1] * PAGE + 2,
        planner.pages[3][1] * PAGE + 3,
        planner.pages[1][1] * PAGE + 2,
    ]
    assert inputs.logits_rows.tolist() == [3]
    assert step.sampling.tolist() == [1]
    assert (inputs.max_q_len, inputs.max_kv_len) == (3, 8)


@pytest.mark.parametrize(
    ("num_new", "num_draft", "num_decode"),
    [([1, 1, 3, 4], [0, 0, 0, 0], 2), ([1, 4, 2, 5], [0, 3, 1, 0], 3), ([3, 5, 1], [0, 0, 0], 3), ([3, 5], [0, 0], 0)],
    ids=["decode", "drafts", "out of order", "prompts"],
)
def test_rows_whose_length_drafts_may_change_are_told_from_those_behind_them(
    rows: DeviceRows, num_new: list[int], num_draft: list[int], num_decode: int
) -> None:
    plan = bare(dict(enumerate(num_new, 1)), [True] * len(num_new), [9] * len(num_new))
    plan = dataclasses.replace(plan, num_draft=int32(num_draft))
    assert build_inputs(plan, rows).forward.num_decode == num_decode


def test_scored_tokens_follow_the_sampling_rows_in_plan_order(rows: DeviceRows, planner: HandPlanner) -> None:
    """Row 3 is in the middle of its prompt, row 1 at its end, row 2 scores nothing."""
    scored = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0)
    planner.admit(1, list(range(10, 16)), scored)
    planner.admit(2, list(range(40, 45)))
    planner.admit(3, list(range(20, 29)), scored)
    first = build(planner.step({1: 6, 2: 5, 3: 4}), rows)
    assert first.forward.logits_rows.tolist() == [5, 10, 0, 1, 2, 3, 4, 11, 12, 13, 14]
    assert first.scored_tokens is not None
    assert first.scored_tokens.tolist() == [11, 12, 13, 14, 15, 21, 22, 23, 24]
    finish(first, rows)
    second = build(planner.step({1: 1, 3: 5}), rows)
    assert second.scored_tokens is not None
    assert second.scored_tokens.tolist() == [25, 26, 27, 28]
    assert second.forward.logits_rows.tolist() == [0, 5, 1, 2, 3, 4]
    finish(second, rows)
    assert build(planner.step({1: 1, 3: 1}), rows).scored_tokens is None


def test_an_illegal_row_scores_some_token_and_touches_no_other_rows(planner: HandPlanner) -> None:
    """Even where it is the last row, and as long as a row can be."""
    rows = DeviceRows(max_rows=1, max_len=4, page_size=PAGE, num_pages=NUM_PAGES, device="cpu")
    planner.admit(1, [1, 2, 3, 4])
    rows.apply(planner.step({1: 4}))
    step = build_inputs(bare({1: 4}, [True], [4], [4]), rows)
    assert_sunk(step, 0)
    assert step.scored_tokens is not None
    assert step.scored_tokens.tolist() == [2, 3, 4, 4]


def test_lengths_come_from_the_device_and_not_from_the_plan(rows: DeviceRows, planner: HandPlanner) -> None:
    """The plan's bound is loose, as it is when drafts may be refused."""
    planner.admit(1, [1, 2, 3])
    finish(build(planner.step({1: 3}), rows), rows)
    step = build_inputs(bare({1: 1}, [True], [20]), rows)
    assert step.legal.all()
    assert step.forward.positions.tolist() == [3]
    assert step.forward.kv_lens.tolist() == [4]
    assert step.forward.max_kv_len == 20


def assert_sunk(step: StepInputs, index: int) -> None:
    mine = step.forward.token_rows == index
    assert not step.legal[index]
    assert (step.forward.slots[mine] < PAGE).all()
    assert not step.forward.page_table[index].any()
    assert step.forward.kv_lens[index].item() == int(mine.sum())


@pytest.mark.parametrize("entry", [0, 1, 2])
def test_a_stale_entry_read_or_written_sends_the_whole_row_to_the_sink(
    rows: DeviceRows, planner: HandPlanner, entry: int
) -> None:
    planner.admit(1, list(range(9)))
    planner.admit(2, list(range(9)))
    finish(build(planner.step({1: 8, 2: 8}), rows), rows)
    plan = planner.step({1: 1, 2: 1})
    rows.apply(plan)
    rows.page_owner[planner.pages[1][entry]] += 1  # the page went to a later allocation
    step = build_inputs(plan, rows)
    assert_sunk(step, 0)
    assert step.legal[1]
    assert step.forward.page_table[1].tolist() == planner.pages[2]


def test_a_stale_entry_that_is_not_used_yet_is_no_fault(rows: DeviceRows, planner: HandPlanner) -> None:
    planner.admit(1, list(range(9)))
    plan = planner.step({1: 4})
    rows.apply(plan)
    rows.page_table[1, 1], rows.entry_owner[1, 1] = 5, 99
    assert build_inputs(plan, rows).legal.all()


def test_an_entry_that_was_never_written_is_a_fault(rows: DeviceRows, planner: HandPlanner) -> None:
    planner.admit(1, list(range(5)))
    plan = planner.step({1: 5})
    rows.apply(plan)
    rows.page_table[1, 1], rows.entry_owner[1, 1] = 0, -1
    assert_sunk(build_inputs(plan, rows), 0)


def test_the_last_loc_check_is_part_of_it(
    rows: DeviceRows, planner: HandPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that disagrees with the length: it cannot come out of this table, so it is put in."""
    planner.admit(1, list(range(5)))
    finish(build(planner.step({1: 5}), rows), rows)
    plan = planner.step({1: 1})
    rows.apply(plan)
    assert build_inputs(plan, rows).legal.all()
    monkeypatch.setattr(hiserve.kernels.step_reference, "last_loc", lambda table, length, page_size: length + 100)
    assert_sunk(build_inputs(plan, rows), 0)


@pytest.mark.parametrize(
    ("num_new", "samples", "max_len", "why"),
    [
        (3, True, 20, "more tokens than are known"),
        (1, True, 20, "samples before the end of what is known"),
        (2, True, 4, "longer than the plan's bound"),
    ],
)
def test_a_plan_that_does_not_fit_the_lengths_is_a_fault(
    rows: DeviceRows, planner: HandPlanner, num_new: int, samples: bool, max_len: int, why: str
) -> None:
    planner.admit(1, [1, 2, 3, 4, 5])
    finish(build(planner.step({1: 3}), rows), rows)
    assert_sunk(build_inputs(bare({1: num_new}, [samples], [max_len]), rows), 0)


def test_a_row_may_not_sample_past_its_capacity(planner: HandPlanner) -> None:
    rows = DeviceRows(max_rows=1, max_len=4, page_size=PAGE, num_pages=NUM_PAGES, device="cpu")
    planner.admit(1, [1, 2, 3, 4])
    plan = planner.step({1: 4})
    rows.apply(plan)
    assert_sunk(build_inputs(plan, rows), 0)
    assert build_inputs(bare({1: 4}, [False], [4]), rows).legal.all()


def test_the_padding_row_always_works_in_the_sink(rows: DeviceRows) -> None:
    step = build_inputs(bare({0: 3}, [True], [3]), rows)
    assert_sunk(step, 0)
    finish(step, rows)
    assert rows.known_len[0].item() == 0


@pytest.mark.parametrize(("num_known", "first", "second"), [(3, 3, 1), (12, 4, 4)], ids=["decode", "chunk"])
def test_a_step_already_launched_for_a_faulted_row_faults_too(
    rows: DeviceRows, planner: HandPlanner, num_known: int, first: int, second: int
) -> None:
    planner.admit(1, list(range(num_known)))
    plan = planner.step({1: first})
    rows.apply(plan)
    rows.entry_owner[1, 0] = 77
    finish(build_inputs(plan, rows), rows)
    rows.entry_owner[1, 0] = plan.step_id
    assert_sunk(build(planner.step({1: second}), rows), 0)


@pytest.mark.parametrize(("max_len", "num_new", "num_scored"), [(25, 1, 0), (2, 3, 0), (3, 2, 3)])
def test_a_plan_beyond_every_bound_is_our_own_fault(
    rows: DeviceRows, max_len: int, num_new: int, num_scored: int
) -> None:
    with pytest.raises(AssertionError, match="step 9"):
        build_inputs(bare({1: num_new}, [True], [max_len], [num_scored]), rows)
