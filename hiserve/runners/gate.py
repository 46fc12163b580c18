"""The gate: every step passes it before its forward is launched, and nobody else decides whether it may be."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import BatchPlan


class Action(Enum):
    """What happens to a step."""

    LAUNCH = "launch"  # now
    WAIT = "wait"  # launched now; on the device it waits for loads
    DEFER = "defer"  # not at all: what it would read is not there, and an eager forward would read the same


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's answer.

    Attributes:
        action: What happens.
        loads: Ops that the forward must wait for; of WAIT.
        reason: Why not, in one word for a counter; of DEFER.
    """

    action: Action
    loads: tuple[int, ...] = ()
    reason: str = ""


def admit(
    plan: BatchPlan, row_versions: NDArray[np.int64], open_loads: Collection[int], failed_loads: Collection[int]
) -> Verdict:
    """Decides over a step. Total: every plan gets exactly one verdict.

    Args:
        plan: Applied to the rows already.
        row_versions: int64 ``[R]``. Of each row, the relocation version its page table was last written under.
        open_loads: Ops that were started and have not ended.
        failed_loads: Ops that ended without their bytes.
    """
    if any(op in failed_loads for op in plan.waits):
        return Verdict(Action.DEFER, reason="load_failed")
    if plan.rows.size and row_versions[plan.rows].max() > plan.relocation_version:
        return Verdict(Action.DEFER, reason="stale_table")
    loads = tuple(op for op in plan.waits if op in open_loads)
    return Verdict(Action.WAIT, loads) if loads else Verdict(Action.LAUNCH)
