"""Random steps over random rows, right and wrong, and in plain Python what becomes of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs, StateRows
from hiserve.kernels.step_ops import RowTensors, StateTensors, StepInputs, TreeTensors, WindowTensors

NUM_ROWS, STALE = 7, -7


@dataclass(frozen=True, slots=True, eq=False)
class StepCase:
    """A step: the plan, the rows before it, and what a model would draw."""

    inputs: StepInputs
    state: RowTensors
    drawn: Tensor
    page_size: int
    width: int

    @property
    def sampling_rows(self) -> Tensor:
        return self.inputs.rows[self.inputs.sampling]

    @property
    def sampling_drafts(self) -> Tensor:
        return self.inputs.num_draft[self.inputs.sampling]

    def unfilled(self, *, is_stale: bool = False) -> StepInputs:
        """Room for the inputs: new, or a graph's with what an earlier step left in it."""
        forward, value = self.inputs.forward, STALE if is_stale else 0
        rooms = {name: torch.full_like(room, value) for name, room in _rooms(forward).items()}
        legal = torch.ones_like(self.inputs.legal)
        if forward.state is not None:
            rooms["state"] = changed(forward.state, lambda room: torch.full_like(room, value))
        return replace(self.inputs, legal=legal, forward=replace(forward, **rooms))


def filled(inputs: StepInputs) -> dict[str, Tensor]:
    """What ``fill_inputs`` writes."""
    state = inputs.forward.state
    return {"legal": inputs.legal} | _rooms(inputs.forward) | ({} if state is None else tensors_of(state))


