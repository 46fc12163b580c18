"""The report of ``hiserve.engine.graph_check`` to ``hiserve doctor --graphs``."""

from __future__ import annotations

import msgspec


class StepCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The check of a step of one kind.

    Attributes:
        kind: prefill, decode, verify or mixed.
        ran: The gate's decision and reason.
        allocations: Per step after warm-up: of device memory; for steps that are graphs as a whole, calls of the
            allocator.
        difference: Of its keys and values from those of an eager step, as a share of the largest; 0 for an eager step.
        problems: One sentence each; empty if the check passed.
    """

    kind: str
    ran: str
    allocations: float
    difference: float
    problems: list[str]


class GraphReport(msgspec.Struct, frozen=True, kw_only=True):
    """The checks of a device."""

    device: str
    num_nodes: int  # nodes of all graphs captured for the check
    checks: list[StepCheck]  # eager steps, then replayed ones
