"""Which pages a head has computed, and which it attends over: by rules, for a row whose head does not follow every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from hiserve.core.drafts import DraftLayout
from hiserve.core.forward import ForwardInputs
from hiserve.kernels import draft_reference as twins
from hiserve.kernels.draft_ops import DraftProgress, StepHiddenStates
from hiserve.kernels.reference import PADDING_PAGE
from hiserve.kernels.step_ops import RowTensors

NUM_PAGES = 24
LAST = 40  # a row's page in place i is page LAST - i: in no order


@dataclass
class Row:
    """Row 1, its pages, and what became of each of its tokens."""

    page_size: int
    computed: int = 0
    is_computed: list[bool] = field(default_factory=list)  # by the head, in the token's step, beside such tokens alone

    def __post_init__(self) -> None:
        table = torch.zeros((2, NUM_PAGES), dtype=torch.int32)
        table[1] = LAST - torch.arange(NUM_PAGES)
        lengths = torch.zeros(2, dtype=torch.int64)
        tokens = torch.zeros((2, NUM_PAGES * self.page_size), dtype=torch.int32)
        self.state = RowTensors(tokens, lengths, lengths, table, table, torch.arange(LAST + 1, dtype=torch.int32))
        self.progress = DraftProgress(torch.zeros(LAST + 1), lengths.clone(), lengths.clone())

    def hit(self, are_drafted: list[bool]) -> None:
        """Begins behind pages that others computed."""
        self.computed = len(are_drafted) * self.page_size
        self.is_computed = [each for each in are_drafted for _ in range(self.page_size)]
        for entry, is_drafted in enumerate(are_drafted):
            self.progress.is_drafted[LAST - entry] = float(is_drafted)

    def step(self, num_new: int, num_refused: int, *, is_cold: bool) -> ForwardInputs | None:
        """Computes tokens, of which the last are drafts that were refused; returns what the head attends over."""
        first, self.computed = self.computed, self.computed + num_new - num_refused
        self.state.computed_len[1] = self.computed
        if is_cold:
            self.is_computed += [False] * (num_new - num_refused)
            return None
        rows, legal, firsts = torch.tensor([1]), torch.tensor([True]), torch.tensor([first])
        layout = DraftLayout.uniform(1, num_new + 1, NUM_PAGES * self.page_size, rows.device)
        made = twins.draft_inputs(rows, firsts, legal, layout, self.state, page_size=self.page_size, width=NUM_PAGES)
        indptr, nothing = torch.tensor([0, num_new], dtype=torch.int32), torch.zeros((num_new, 0))
        shown = StepHiddenStates(
            nothing,
            nothing,
            nothing,
            rows,
            firsts,
            layout.token_rows,
            layout.offsets,
            legal,
            indptr,
            made.page_table,
            self.page_size,
        )
        twins.note_drafted(shown, self.state, self.progress)
        left = twins.draft_window(rows, firsts, legal, made, self.progress, page_size=self.page_size)
        begin = first + num_new + 1 - int(left.kv_lens)
        self.is_computed += [all(self.is_computed[begin:first])] * (num_new - num_refused)
        return left

    def marks(self) -> list[bool]:
        """Of the pages that are full."""
        full = self.computed // self.page_size
        return [bool(self.progress.is_drafted[LAST - entry] == 1) for entry in range(full)]

    def whole(self) -> list[bool]:
        """Of the pages that are full, those all of whose tokens the head computed."""
        size = self.page_size
        return [all(self.is_computed[at * size : (at + 1) * size]) for at in range(self.computed // size)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_head_that_follows_every_step_has_drafted_every_page_and_attends_over_all(page_size: int) -> None:
    row = Row(page_size)
    for num_new, num_refused in ((2 * page_size + 1, 0), (1, 0), (4, 2), (1, 0), (3, 0)):
        seen = row.step(num_new, num_refused, is_cold=False)
        assert seen is not None
        assert int(seen.kv_lens) >= row.computed
        assert row.progress.start_page[1] == 0
    assert all(row.marks())
    assert row.progress.is_drafted[PADDING_PAGE] == 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_no_page_with_a_token_that_the_head_left_out_is_drafted_or_attended_over(page_size: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)

        def draw(high: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(0, high, (), generator=generator))

        row, is_cold = Row(page_size), False
        if draw(2):
            row.hit([bool(draw(3)) for _ in range(draw(6))])
        while row.computed < (NUM_PAGES - 6) * page_size:
            is_cold = is_cold if draw(8) else not is_cold
            first, num_new = row.computed, 1 + draw(5 if draw(4) else 3 * page_size)
            left = row.step(num_new, draw(min(num_new, 3)), is_cold=is_cold)
            assert all(whole for whole, marked in zip(row.whole(), row.marks(), strict=True) if marked), seed
            seen["drafted"] += sum(row.marks())
            seen["not drafted"] += len(row.marks()) - sum(row.marks())
            if left is None:
                continue
            own = first // page_size
            start = (first + num_new) // page_size - (int(left.kv_lens) - 1) // page_size
            entries = left.page_table[0, : own - start].tolist()
            assert entries == [LAST - entry for entry in range(start, own)], seed
            assert all(row.marks()[start:own]), f"seed {seed}: attends over pages {start} to {own} of {row.marks()}"
            seen["whole window"] += start < own
            seen["begins late"] += start > 0
    print(seen)
    assert min(seen.values()) > 20


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_head_that_was_cold_has_drafted_the_next_page_that_it_computes_whole(page_size: int) -> None:
    for resumed in range(page_size + 1):
        row = Row(page_size)
        row.step(page_size, 0, is_cold=False)
        row.step(page_size, 0, is_cold=True)
        for _ in range(resumed):
            row.step(1, 0, is_cold=True)
        for _ in range(3 * page_size):
            row.step(1, 0, is_cold=False)
        first_whole = 2 + -(-resumed // page_size)
        assert row.marks() == [True, *[False] * (first_whole - 1), *[True] * (len(row.marks()) - first_whole)]
        assert row.progress.start_page[1] == first_whole


def test_a_hit_goes_on_behind_the_last_page_that_is_not_drafted() -> None:
    for marks, start in (([True] * 3, 0), ([True, False, True, True], 2), ([True, False], 2), ([], 0)):
        row = Row(4)
        row.hit(marks)
        row.step(5, 0, is_cold=False)
        assert row.progress.start_page[1] == start
        assert row.marks() == [*marks, True]


def test_rows_that_failed_the_check_change_nothing() -> None:
    row = Row(4)
    row.hit([True, True])
    row.step(3, 0, is_cold=False)
    before = [each.clone() for each in (row.progress.is_drafted, row.progress.start_page, row.progress.taken_len)]
    rows, illegal = torch.tensor([1]), torch.tensor([False])
    table, indptr, each = (
        torch.zeros((1, NUM_PAGES), dtype=torch.int32),
        torch.tensor([0, 5]),
        torch.zeros(6, dtype=torch.int64),
    )
    nothing = torch.zeros((5, 0))
    shown = StepHiddenStates(nothing, nothing, nothing, rows, torch.tensor([99]), each, each, illegal, indptr, table, 4)
    twins.note_drafted(shown, row.state, row.progress)
    after = (row.progress.is_drafted, row.progress.start_page, row.progress.taken_len)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))
