"""The report of ``hiserve.engine.graph_check`` to ``hiserve doctor --graphs``."""

from __future__ import annotations

import msgspec


class StepCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The check of a step of one kind."""

    kind: str  # prefill, decode, verify or mixed
    ran: str  # the gate's decision and reason
    allocations: float  # of device memory, per step after warm-up; of a whole graph, calls of the allocator
    difference: float  # of its keys and values from those of an eager step, as a share of the largest
    problems: list[str]  # one sentence each; empty if the check passed


class GraphReport(msgspec.Struct, frozen=True, kw_only=True):
    """The checks of a device."""

    device: str
    num_nodes: int  # nodes of all graphs captured for the check
    checks: list[StepCheck]  # eager steps, then replayed ones
