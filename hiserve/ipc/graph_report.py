"""What ``hiserve.engine.graph_check`` tells ``hiserve doctor --graphs``."""

from __future__ import annotations

import msgspec


class StepCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How a step of one kind was run, and what was wrong about it.

    Attributes:
        kind: prefill, decode, verify or mixed.
        ran: The gate's verdict and reason.
        allocations: Of the device's memory, by each step once all is warm; of the allocator, by whole steps as graphs.
        difference: Of its keys and values from those of an eager step, as a share of the largest; 0 for an eager step.
        problems: Each in a sentence; none if it is ready.
    """

    kind: str
    ran: str
    allocations: float
    difference: float
    problems: list[str]


class GraphReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked on a device.

    Attributes:
        device: Its name.
        num_nodes: Nodes of all graphs captured for the check.
        checks: Eager steps, then replayed ones.
    """

    device: str
    num_nodes: int
    checks: list[StepCheck]
