"""Writes BatchPlans by hand: a planner without a cache, a budget or a queue."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hiserve.core.plan import BatchPlan, RowAdmit, TableWrites
from hiserve.core.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0)


def int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class HandPlanner:
    """Keeps each row's lengths and pages; the test says which rows compute how many tokens.

    Args:
        page_size: Tokens per page.
        num_pages: Pages of the pool, the sink included.
        shuffle_seed: Hands pages out in a random order, so that few are adjacent; None for ascending.
    """

    def __init__(self, page_size: int, num_pages: int, shuffle_seed: int | None = None) -> None:
        self.page_size = page_size
        order = np.arange(num_pages - 1, 0, -1)
        if shuffle_seed is not None:
            np.random.default_rng(shuffle_seed).shuffle(order)
        self.free: list[int] = order.tolist()
        self.pages: dict[int, list[int]] = {}
        self.owner: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.scored: dict[int, int] = {}  # leading tokens whose next token is scored
        self.step_id = 0
        self._admit: list[RowAdmit] = []
        self._release: list[int] = []
        self._writes: list[tuple[int, int, int, int]] = []
        self._num_draft: dict[int, int] = {}

    def admit(
        self,
        row: int,
        tokens: Sequence[int],
        sampling: SamplingParams = GREEDY,
        choice: int = 0,
        cached: Sequence[int] = (),
        num_prompt: int | None = None,
        restore_slot: int = 0,
    ) -> None:
        """With the next step, a row takes a request whose first pages may hold a computed prefix.

        All its tokens are prompt, unless ``num_prompt`` says how many are. Its states start from ``restore_slot``.
        """
        num_computed = len(cached) * self.page_size
        num_prompt = len(tokens) if num_prompt is None else num_prompt
        admitted = RowAdmit(row, int32(tokens), num_prompt, num_computed, sampling, choice, restore_slot)
        self._admit.append(admitted)
        self.scored[row] = num_prompt - 1 if sampling.prompt_logprobs is not None else 0
        self._writes += [(row, index, page, self.owner[page]) for index, page in enumerate(cached)]
        self.pages[row], self.computed[row], self.known[row] = list(cached), num_computed, len(tokens)

    def release(self, row: int, keep: int = 0) -> list[int]:
        """With the next step, a row is given back, and all its pages but the first ``keep``, which are returned."""
        self._release.append(row)
        pages = self.pages.pop(row)
        self.free.extend(reversed(pages[keep:]))
        del self.computed[row], self.known[row]
        return pages[:keep]

    def step(self, num_new: Mapping[int, int]) -> BatchPlan:
        """Plans a step in which each row computes some of its known tokens; those that reach the end sample."""
        self.step_id += 1
        writes, self._writes = self._writes, []
        samples, max_len, num_scored = [], [], []
        for row, count in num_new.items():
            num_scored.append(min(count, max(0, self.scored[row] - self.computed[row])))
            self.computed[row] += count
            assert self.computed[row] <= self.known[row]
            while len(self.pages[row]) * self.page_size < self.computed[row]:
                page = self.free.pop()
                self.owner[page] = self.step_id
                writes.append((row, len(self.pages[row]), page, self.step_id))
                self.pages[row].append(page)
            samples.append(self.computed[row] == self.known[row])
            self.known[row] += samples[-1]
            max_len.append(self.computed[row])
        columns = np.array(writes, dtype=np.int32).reshape(-1, 4).T
        plan = BatchPlan(
            step_id=self.step_id,
            rows=int32(list(num_new)),
            num_new=int32(list(num_new.values())),
            num_draft=np.zeros(len(num_new), dtype=np.int32),
            samples=np.array(samples, dtype=np.bool_),
            num_scored=int32(num_scored),
            max_len=int32(max_len),
            release=int32(self._release),
            admit=tuple(self._admit),
            table=TableWrites(*columns),
        )
        self._admit, self._release = [], []
        return plan

    def draft_step(self, num_draft: Mapping[int, int]) -> BatchPlan:
        """Plans a step in which each row computes its last token and so many drafts, all of which may be accepted.

        ``settle`` must tell of each row what was.
        """
        for row, count in num_draft.items():
            self.known[row] += count
        self._num_draft = dict(num_draft)
        plan = self.step({row: 1 + count for row, count in num_draft.items()})
        return dataclasses.replace(plan, num_draft=int32(list(num_draft.values())))

    def settle(self, row: int, count: int) -> None:
        """A row of the last ``draft_step`` emitted so many tokens: drafts beyond were refused."""
        self.known[row] += count - 1 - self._num_draft[row]
        self.computed[row] += count - 1 - self._num_draft[row]


def make_plan(
    rows: list[int],
    waits: tuple[int, ...] = (),
    *,
    num_new: Any = 1,
    num_draft: Any = 0,
    samples: Any = True,
    num_scored: Any = 0,
    max_len: Any = 9,
) -> BatchPlan:
    """A plan whose columns hold one value for all rows, or one for each."""

    def column(value: Any, dtype: Any = np.int32) -> np.ndarray:
        return np.broadcast_to(np.array(value, dtype=dtype), len(rows)).copy()

    return BatchPlan(
        step_id=1,
        rows=column(rows),
        num_new=column(num_new),
        num_draft=column(num_draft),
        samples=column(samples, np.bool_),
        num_scored=column(num_scored),
        max_len=column(max_len),
        waits=waits,
    )
