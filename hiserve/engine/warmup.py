"""Runs at start, once each, what steps without a graph may need compiled: else a request would wait for the compiler."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from hiserve.core.plan import BatchPlan, Int32Array, RowAdmit
from hiserve.core.request import SamplingParams
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import Action, Decision, Reason
from hiserve.sampling.params import Drawing

logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of rows that attention takes as short ones, in any group of query heads: each next power of two once."""
MANY = 32
"""Rows of one token: a product with the output layer's weights has another kernel for so many rows than for few."""
LONG = 2 * WIDTHS[-1]
"""Tokens of a row that is never short, in which drafts are not either."""

_NUM_FIRST = 2  # shapes of steps that tell whether any kernel has to be compiled

_DRAWINGS = {
    Drawing.GREEDY: SamplingParams(seed=0, temperature=0.0),
    Drawing.FREE: SamplingParams(seed=0, temperature=1.0),
}


class _WarmupRow(NamedTuple):
    """One row of a step.

    Attributes:
        known: Tokens to compute that are no drafts.
        num_draft: Drafts to verify.
        max_len: Upper bound of its length; None is that of a row without a prefix.
    """

    known: int
    num_draft: int = 0
    max_len: int | None = None

    @property
    def num_new(self) -> int:
        """Tokens to compute."""
        return self.known + self.num_draft


def warm_up_steps(
    runners: Dispatch, rows: DeviceRows, *, max_batched_tokens: int, num_draft: int = 0, most: int | None = None
) -> int:
    """Runs small steps eagerly: rows of every width and of several, with drafts and without, few and longer ones.

    Their rows have no pages: all that they store goes to the sink, and afterwards they have forgotten it, as such rows do.

    Args:
        runners: Of the device.
        rows: Nobody has one yet; nobody has one afterwards.
        max_batched_tokens: Tokens of the largest step.
        num_draft: Drafts of a row, at most.
        most: Shapes of steps, the smallest ones first; None is all.

    Returns:
        How many steps there were.
    """
    num_steps, max_rows = 0, rows.page_table.shape[0] - 1
    with torch.inference_mode():
        for step, num_propose in islice(_steps(rows.max_len, num_draft), most):
            step = step[:max_rows]
            num_new = [row.num_new for row in step]
            if sum(num_new) > max_batched_tokens or max(num_new) >= rows.max_len:
                continue
            cells = [(row.known, row.num_draft, row.max_len or row.num_new) for row in step]
            known, drafts, bounds = np.array(cells, dtype=np.int32).T
            for drawing, sampling in _DRAWINGS.items():
                plan = plan_without_pages(known, drafts, bounds, num_propose, sampling)
                rows.apply(plan)
                launched_step = runners.run(plan, Decision(Action.EAGER, Reason.GRAPHS_OFF, sampling=drawing.value))
                runners.propose(plan, launched_step)
                num_steps += 1
    return num_steps


def compile_steps(
    runners: Dispatch, rows: DeviceRows, *, num_threads: int, max_batched_tokens: int, num_draft: int = 0
) -> None:
    """Compiles, side by side, the Triton kernels of small steps; graphs consist of the same ones.

    Where the first steps find all of theirs in Triton's cache, that is all: this machine has had such a start before. It
    saves time, and no more: where it fails, that is told, and kernels are compiled one by one as they are launched.

    Args:
        runners: Of a CUDA device.
        rows: Nobody has one yet; nobody has one afterwards.
        num_threads: For compilers.
        max_batched_tokens: Tokens of the largest step.
        num_draft: Drafts of a row, at most.
    """
    # Found by name: triton is not installed everywhere.
    ahead = import_module("hiserve.kernels.ahead")
    begin = time.perf_counter()
    try:
        for most in (_NUM_FIRST, None):
            with ahead.compiled_side_by_side(num_threads) as compiled:
                warm_up_steps(runners, rows, max_batched_tokens=max_batched_tokens, num_draft=num_draft, most=most)
            if not compiled:
                break
    except Exception as error:  # noqa: BLE001 - whatever it is, the start goes on as without it
        logger.warning("kernels are compiled one by one, as they are launched: %s", error)
    with torch.inference_mode():
        rows.forget()  # no kernel has done it
    logger.info("compiled kernels in %.1f s", time.perf_counter() - begin)


def _steps(max_len: int, num_draft: int) -> Iterator[tuple[list[_WarmupRow], int]]:
    """The rows of each step, and the drafts to propose behind it."""
    for width in WIDTHS:
        yield [_WarmupRow(width)], num_draft
        yield [_WarmupRow(width), _WarmupRow(1)], 0
    yield [_WarmupRow(1)] * MANY, 0
    for drafts in range(1, num_draft + 1):
        yield [_WarmupRow(1, drafts, max_len), _WarmupRow(1, 0, max_len)], drafts
    # Rows with a prefix, or those besides some without, whose keys are split among programs if they may be many.
    for bound in (LONG + 1, max_len):
        yield [_WarmupRow(LONG, 0, bound)], num_draft
        yield [_WarmupRow(LONG), _WarmupRow(LONG, 0, bound)], num_draft


def plan_without_pages(
    known: Int32Array, num_draft: Int32Array, max_len: Int32Array, num_propose: int, sampling: SamplingParams
) -> BatchPlan:
    """A step of rows that are admitted with it and have no pages: what they store goes to the sink.

    Args:
        known: int32 ``[B]``. Tokens of each row, all of which it computes.
        num_draft: int32 ``[B]``. Drafts to verify behind them.
        max_len: int32 ``[B]``. Upper bounds of the rows' lengths.
        num_propose: Drafts to propose behind the step.
        sampling: Of all rows.
    """
    numbers = np.arange(1, known.size + 1, dtype=np.int32)
    return BatchPlan(
        step_id=0,
        rows=numbers,
        num_new=known + num_draft,
        num_draft=num_draft,
        samples=np.ones(known.size, dtype=np.bool_),
        num_scored=np.zeros_like(known),
        max_len=max_len,
        num_propose=num_propose,
        admit=tuple(
            RowAdmit(row, np.zeros(count, dtype=np.int32), count, 0, sampling)
            for row, count in zip(numbers.tolist(), known.tolist(), strict=True)
        ),
    )
