"""What becomes of the requests of a step that failed, and of the steps after it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import StepFault
from hiserve.engine.rows import RowState
from hiserve.engine.step_backoff import StepBackoff
from hiserve.engine.waiting_queue import Request

logger = logging.getLogger(__name__)

LOAD_FAILED = "load_failed"
# Steps that a request may lose without one in between that did not fail: when they cannot be smaller, and in any case,
# which is more than the ladder has rungs.
MAX_SMALLEST, MAX_UNDONE = 2, 16


class OomRecovery:
    """Counts faults, and decides who tries again.

    Args:
        max_tokens: Of a step, when nothing is wrong.

    Attributes:
        backoff: What the next step may be.
        counts: Steps that failed, and rows whose load did, by kind.
    """

    def __init__(self, max_tokens: int) -> None:
        self.backoff = StepBackoff(max_tokens)
        self.counts: Counter[str] = Counter()

    def requeue_or_fail(
        self, fault: StepFault, num_tokens: int, requests: Sequence[Request]
    ) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Decides over the requests of a step that failed, which have lost their rows.

        Args:
            fault: Why it failed.
            num_tokens: It had.
            requests: In the order of the step. None is left of a step that was planned behind one that failed.

        Returns:
            Those that try again, in the order in which they should: first who never got through in between, so that
            one who cannot is soon alone. And those that have failed, with what to tell them.
        """
        self.counts[fault.kind] += 1
        if not requests:
            return [], []
        can_shrink = self.backoff.shrink(num_tokens, was_replay=fault.was_replay)
        again, failed = [], []
        for request in requests:
            request.num_undone += 1
            if request.num_undone <= (MAX_UNDONE if can_shrink else MAX_SMALLEST):
                again.append(request)
            else:
                failed.append((request, _last_words(request, fault, num_tokens)))
        logger.warning(
            "a step failed (%s, requests: %d, tokens: %d): %s. Steps have at most %d tokens now; requests that ended: %d",
            fault.kind,
            len(requests),
            num_tokens,
            fault.message,
            self.backoff.num_tokens,
            len(failed),
        )
        return sorted(again, key=lambda request: -request.num_undone), failed

    def passed(self, state: RowState, rows: NDArray[np.int64]) -> None:
        """These rows (int64 ``[n]``) got through a step."""
        if self.backoff.is_reduced:
            for row in rows.tolist():
                state.request(row).num_undone = 0
        self.backoff.passed()

    def lost_loads(self, num_rows: int) -> None:
        """Rows start over because a load failed."""
        self.counts[LOAD_FAILED] += num_rows
        logger.warning("%d requests compute what could not be loaded from the host", num_rows)


def _last_words(request: Request, fault: StepFault, num_tokens: int) -> str:
    what = fault.kind.replace("_", " ")
    return (
        f"the engine ran {what} in {request.num_undone} steps of request {request.uid}, the last of {num_tokens} tokens: "
        f"{fault.message}. Lower --kv-pages or --max-running-requests, or free memory of the device, and try again."
    )
