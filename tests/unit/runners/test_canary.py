"""Whoever takes a prefix over checks it: tokens, positions, through the row's own page table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.core.kv_groups import CANARY
from hiserve.core.plan import BatchPlan
from hiserve.errors import InvariantError
from hiserve.runners.canary import Canary
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.inputs import build_inputs
from hiserve.runners.step_output import record
from tests.helpers.plans import HandPlanner

PAGE, NUM_PAGES = 4, 16
PROMPT = list(range(10, 24))


class Bench:
    """Rows, a pool of nothing but the canary, and steps that all sample token 7."""

    def __init__(self) -> None:
        self.rows = DeviceRows(max_rows=4, max_len=24, page_size=PAGE, num_pages=NUM_PAGES, device="cpu")
        self.planner = HandPlanner(PAGE, NUM_PAGES)
        self.pool = DevicePool([CANARY], NUM_PAGES, PAGE, "cpu")
        (self.layer,) = self.pool.layers(CANARY.name)
        self.canary = Canary(self.rows, self.layer)

    def run(self, num_new: dict[int, int]) -> None:
        self.apply(self.planner.step(num_new))

    def apply(self, plan: BatchPlan) -> None:
        self.rows.apply(plan)
        self.canary.note(plan)
        step = build_inputs(plan, self.rows)
        self.canary.verify(plan, step)
        self.canary.write(step.forward)
        record(step, torch.full_like(step.sampling, 7)[:, None], self.rows)


@pytest.fixture
def bench() -> Bench:
    """Row 1 has computed the prompt, and 7 after it."""
    bench = Bench()
    bench.planner.admit(1, PROMPT)
    bench.run({1: 6})
    bench.run({1: 8})
    bench.run({1: 1})
    return bench


def test_each_slot_says_which_token_it_is(bench: Bench) -> None:
    slots = [page * PAGE + offset for page in bench.planner.pages[1] for offset in range(PAGE)][: len(PROMPT) + 1]
    assert bench.layer.k.view(-1)[slots].tolist() == [*PROMPT, 7]
    assert bench.layer.v.view(-1)[slots].tolist() == list(range(len(PROMPT) + 1))


def test_a_prefix_that_is_the_rows_own_passes(bench: Bench) -> None:
    bench.planner.admit(2, PROMPT, cached=bench.planner.pages[1][:3])
    bench.run({2: 1, 1: 1})
    bench.run({2: 1})


@pytest.mark.parametrize("field", ["k", "v"])
def test_a_prefix_that_holds_something_else_is_named(bench: Bench, field: str) -> None:
    pages = bench.planner.pages[1][:3]
    getattr(bench.layer, field).view(-1)[pages[1] * PAGE + 2] = 99
    bench.planner.admit(2, PROMPT, cached=pages)
    found = {"k": "token 99 of position 6", "v": "token 16 of position 99"}[field]
    with pytest.raises(InvariantError, match=rf"^row 2, page {pages[1]}: position 6 holds {found}, not token 16$"):
        bench.run({2: 1})


def test_pages_in_the_wrong_order_do_not_pass(bench: Bench) -> None:
    bench.planner.admit(2, PROMPT, cached=[bench.planner.pages[1][index] for index in (0, 2, 1)])
    with pytest.raises(InvariantError, match="position 4 holds token 18 of position 8, not token 14"):
        bench.run({2: 1})


def test_the_same_tokens_elsewhere_do_not_pass() -> None:
    bench = Bench()
    bench.planner.admit(1, [5] * 14)
    bench.run({1: 14})
    bench.planner.admit(2, [5] * 14, cached=[bench.planner.pages[1][index] for index in (0, 0)])
    with pytest.raises(InvariantError, match="position 4 holds token 5 of position 0"):
        bench.run({2: 1})


def test_a_row_that_moves_to_pages_of_others_is_checked_again(bench: Bench) -> None:
    bench.planner.admit(2, [*PROMPT[:9], 1, 2])
    bench.run({2: 11})
    theirs, ours = bench.planner.pages[2], bench.planner.pages[1]
    for index, page in enumerate(theirs[:2]):  # the same tokens: nothing is wrong
        bench.planner._writes.append((1, index, page, bench.planner.owner[page]))
    bench.run({1: 1})
    bench.planner._writes.append((1, 2, theirs[2], bench.planner.owner[theirs[2]]))
    assert ours[2] != theirs[2]
    with pytest.raises(InvariantError, match=rf"row 1, page {theirs[2]}: position 9 holds token 1 of position 9"):
        bench.run({1: 1})


def test_who_comes_after_a_row_is_checked_for_itself(bench: Bench) -> None:
    pages = bench.planner.pages[1][:3]
    bench.planner.admit(2, PROMPT, cached=pages)
    bench.run({1: 1})  # row 2 has its pages and does not run
    bench.layer.k.view(-1)[pages[0] * PAGE] = 99
    bench.planner.release(2, keep=3)
    bench.planner.admit(2, [1, 2, 3])
    bench.run({2: 3})


def test_a_row_that_the_step_refuses_is_not_checked(bench: Bench) -> None:
    pages = bench.planner.pages[1][:3]
    bench.planner.admit(2, PROMPT, cached=pages)
    plan = bench.planner.step({2: 1})
    plan.table.owners[:] = np.arange(50, 50 + plan.table.owners.size)
    bench.rows.page_owner[pages] = 7
    bench.rows.apply(plan)
    bench.canary.note(plan)
    bench.rows.page_owner[pages] = 7
    bench.layer.k.view(-1)[pages[0] * PAGE] = 99
    step = build_inputs(plan, bench.rows)
    assert not step.legal.any()
    bench.canary.verify(plan, step)
