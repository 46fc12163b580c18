"""Start-up on a device: wait for its memory, compile and warm up kernels, measure the memory of the largest steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import islice, product
from typing import NamedTuple

import numpy as np
import torch

from hiserve.core.machine import GIB
from hiserve.core.plan import BatchPlan, Int32Array, RowAdmit
from hiserve.core.request import SamplingParams
from hiserve.errors import ResourceError
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import Action, Decision, Reason
from hiserve.sampling.params import Drawing

ENOUGH = 0.99  # of the memory that was free before the first worker
MAX_WAIT_S = 30.0
SETTLED_S = 2.0  # without more free memory: another process owns the difference
PERIOD_S = 0.05

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of rows that attention takes as short ones, in any group of query heads: each next power of two once."""
MANY = (32, 64, 128)
"""Rows of one token: a product with the output layer's weights has a kernel for each of these numbers, and others for few."""
LONG = 2 * WIDTHS[-1]
"""Tokens of a row that is never short, in which drafts are not either."""

_MANY_LONG = (4, 8, 16)  # rows of a step of many tokens
_NUM_FIRST = 2  # shapes of steps, after which it is known whether any kernel has to be compiled

_DRAWINGS = {
    Drawing.GREEDY: SamplingParams(seed=0, temperature=0.0),
    Drawing.FREE: SamplingParams(seed=0, temperature=1.0),
}
# Every step of drawing that takes memory of the size of the logits.
_COSTLY = SamplingParams(seed=0, temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20)

logger = logging.getLogger(__name__)


def await_memory(
    wanted_bytes: int, free_bytes: Callable[[], int], sleep: Callable[[float], None] = time.sleep
) -> float:
    """Waits for memory, or until no more of it comes; returns the seconds that took.

    Args:
        wanted_bytes: Free before the first worker; 0 waits for nothing.
        free_bytes: Returns the free memory of the device; 0 if unknown.
        sleep: Replaces ``time.sleep``.
    """
    most, waited_s, settled_s = free_bytes(), 0.0, 0.0
    while 0 < most < ENOUGH * wanted_bytes and waited_s < MAX_WAIT_S and settled_s < SETTLED_S:
        sleep(PERIOD_S)
        waited_s, settled_s = waited_s + PERIOD_S, settled_s + PERIOD_S
        now = free_bytes()
        if now > most:
            most, settled_s = now, 0.0
    if 0 < most < ENOUGH * wanted_bytes:
        logger.warning(
            "%.2f GiB are free on the device; before the first worker it was %.2f", most / GIB, wanted_bytes / GIB
        )
    return waited_s


class _WarmupRow(NamedTuple):
    """One row of a step."""

    known: int  # tokens to compute that are no drafts
    num_draft: int = 0  # drafts to verify
    max_len: int | None = None  # upper bound of its length; None is that of a row without a prefix

    @property
    def num_new(self) -> int:
        """Tokens to compute."""
        return self.known + self.num_draft


def warm_up_steps(
    runners: Dispatch, rows: DeviceRows, *, max_batched_tokens: int, num_draft: int = 0, most: int | None = None
) -> int:
    """Runs small steps eagerly: rows of every width and of several, with drafts and without, few and longer ones.

    All rows are free, before and afterwards; in the steps they have no pages and write to the padding page. ``most``
    limits the shapes of steps, the smallest ones first; None is all. Returns the number of steps.
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
            # Draws with masks are other kernels; outside of steps with grammars all rows are free.
            ways = (False, True) if not num_steps else (False,)
            for (drawing, sampling), is_masked in product(_DRAWINGS.items(), ways):
                plan = plan_without_pages(known, drafts, bounds, num_propose, sampling)
                rows.apply(plan)
                decision = Decision(Action.EAGER, Reason.GRAPHS_OFF, sampling=drawing.value)
                launched_step = runners.run(plan, decision, is_masked=is_masked)
                runners.propose(plan, launched_step)
                num_steps += 1
    return num_steps


def compile_steps(
    runners: Dispatch, rows: DeviceRows, *, num_threads: int, max_batched_tokens: int, num_draft: int = 0
) -> None:
    """Compiles, side by side, the Triton kernels of small steps; graphs consist of the same ones.

    If the first steps find all kernels in Triton's cache, nothing else is compiled: an earlier start has done it. A
    failure costs time alone: a warning is logged, and kernels are compiled one by one at their first launch. All rows
    are free, before and afterwards.
    """
    # By name: triton is not installed everywhere.
    ahead = import_module("hiserve.kernels.ahead")
    begin = time.perf_counter()
    try:
        for most in (_NUM_FIRST, None):
            with ahead.compiled_side_by_side(num_threads) as compiled:
                warm_up_steps(runners, rows, max_batched_tokens=max_batched_tokens, num_draft=num_draft, most=most)
            if not compiled:
                break
    except Exception as error:  # noqa: BLE001 - the start goes on without it
        logger.warning("kernels are compiled one by one, as they are launched: %s", error)
    with torch.inference_mode():
        rows.forget()  # the dry run has launched no kernel that does
    logger.info("compiled kernels in %.1f s", time.perf_counter() - begin)


def _steps(max_len: int, num_draft: int) -> Iterator[tuple[list[_WarmupRow], int]]:
    """Yields the rows of each step, and the drafts to propose after it."""
    for width in WIDTHS:
        yield [_WarmupRow(width)], num_draft
        yield [_WarmupRow(width), _WarmupRow(1)], 0
    for count in MANY:
        yield [_WarmupRow(1)] * count, 0
    for drafts in range(1, num_draft + 1):
        yield [_WarmupRow(1, drafts, max_len), _WarmupRow(1, 0, max_len)], drafts
        yield [_WarmupRow(1, drafts, max_len)] * MANY[0], drafts
    # Rows with a prefix, or those besides some without, whose keys are split among programs if they may be many.
    for bound in (LONG + 1, max_len):
        yield [_WarmupRow(LONG, 0, bound)], num_draft
        yield [_WarmupRow(LONG), _WarmupRow(LONG, 0, bound)], num_draft
    # Rows that decode or are short behind a long prefix, and many tokens: kernels of latents and experts take other sizes.
    for width in (1, 2, LONG - 1):
        yield [_WarmupRow(width, 0, max_len)], 0
    for count in _MANY_LONG:
        yield [_WarmupRow(LONG)] * count, 0


def plan_without_pages(
    known: Int32Array, num_draft: Int32Array, max_len: Int32Array, num_propose: int, sampling: SamplingParams
) -> BatchPlan:
    """Returns a step of rows that are admitted with it and have no pages: they write to the padding page.

    Args:
        known: int32 ``[B]``. Tokens of each row, all of which it computes.
        num_draft: int32 ``[B]``. Drafts to verify after them.
        max_len: int32 ``[B]``. Upper bounds of the rows' lengths.
        num_propose: Drafts to propose after the step.
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


