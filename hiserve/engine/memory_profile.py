"""Measures at start what the largest steps take of the device, beside what was budgeted for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from hiserve.core.plan import BatchPlan
from hiserve.core.request import SamplingParams
from hiserve.engine.warmup import plan_without_pages
from hiserve.errors import ResourceError
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.gate import Action, Decision, Reason

logger = logging.getLogger(__name__)

GIB = 2**30
# Every step of drawing that takes memory of the size of the logits.
_COSTLY = SamplingParams(seed=0, temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20)


class MemoryMeter(Protocol):
    """Measures the memory of a device."""

    def begin(self) -> None:
        """Forgets what was measured."""

    def peak_bytes(self) -> int:
        """Returns the most that was allocated at once since ``begin``, less what was then."""


class CudaMemoryMeter:
    """Asks torch's allocator, which costs nothing while steps run.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        """As ``MemoryMeter``. What steps before it left cached is given back to the device."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """As ``MemoryMeter``."""
        return torch.cuda.max_memory_allocated(self._device) - self._before


def profile_steps(
    runners: Dispatch,
    rows: DeviceRows,
    meter: MemoryMeter,
    *,
    max_batched_tokens: int,
    num_draft: int = 0,
    budget_bytes: int,
) -> dict[str, int]:
    """Runs the largest prefill step and the largest decode step eagerly; returns the bytes that each took, by name.

    With drafts the largest step that verifies them, too, and what drafts behind each.

    Their rows have no pages: all that they store goes to the sink, and afterwards they have forgotten it, as such rows do.

    Args:
        runners: Of the device.
        rows: Nobody has one yet; nobody has one afterwards.
        meter: Of the device.
        max_batched_tokens: Tokens of the largest step.
        num_draft: Drafts of a row, at most.
        budget_bytes: What was planned for a step; a step that takes more is told as a warning.

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
    meter.begin()  # what is cached belongs to the stream of this thread, and steps run on another
    return peaks


def _prefill(rows: DeviceRows, num_tokens: int) -> BatchPlan:
    """As few rows as hold so many tokens."""
    longest = min(rows.max_len - 1, num_tokens)  # a row that samples has room for a token more
    num_rows = min(rows.page_table.shape[0] - 1, -(-num_tokens // longest))
    ends = np.minimum(np.arange(1, num_rows + 1) * longest, num_tokens)
    known = np.diff(ends, prepend=0).astype(np.int32)
    return plan_without_pages(known, np.zeros_like(known), known, 0, SamplingParams(seed=0, temperature=0.0))


def _decode(rows: DeviceRows, num_tokens: int, num_draft: int = 0) -> BatchPlan:
    """One token and its drafts in every row, of any length."""
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
