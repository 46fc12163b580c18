"""Random steps that have been recorded, of whose tokens a head computes its part; and rows that repeat themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hiserve.core.drafts import DraftLayout
from hiserve.kernels import step_reference
from hiserve.kernels.draft_ops import DraftProgress, StepHiddenStates
from hiserve.kernels.step_ops import RowTensors
from tests.helpers.step_cases import STALE, random_case

NUM_FEATURES = 3


@dataclass(frozen=True, slots=True, eq=False)
class DraftCase:
    """B rows and their draft tokens; what a step of these rows computed; the rows after it."""

    rows: Tensor
    first: Tensor
    num: Tensor
    legal: Tensor
    token_rows: Tensor
    offsets: Tensor
    qo_indptr: Tensor
    features: Tensor
    last: Tensor
    page_hidden: Tensor
    progress: DraftProgress
    state: RowTensors
    page_size: int
    width: int

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, DraftLayout]:
        """What ``draft_inputs`` takes first."""
        q_lens = self.num.to(torch.int32)
        qo_indptr = torch.cat((q_lens.new_zeros(1), q_lens.cumsum(0, dtype=torch.int32)))
        lengths = q_lens.cpu().numpy()
        layout = DraftLayout(
            num_tokens=self.num,
            token_rows=self.token_rows,
            offsets=self.offsets,
            qo_indptr=qo_indptr,
            step_indptr=self.qo_indptr,
            q_lens=lengths,
            kv_bounds=lengths,
            max_kv_len=self.width * self.page_size,
            num_decode=len(self.num),
        )
        return self.rows, self.first, self.legal, layout

    def step_hidden_states(self, page_table: Tensor) -> StepHiddenStates:
        """What ``draft_hidden_states`` and ``keep_hidden_states`` take; what they keep is copied."""
        return StepHiddenStates(
            self.features,
            self.last.clone(),
            self.page_hidden.clone(),
            self.rows,
            self.first,
            self.token_rows,
            self.offsets,
            self.legal,
            self.qo_indptr,
            page_table,
            self.page_size,
        )

    def old_progress(self) -> DraftProgress:
        """What was drafted before the step; a copy, its marks as far apart as those of pages."""
        marks = self.progress.is_drafted[:, None].repeat(1, 3)[:, 0]
        return DraftProgress(marks, self.progress.start_page.clone(), self.progress.taken_len.clone())

    def drafting(self, index: int) -> DraftCase:
        """The forward of one draft of each row, the ``index``-th."""
        each_row = torch.arange(len(self.rows))
        return DraftCase(
            rows=self.rows,
            first=self.state.known_len[self.rows] - 1 + index,
            num=torch.ones_like(self.num),
            legal=self.legal,
            token_rows=each_row,
            offsets=torch.zeros_like(each_row),
            qo_indptr=torch.arange(len(each_row) + 1, dtype=torch.int32),
            features=self.features,
            last=self.last,
            page_hidden=self.page_hidden,
            progress=self.progress,
            state=self.state,
            page_size=self.page_size,
            width=self.width,
        )

    def outputs(self, ops: Any) -> list[Tensor]:
        """What the kernels, or their twins, make of it: inputs, kept hidden states, progress, and what is left to draft."""
        made = ops.draft_inputs(*self.columns, self.state, page_size=self.page_size, width=self.width)
        tensors = [made.kv_lens, made.page_table, made.input_ids, made.positions, made.slots]
        progress = self.old_progress()
        if self.features.shape[0] + len(self.rows) == len(self.token_rows):
            arguments = self.step_hidden_states(made.page_table)
            tensors.append(ops.draft_hidden_states(arguments))
            ops.keep_hidden_states(arguments, self.state)
            tensors += [arguments.last, arguments.page_hidden]
            ops.note_drafted(arguments, self.state, progress)
            tensors += [getattr(progress, each.name) for each in fields(progress)]
        left = ops.draft_window(self.rows, self.first, self.legal, made, progress, page_size=self.page_size)
        is_used = torch.arange(self.width, device=left.kv_lens.device) * self.page_size < left.kv_lens[:, None]
        return [*tensors, left.kv_lens, left.page_table * is_used]


def draft_case(generator: torch.Generator) -> DraftCase:
    """The rows of a step after it, the same rows legal; since then a page may have changed hands."""
    step = random_case(generator)
    made, state = step.unfilled(), step.state
    first = state.computed_len[made.rows]
    step_reference.fill_inputs(made, state, page_size=step.page_size)
    counts = step_reference.accept(step.drawn, step.sampling_rows, step.sampling_drafts, state)
    step_reference.advance(made, step.drawn, counts, state)
    _spoil(generator, state)
    num_pages, num_tokens = len(state.page_owner), len(made.offsets)
    num = made.num_new + 1
    token_rows = torch.arange(len(num)).repeat_interleave(num)
    kept = torch.randn(len(state.tokens) + num_pages, NUM_FEATURES, generator=generator)
    kept[0] = kept[len(state.tokens)] = 0  # row 0 and the sink keep nothing
    num_rows = len(state.tokens)
    taken_len = torch.zeros(num_rows, dtype=torch.int64).index_copy_(0, made.rows, first)
    taken_len[0] = 0
    progress = DraftProgress(
        is_drafted=(torch.rand(num_pages, generator=generator) < 0.7).float(),
        start_page=torch.randint(0, 3, (num_rows,), generator=generator),
        taken_len=torch.where(torch.rand(num_rows, generator=generator) < 0.5, taken_len, 0),
    )
    progress.is_drafted[0] = progress.start_page[0] = 0
    return DraftCase(
        rows=made.rows,
        first=torch.where(made.legal, first, STALE),
        num=num,
        legal=made.legal,
        token_rows=token_rows,
        offsets=torch.cat([torch.arange(each) for each in num.tolist()]),
        qo_indptr=torch.cat((torch.zeros(1), made.num_new.cumsum(0))).to(torch.int32),
        features=torch.randn(num_tokens, 2 * NUM_FEATURES, generator=generator)[:, :NUM_FEATURES],
        last=kept[: len(state.tokens)],
        page_hidden=kept[len(state.tokens) :],
        progress=progress,
        state=state,
        page_size=step.page_size,
        width=step.width,
    )


def _spoil(generator: torch.Generator, state: RowTensors) -> None:
    """Lets a few pages belong to others, and now and then an entry be none."""
    num_pages = len(state.page_owner)
    pages = torch.randint(1, num_pages, (2,), generator=generator)
    state.page_owner[pages] += 1
    row = int(torch.randint(1, len(state.tokens), (), generator=generator))
    wrong = (-2, num_pages, 1_000_000)[int(torch.randint(0, 3, (), generator=generator))]
    state.page_table[row, int(torch.randint(0, state.page_table.shape[1], (), generator=generator))] = wrong


def own_pages(case: DraftCase, number: int) -> list[int]:
    """The pages of a row, entry by entry; the sink for what is not its own."""
    state, row = case.state, int(case.rows[number])
    pages = []
    for entry in range(case.width):
        page = int(state.page_table[row, entry])
        is_page = bool(case.legal[number]) and 0 <= page < len(state.page_owner)
        pages.append(page if is_page and state.page_owner[page] == state.entry_owner[row, entry] else 0)
    return pages


def repeating_state(generator: torch.Generator, row_len: int, known_lens: list[int], num_ids: int) -> RowTensors:
    """Rows of few different tokens, row 0 first; behind what they know stands something else, at each place another."""
    num_rows = len(known_lens)
    tokens = torch.randint(1, num_ids + 1, (num_rows, row_len), generator=generator, dtype=torch.int32)
    known_len = torch.tensor(known_lens)
    places = torch.arange(row_len, dtype=torch.int32)
    tokens = torch.where(places < known_len[:, None], tokens, STALE - places)
    tokens[0] = 0
    table = torch.zeros((num_rows, 1), dtype=torch.int32)
    return RowTensors(tokens, torch.zeros(num_rows, dtype=torch.int64), known_len, table, table, table[0])


def looked_up(known: list[int], num_draft: int, min_ngram: int, max_ngram: int) -> list[int]:
    """What followed a text's last tokens where they stood before."""
    if not known:
        return []
    followed = known[-1:]
    for end in _ends_before(known, min_ngram, max_ngram):
        followed = known[end:]
        break
    return [followed[index % len(followed)] for index in range(num_draft)]


