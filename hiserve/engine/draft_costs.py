"""Measures at start the times of steps with drafts, for the controller that chooses their number."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hiserve.cache.storage.device import DevicePool
from hiserve.config.settings import MAX_TREE_NODES, Settings, TreeShape
from hiserve.core.plan import BatchPlan, RowAdmit, TableWrites
from hiserve.core.request import SamplingParams
from hiserve.core.startup_measurements import FloatArray, StepCosts
from hiserve.engine.executing_half import LoadedHalf
from hiserve.errors import ConfigError
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import PendingLoads, admit

REPEATS = 2  # of which the fastest counts; one more comes first
CPU_REPEATS = 1  # likewise; steps on a CPU are long
CONTEXT, LONG_CONTEXT = 64, 1024  # tokens stored of each row
SEED = 5  # of the tokens
MAX_LONG_ROWS = 4  # on a CPU, where the time of stored tokens grows with each row


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Times of the parts of a step."""

    verify: float
    drafts: float


class DraftTimer:
    """Times steps and their drafts, on free rows and free pages; the runners have a proposer.

    Args:
        pool: Its first pages are cleared first: they hold what the memory held before, and with NaN there all rows would choose
            the same experts.
        vocab_size: Tokens are drawn below it, each row its own: with one token for all, all would choose the same experts,
            and reading those of more tokens would seem to cost nothing.
    """

    def __init__(self, runners: Dispatch, rows: DeviceRows, pool: DevicePool, vocab_size: int) -> None:
        self._runners = runners
        self._rows = rows
        self._pool = pool
        size = rows.state.tokens.shape[0], LONG_CONTEXT + MAX_TREE_NODES
        self._tokens = np.random.default_rng(SEED).integers(vocab_size, size=size, dtype=np.int32)

    def measure(self, tiers: Sequence[int], max_rows: int, trees: Sequence[TreeShape] = ()) -> StepCosts:
        """Returns the costs of steps that verify and propose each of these numbers of drafts, ascending from 0; the last are ``trees``.

        Raises:
            ConfigError: Rows or the pool are too short to measure.
        """
        most, room = tiers[-1], min(self._rows.max_len, self._num_places())
        self._pool.clear(1 + -(-(LONG_CONTEXT + 2 * most + 2) // self._rows.page_size), 1 + max_rows)
        if room <= 2 * most + 2:
            raise ConfigError(
                f"--spec-steps auto measures {most} drafts, which takes more than {2 * most + 2} tokens of a request, but one "
                f"has at most {room}. Raise --max-model-len or --kv-pages, or set --spec-steps.",
                param="spec_steps",
            )
        if self._rows.states is not None:
            self._rows.states.rehearses = True
        try:
            return self._measure(tiers, trees, max_rows)
        finally:
            if self._rows.states is not None:
                self._rows.states.rehearses = False

    def _measure(self, tiers: Sequence[int], trees: Sequence[TreeShape], max_rows: int) -> StepCosts:
        most, chain = tiers[-1], tiers[-1 - len(trees)]
        sizes = np.unique(np.minimum((1, 4, 16, 64, 256), max_rows))
        verify, follow, draft = (
            np.empty((sizes.size, len(tiers))),
            np.empty((sizes.size, len(tiers))),
            np.empty(sizes.size),
        )
        grow = np.empty((sizes.size, len(trees)))
        timed = (0, most) if self._is_on_cpu else tiers  # a CPU's time grows evenly with the tokens
        for i, num_rows in enumerate(sizes.tolist()):
            took = [self._time(num_rows, num_draft, 1) for num_draft in timed]
            verify[i] = np.interp(tiers, timed, [each.verify for each in took])
            follow[i] = np.interp(tiers, timed, [each.drafts for each in took])
            follow[i, 0] = self._time(num_rows, 0, 0).drafts  # where no draft is wanted the head does less
            more = self._time(num_rows, chain, chain)
            draft[i] = max(0.0, more.drafts - follow[i, len(tiers) - 1 - len(trees)]) / max(1, chain - 1)
            for j, tree in enumerate(trees):
                grown = self._time(num_rows, tree.num_draft, tree.num_draft)
                grow[i, j] = max(0.0, grown.drafts - follow[i, j - len(trees)])
        by_token = self._time_stored(sizes, most, verify[:, -1], follow[:, -1])
        return StepCosts(
            rows=sizes.tolist(),
            tiers=list(tiers),
            verify=without_stalls(verify).tolist(),
            follow=without_stalls(follow).tolist(),
            draft=without_stalls(draft).tolist(),
            verify_token=max(0.0, by_token.verify),
            draft_token=max(0.0, by_token.drafts),
            tree_depths=[tree.depth for tree in trees],
            grow=without_stalls(grow).tolist(),
            times_own_drafts=self._is_on_cpu,
        )

    @property
    def _is_on_cpu(self) -> bool:
        return self._rows.device.type == "cpu"

    def _time_stored(
        self, sizes: NDArray[np.int64], num_draft: int, verify: FloatArray, follow: FloatArray
    ) -> _Seconds:
        """Returns the time added by each stored token of any row, given the times of batches (int64 ``[R]``) with few of them."""
        beyond = 2 * num_draft + 2
        context = min(LONG_CONTEXT, self._rows.max_len - beyond, self._num_places() - beyond)
        at = int(np.searchsorted(sizes, MAX_LONG_ROWS, side="right")) - 1 if self._is_on_cpu else sizes.size - 1
        stored = float(sizes[at]) * (context - CONTEXT)
        if stored <= 0:
            return _Seconds(0.0, 0.0)
        took = self._time(int(sizes[at]), num_draft, 1, context)
        return _Seconds(float(took.verify - verify[at]) / stored, float(took.drafts - follow[at]) / stored)

    def _num_places(self) -> int:
        return (self._rows.num_pages - 1) * self._rows.page_size

    def _time(self, num_rows: int, num_draft: int, num_propose: int, context: int = CONTEXT) -> _Seconds:
        """Returns the times of a step and of its drafts, on the device and in the thread that launches them."""
        repeats = CPU_REPEATS if self._is_on_cpu else REPEATS
        took = [self._once(num_rows, num_draft, num_propose, context) for _ in range(repeats + 1)][1:]
        return _Seconds(min(each.verify for each in took), min(each.drafts for each in took))

    def _once(self, num_rows: int, num_draft: int, num_propose: int, context: int) -> _Seconds:
        plan = self._plan(num_rows, num_draft, num_propose, context)
        self._rows.apply(plan)
        tokens = self._rows.state.tokens[:, : self._tokens.shape[1]]
        tokens.copy_(torch.from_numpy(self._tokens[:, : tokens.shape[1]]))  # drafts too, which no admission writes
        decision = admit(plan, PendingLoads(), self._runners.coverage, self._runners.facts(plan))
        begin = self._now()
        launched_step = self._runners.run(plan, decision)
        middle = self._now()
        self._runners.propose(plan, launched_step)
        end = self._now()
        self._rows.apply(self._plan(num_rows, num_draft, num_propose, context, is_over=True))
        return _Seconds(middle - begin, end - middle)

    def _now(self) -> float:
        """Waits for the launched work and returns the time; on a CPU the CPU time of this thread alone."""
        if self._is_on_cpu:
            return time.thread_time()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()
        return time.perf_counter()

    def _plan(
        self, num_rows: int, num_draft: int, num_propose: int, context: int, *, is_over: bool = False
    ) -> BatchPlan:
        """Returns a step in which each row verifies drafts after so many tokens; all rows share their pages."""
        rows = self._rows
        numbers = np.arange(1, num_rows + 1, dtype=np.int32)
        context = min(context, rows.max_len - 2 * num_draft - 2, self._num_places() - 2 * num_draft - 2)
        pages = np.arange(1, -(-(context + num_draft + num_propose + 1) // rows.page_size) + 1, dtype=np.int32)
        table = TableWrites(
            rows=np.repeat(numbers, pages.size),
            indices=np.tile(np.arange(pages.size, dtype=np.int32), num_rows),
            pages=np.tile(pages, num_rows),
            owners=np.tile(np.zeros_like(pages), num_rows),
        )
        each, sampling = np.ones(num_rows, dtype=np.int32), SamplingParams(seed=0, temperature=0.0)
        return BatchPlan(
            step_id=0,
            rows=numbers,
            num_new=each * (1 + num_draft),
            num_draft=each * num_draft,
            samples=each > 0,
            num_scored=0 * each,
            max_len=each * (context + num_draft),
            num_propose=num_propose,
            release=numbers if is_over else numbers[:0],
            table=TableWrites() if is_over else table,
            admit=()
            if is_over
            else tuple(
                RowAdmit(int(row), self._tokens[row, :context], context, context - 1, sampling) for row in numbers
            ),
        )


def measure_drafts(settings: Settings, runners: Dispatch, half: LoadedHalf) -> StepCosts:
    """Measures the numbers of drafts that the settings allow. Which steps run depends on the settings alone: ranks of a group run the same.

    Raises:
        ConfigError: As ``DraftTimer.measure``.
    """
    with torch.inference_mode():
        timer = DraftTimer(runners, half.rows, half.pool, half.config.vocab_size)
        return timer.measure(settings.spec.tiers, settings.scheduler.max_running_requests, settings.spec.trees)


def without_stalls(seconds: FloatArray) -> FloatArray:
    """Lowers each time to that of any larger batch or number of drafts: a stall had delayed it."""
    for axis in range(seconds.ndim):
        seconds = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis=axis), axis)
    return seconds