def _rooms(forward: ForwardInputs) -> dict[str, Tensor]:
    names = ("kv_lens", "page_table", "input_ids", "positions", "slots", "window_table", "window_slots", "tree_mask")
    values = {name: getattr(forward, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def copied(state: RowTensors) -> RowTensors:
    made: RowTensors = changed(state, torch.clone)
    return made


def changed(tensors: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a dataclass with each tensor changed, those of a part too; other values, None among them, stay."""
    values = {each.name: getattr(tensors, each.name) for each in fields(tensors)}
    new = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
    parts = {name: changed(value, change) for name, value in values.items() if is_dataclass(value)}
    return replace(tensors, **new, **parts)


def tensors_of(state: RowTensors | StateRows | StateTensors) -> dict[str, Tensor]:
    """Its own tensors, by name, and those of carried states."""
    if isinstance(state, RowTensors) and state.states is not None:
        return tensors_of(replace(state, states=None)) | tensors_of(state.states)
    values = {each.name: getattr(state, each.name) for each in fields(state)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def random_case(generator: torch.Generator) -> StepCase:
    """Rows 1 to 6 hold requests, some at their last token; one fault in about every third. Half of the cases have windows, and
    half of them states."""

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    page_size = (1, 4, 16)[pick(0, 2)]
    num_entries = pick(2, 6)
    capacity = num_entries * page_size - (pick(0, page_size - 1) if page_size > 1 else 0)
    state = _random_state(generator, capacity, num_entries)
    rows, columns = [], []
    for row in torch.randperm(NUM_ROWS - 1, generator=generator).add(1).tolist()[: pick(1, NUM_ROWS - 1)]:
        edge = page_size * pick(0, num_entries) + pick(-1, 1)
        known = min(max(edge, 1), capacity)
        computed = pick(0, known - 1) if pick(0, 1) else known - 1
        samples, num_draft = bool(pick(0, 3)), 0
        if samples:
            num_draft = max(0, min(pick(0, 3), capacity - known - pick(0, 1)))
        num_new = known + num_draft - computed if samples else pick(1, known - computed)
        max_len = min(computed + num_new + pick(0, 3), capacity)
        state.computed_len[row], state.known_len[row] = computed, known
        fault, entry = pick(0, 17), pick(0, (computed + num_new - 1) // page_size)
        is_spare = (computed + num_new - 1) // page_size < num_entries - 1
        if fault == 3 and num_new > 1:
            num_new -= 1
        elif fault == 4 and computed + num_new < capacity:
            num_new, max_len = num_new + 1, min(max_len + 1, capacity)
        elif fault == 5:
            max_len = max(num_new, max_len - pick(1, 4))
        elif fault == 6:
            state.page_table[row, entry] = (-2, len(state.page_owner), 1_000_000)[pick(0, 2)]
        elif fault == 8 and is_spare:
            state.page_table[row, -1] = 1_000_000  # not in use: no fault
        else:
            _spoil(state, row, entry, computed, page_size, fault)
        rows.append(row)
        columns.append((row, num_new, num_draft, samples, max_len))
    for _ in range(pick(0, 3)):
        columns.append((0, pick(1, 2), 0, bool(pick(0, 1)), 2))
    if pick(0, 1):
        state = replace(state, windows=_random_windows(generator, state, pick(1, 2 * page_size + 1), page_size))
    if pick(0, 1):
        states = torch.randint(1, 99, (3, NUM_ROWS), generator=generator)
        states[0] = torch.minimum(states[0], state.computed_len.clamp(min=0))
        state = replace(state, states=StateTensors(*states))
    return _case(generator, state, columns, page_size)


def with_trees(generator: torch.Generator, case: StepCase, num_nodes: int = 6) -> StepCase | None:
    """The same step where drafts are random trees, of fewer nodes than rows have room for; None if a row drafts inside its prompt."""
    inputs = case.inputs
    if ((inputs.num_draft > 0) & (inputs.num_new != inputs.num_draft + 1)).any() or case.drawn.shape[1] > num_nodes:
        return None
    masks = torch.zeros((NUM_ROWS, num_nodes), dtype=torch.int64)
    for row, node in product(range(NUM_ROWS), range(num_nodes)):
        parent = int(torch.randint(max(node, 1), (), generator=generator))
        masks[row, node] = 1 << node | int(masks[row, parent])
    path = torch.zeros((len(inputs.sampling), num_nodes), dtype=torch.int64)
    forward = replace(inputs.forward, tree_mask=torch.zeros_like(inputs.forward.slots))
    return replace(
        case,
        inputs=replace(inputs, forward=forward, path=path),
        state=replace(case.state, trees=TreeTensors(masks, torch.zeros(len(masks), dtype=torch.bool), num_nodes - 1)),
    )


def _spoil(state: RowTensors, row: int, entry: int, computed: int, page_size: int, fault: int) -> None:
    if fault == 0:
        state.page_owner[state.page_table[row, entry]] += 1
    elif fault == 1:
        state.entry_owner[row, entry] += 1
    elif fault == 2 and computed:
        last = (computed - 1) // page_size
        state.page_table[row, last], state.entry_owner[row, last] = 0, state.page_owner[0]
    elif fault == 7:
        state.computed_len[row] = -1 - computed


def _random_state(generator: torch.Generator, capacity: int, num_entries: int) -> RowTensors:
    num_pages = NUM_ROWS * num_entries + 1
    pages = torch.randperm(num_pages - 1, generator=generator).add(1)[: NUM_ROWS * num_entries]
    page_table = pages.view(NUM_ROWS, num_entries).to(torch.int32)
    page_table[0] = 0
    page_owner = torch.randint(1, 9, (num_pages,), generator=generator, dtype=torch.int32)
    entry_owner = page_owner[page_table.long()]
    entry_owner[0] = -1
    state = RowTensors(
        tokens=torch.randint(0, 2, (NUM_ROWS, capacity), generator=generator, dtype=torch.int32),
        computed_len=torch.zeros(NUM_ROWS, dtype=torch.int64),
        known_len=torch.zeros(NUM_ROWS, dtype=torch.int64),
        page_table=page_table,
        entry_owner=entry_owner,
        page_owner=page_owner,
    )
    state.tokens[0] = 0
    return state


def _random_windows(generator: torch.Generator, state: RowTensors, size: int, page_size: int) -> WindowTensors:
    """Tables whose entries below the windows are no pages, and a fault in every eighth row."""
    its = _random_state(generator, *state.page_table.shape)
    others = torch.randint(1, 9, (NUM_ROWS,), generator=generator, dtype=torch.int32)  # pages that the other pool lacks
    windows = WindowTensors(its.page_table, its.entry_owner, torch.cat((its.page_owner, others)), size)
    num_entries = windows.table.shape[1]
    for row in range(1, NUM_ROWS):
        fault, entry = (
            torch.randint(0, 24, (), generator=generator),
            torch.randint(num_entries, (), generator=generator),
        )
        if fault == 0:
            windows.page_owner[windows.table[row, entry]] += 1
        elif fault == 1:
            windows.entry_owner[row, entry] += 1
        elif fault == 2:
            windows.table[row, entry] = 1_000_000
        elif fault < 12:  # none
            windows.table[row, entry] = page = len(its.page_owner) + row
            windows.entry_owner[row, entry] = windows.page_owner[page]
        seen = max(0, int(state.computed_len[row]) - size + 1)
        windows.table[row, : seen // page_size] = 1_000_000
    return windows


def _case(
    generator: torch.Generator, state: RowTensors, columns: list[tuple[int, int, int, bool, int]], page_size: int
) -> StepCase:
    rows, num_new, num_draft, samples, max_len = zip(*columns, strict=True)
    token_rows = torch.arange(len(rows)).repeat_interleave(torch.tensor(num_new))
    sampling = torch.tensor(samples).nonzero()[:, 0]
    width = max(num_draft) + 1 + int(torch.randint(0, 2, (), generator=generator))
    drawn = torch.randint(0, 2, (len(sampling), width), generator=generator)
    lens, tables = torch.tensor(num_new), state.page_table.shape[1]
    table_width = int(torch.randint(-(-max(max_len) // page_size), tables + 1, (), generator=generator))
    num_tokens = int(lens.sum())
    none = torch.zeros(num_tokens, dtype=torch.int64)
    forward = ForwardInputs(
        input_ids=none.to(torch.int32),
        positions=none.clone(),
        slots=none.clone(),
        token_rows=token_rows,
        qo_indptr=torch.cat((torch.zeros(1), lens.cumsum(0))).to(torch.int32),
        kv_lens=torch.zeros_like(lens),
        page_table=torch.zeros((len(rows), table_width), dtype=torch.int32),
        logits_rows=none[:0],
        q_lens=lens.int().numpy(),
        kv_bounds=torch.tensor(max_len).int().numpy(),
        max_kv_len=max(max_len),
    )
    if state.windows is not None:
        forward = replace(forward, window_table=forward.page_table.clone(), window_slots=none.clone())
    if state.states is not None:
        forward = replace(forward, state=StateRows(*torch.zeros((6, len(rows)), dtype=torch.int64)))
    return StepCase(
        inputs=StepInputs(
            rows=torch.tensor(rows),
            num_new=lens,
            num_draft=torch.tensor(num_draft),
            samples=torch.tensor(samples),
            max_len=torch.tensor(max_len),
            offsets=torch.cat([torch.arange(each) for each in num_new]),
            sampling=sampling,
            width=width,
            legal=torch.zeros(len(rows), dtype=torch.bool),
            forward=forward,
        ),
        state=state,
        drawn=drawn,
        page_size=page_size,
        width=table_width,
    )


def is_legal(case: StepCase, number: int) -> bool:
    """The rules for one row of a step, one by one."""
    columns, state = case.inputs, case.state
    row, num_new = int(columns.rows[number]), int(columns.num_new[number])
    computed, known = int(state.computed_len[row]), int(state.known_len[row])
    end = computed + num_new
    if computed < 0 or end > columns.max_len[number]:
        return False
    pages, owners = state.page_table[row].tolist(), state.entry_owner[row].tolist()
    for position in range(end):
        entry = position // case.page_size
        if not 0 <= pages[entry] < len(state.page_owner) or state.page_owner[pages[entry]] != owners[entry]:
            return False
    if computed and pages[(computed - 1) // case.page_size] == 0:
        return False
    if (windows := state.windows) is not None:
        for position in range(max(0, computed - windows.size + 1), end):
            page, owner = (int(each[row, position // case.page_size]) for each in (windows.table, windows.entry_owner))
            if not 0 <= page < len(windows.page_owner) or windows.page_owner[page] != owner:
                return False
    if columns.samples[number]:
        return end - int(columns.num_draft[number]) == known and end < state.tokens.shape[1]
    return end <= known


def num_emitted(case: StepCase, which: int) -> int:
    """Tokens that the ``which``-th sampling row emits, were it legal."""
    row = int(case.sampling_rows[which])
    first = int(case.state.known_len[row])
    count = 1
    for draft in range(int(case.sampling_drafts[which])):
        if case.state.tokens[row, first + draft] != case.drawn[which, draft]:
            break
        count += 1
    return count
