"""The other ranks of a group, as the executor of one sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from zlib import crc32

import numpy as np

from hiserve.core.plan import BatchPlan, MaskPlan, StepFault, StepResult
from hiserve.core.transfers import CopyAck
from hiserve.runners.gate import Decision


class StepGroup(Protocol):
    """Steps of a group: the first rank decides about each, once, and a step has failed if it failed on one rank."""

    def settle(self, plan: BatchPlan, decide: Callable[[], Decision | None]) -> Decision | None:
        """Returns how a step is launched, on all ranks alike; None of a plan without rows. Called once a plan, before its launch."""

    def draw(self, step_id: int, masks: MaskPlan | None) -> None:
        """Starts the second half of a step that awaits masks on the other ranks too."""

    def take_result(self, result: StepResult) -> StepFault | None:
        """Takes what a step gave its rows here, once each other rank has launched it; returns the fault of one without memory.

        Raises:
            EngineError: A rank has ended.
        """

    def void(self, step_id: int) -> None:
        """Says that a step has failed: its rows, and those of steps in flight behind it, may differ between ranks."""

    def join_acks(self, acks: list[CopyAck]) -> list[CopyAck]:
        """Takes the copies that have ended here; returns those that have ended on all ranks, each once."""

    @property
    def num_ready_host_pages(self) -> int:
        """Host pages below this are ready on the other ranks."""

    def close(self) -> None:
        """Ends the other ranks; the steps that were submitted have ended here."""

    def check(self) -> None:
        """Says so if a rank has ended: an exchange with it then fails with another error.

        Raises:
            EngineError: It has.
        """


def checksum_of(result: StepResult) -> int:
    """Returns a checksum of what a step gave its rows: tokens, their numbers, and the rows that it refused."""
    width, tokens = result.tokens.shape[1], result.tokens
    if width > 1:  # what follows a row's tokens means nothing
        tokens = tokens[np.arange(width) < result.counts[:, None]]
    return crc32(tokens.tobytes(), crc32(result.counts.tobytes(), crc32(result.faults.tobytes())))