class CudaMemoryMeter:
    """Reads the counts of torch's allocator, which cost nothing while steps run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        """Starts a measurement; memory that earlier steps left cached goes back to the device."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """Returns the most that was allocated at once since ``begin``, less the allocation at that time."""
        return torch.cuda.max_memory_allocated(self._device) - self._before


def profile_steps(
    runners: Dispatch,
    rows: DeviceRows,
    meter: CudaMemoryMeter,
    *,
    max_batched_tokens: int,
    num_draft: int = 0,
    budget_bytes: int,
) -> dict[str, int]:
    """Runs the largest prefill step and the largest decode step eagerly; returns the bytes that each took, by name.

    With drafts, also the largest step that verifies them, and the proposer after each step. All rows are free, before and
    afterwards; in the steps they have no pages and write to the padding page. A step of more than ``budget_bytes`` logs a
    warning.

    Raises:
        ResourceError: A step found no memory.
    """
    steps = {
        "prefill": _prefill(rows, max_batched_tokens),
        "decode": _decode(rows, max_batched_tokens),
    }
    if num_draft:
        steps["verify"] = _decode(rows, max_batched_tokens, num_draft)
    peaks = {}
    for name, plan in steps.items():
        meter.begin()
        with torch.inference_mode(), _memory_error_as_advice(name):
            rows.apply(plan)
            launched_step = runners.run(plan, Decision(Action.EAGER, Reason.GRAPHS_OFF))
            runners.propose(plan, launched_step)
            peaks[name] = meter.peak_bytes()
        level = logging.INFO if peaks[name] <= budget_bytes else logging.WARNING
        logger.log(
            level,
            "the largest %s step took %.2f GiB of the device; %.2f GiB were planned",
            name,
            peaks[name] / GIB,
            budget_bytes / GIB,
        )
    meter.begin()  # cached memory belongs to the stream of this thread, and steps run on another
    return peaks


def _prefill(rows: DeviceRows, num_tokens: int) -> BatchPlan:
    """Returns a step of so many tokens in the fewest rows."""
    longest = min(rows.max_len - 1, num_tokens)  # a row that samples has room for a token more
    num_rows = min(rows.page_table.shape[0] - 1, -(-num_tokens // longest))
    ends = np.minimum(np.arange(1, num_rows + 1) * longest, num_tokens)
    known = np.diff(ends, prepend=0).astype(np.int32)
    return plan_without_pages(known, np.zeros_like(known), known, 0, SamplingParams(seed=0, temperature=0.0))


def _decode(rows: DeviceRows, num_tokens: int, num_draft: int = 0) -> BatchPlan:
    """Returns a step of one token and its drafts in every row, of any length."""
    width = min(1 + num_draft, num_tokens)
    known = np.ones(min(rows.page_table.shape[0] - 1, num_tokens // width), dtype=np.int32)
    num_draft = width - 1
    return plan_without_pages(
        known, np.full_like(known, num_draft), np.full_like(known, rows.max_len), num_draft, _COSTLY
    )


@contextmanager
def _memory_error_as_advice(name: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"the largest {name} step finds no memory beside weights and KV pool: {str(error).splitlines()[0]} "
            "Lower --kv-pages, --max-batched-tokens or --max-running-requests.",
            param="kv_pages",
        ) from None
