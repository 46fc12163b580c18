"""A debug mode: each slot stores its token and position, and a row verifies a prefix before it reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs, LayerKV
from hiserve.core.plan import BatchPlan
from hiserve.errors import InvariantError
from hiserve.kernels.step_ops import StepInputs
from hiserve.runners.device_rows import DeviceRows


class Canary:
    """Writes token and position beside the keys and values of each slot, and verifies prefixes from the cache.

    Both lie in a group of the page (``core.kv_groups.CANARY``), so they move through every tier with it. A row's
    prefix is verified through its own page table, as a whole: each of its slots must hold the row's token of that
    position.

    Reads back from the device: the checks wait for it.

    Args:
        layer: The group's one layer; of a slot, ``k`` holds the token id and ``v`` the position.
    """

    def __init__(self, rows: DeviceRows, layer: LayerKV) -> None:
        self._rows = rows
        self._tokens, self._positions = layer.k.view(-1), layer.v.view(-1)
        self._due: set[int] = set()

    def note(self, plan: BatchPlan) -> None:
        """Records the rows of an applied plan that get pages of tokens that they did not compute."""
        table = plan.table
        if table.rows.size:
            computed_len = self._rows.computed_len.cpu().numpy()
            is_filled = table.indices * self._rows.page_size < computed_len[table.rows]
            self._due.update(table.rows[is_filled].tolist())

    def verify(self, plan: BatchPlan, inputs: StepInputs) -> None:
        """Checks the unchecked prefixes that a step reads, before it reads them.

        Raises:
            InvariantError: A slot of a row has another token or position.
        """
        due = [row for row in plan.rows[inputs.legal.cpu().numpy()].tolist() if row in self._due]
        for row in due:
            self._verify(row)
        self._due.difference_update(due)

    def write(self, forward: ForwardInputs) -> None:
        """Marks the slots that a step writes."""
        self._tokens.index_copy_(0, forward.slots, forward.input_ids)
        self._positions.index_copy_(0, forward.slots, forward.positions.int())

    def _verify(self, row: int) -> None:
        rows, page_size = self._rows, self._rows.page_size
        positions = torch.arange(int(rows.computed_len[row]), device=rows.device)
        pages = rows.page_table[row].index_select(0, positions // page_size).long()
        slots = pages * page_size + positions % page_size
        expected = rows.tokens[row, : positions.numel()]
        tokens, places = self._tokens[slots], self._positions[slots]
        wrong = (tokens != expected) | (places != positions)
        if wrong.any():
            raise InvariantError(_describe(row, int(wrong.nonzero()[0]), pages, tokens, places, expected))


def _describe(row: int, at: int, pages: Tensor, tokens: Tensor, places: Tensor, expected: Tensor) -> str:
    return (
        f"row {row}, page {int(pages[at])}: position {at} holds token {int(tokens[at])} of position {int(places[at])}, "
        f"not token {int(expected[at])}"
    )