def continuations_of(generator: torch.Generator, rows: Tensor, state: RowTensors, num_following: int) -> Tensor:
    """Continuations that most rows have followed until now; a part have not, or none. Tokens from 1000 on come from them alone."""
    found = torch.full((rows.shape[0], 2 + num_following), 1000, dtype=torch.int32)
    for index, row in enumerate(rows.tolist()):
        known = int(state.known_len[row])
        num_since, agreed, spoiled = torch.randint(0, 6, (3,), generator=generator).tolist()
        begin = max(0, known - num_since + 1)  # at times it begins after the row's end
        found[index, 0], found[index, 1] = begin, agreed
        got = state.tokens[row, begin:known][:num_following]
        found[index, 2 : 2 + got.shape[0]] = got
        if spoiled < 2 and num_following:
            found[index, 2 + (spoiled + num_since) % num_following] = 1001
    return found


def drafts_after(
    known: list[int], continuation: list[int], num_draft: int, min_ngram: int, max_ngram: int
) -> list[int]:
    """As ``looked_up``, or what is left of a continuation if the text follows it and more tokens agree."""
    begin, agreed, *following = continuation
    drafts = looked_up(known, num_draft, min_ngram, max_ngram)
    ends = _ends_before(known, min_ngram, max_ngram)
    own = max(
        (size for size in range(1, max_ngram + 1) if ends and known[-size:] == known[: ends[0]][-size:]), default=0
    )
    since = known[begin:]
    is_followed = agreed > 0 and begin <= len(known) and following[: len(since)] == since
    if known and is_followed and agreed + len(since) > own:
        left = following[len(since) :][:num_draft]
        drafts[: len(left)] = left
    return drafts


def _ends_before(known: list[int], min_ngram: int, max_ngram: int) -> list[int]:
    """Where the longest end of a text that it has twice ended before, the latest place first."""
    for size in range(max_ngram, min_ngram - 1, -1):
        found = [end for end in range(len(known) - 1, size - 1, -1) if known[end - size : end] == known[-size:]]
        if found:
            return found
    return []
