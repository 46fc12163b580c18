"""Failed steps: which of their requests run again, and the size of the steps after them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import StepFault
from hiserve.engine.queue import Request
from hiserve.engine.rows import RowState

logger = logging.getLogger(__name__)

LOAD_FAILED = "load_failed"
# Failed steps of one request, without a sound one in between: where steps cannot shrink, and in any case. The latter
# is more than the sizes between the largest step and one token.
MAX_SMALLEST, MAX_UNDONE = 2, 16
SHRINK = 4  # a step has at most one so many-th of the tokens of the one that failed
GROW_AFTER, MAX_GROW_AFTER = 32, 1024  # steps that must pass before steps grow again, by as much


class StepBackoff:
    """The size of steps: smaller after one that failed, and larger again after enough that did not.

    A failed step is followed by smaller ones without drafts, down to one token. On out-of-memory, graph replay is disabled
    last: a captured graph already owns its memory, an eager step must allocate. After ``GROW_AFTER`` sound steps, steps
    grow again; where a grown step fails, twice as many must pass the next time.

    Args:
        max_tokens: Of a step, when nothing is wrong.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = max_tokens  # of a step, now
        self.may_replay = True  # whether it may be replayed as a graph
        self._grow_after = GROW_AFTER
        self._num_passed = 0
        self._has_grown = False

    @property
    def is_reduced(self) -> bool:
        """Whether steps are smaller than they could be; they have no drafts then."""
        return self.num_tokens < self._max_tokens or not self.may_replay

    def shrink(self, num_tokens: int, *, was_replay: bool) -> bool:
        """Records a failed step of so many tokens; returns whether a smaller one is possible."""
        self._num_passed = 0
        if self._has_grown:
            self._grow_after = min(2 * self._grow_after, MAX_GROW_AFTER)
            self._has_grown = False
        self.num_tokens = min(self.num_tokens, max(1, num_tokens // SHRINK))
        if num_tokens == 1 and was_replay:
            self.may_replay = False
            return True
        return num_tokens > 1

    def passed(self) -> None:
        """Records a step that did not fail."""
        self._num_passed += 1
        if self._num_passed < self._grow_after:
            return
        self._num_passed = 0
        self._has_grown = self.is_reduced
        if self.is_reduced:
            self.may_replay = True
            self.num_tokens = min(self._max_tokens, self.num_tokens * SHRINK)
        else:
            self._grow_after = GROW_AFTER


class OomRecovery:
    """Counts faults, and decides which requests run again."""

    def __init__(self, max_tokens: int) -> None:
        self.backoff = StepBackoff(max_tokens)  # size of the next step
        self.counts: Counter[str] = Counter()  # steps that failed, and rows whose load did, by kind

    def requeue_or_fail(
        self, fault: StepFault, num_tokens: int, requests: Sequence[Request]
    ) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Sorts the requests of a failed step, which have lost their rows.

        Args:
            fault: The reason.
            num_tokens: Of the step.
            requests: In the order of the step; none of a step that was planned after one that failed.

        Returns:
            The requests to run again, in order: those with most failed steps first, so that one that never fits is soon
            alone. And the failed requests, each with a message.
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
                failed.append((request, _failure_message(request, fault, num_tokens)))
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
        """Records a step of these rows (int64 ``[n]``) that did not fail."""
        if self.backoff.is_reduced:
            for row in rows.tolist():
                state.request(row).num_undone = 0
        self.backoff.passed()

    def lost_loads(self, num_rows: int) -> None:
        """Counts rows that start over because a load failed."""
        self.counts[LOAD_FAILED] += num_rows
        logger.warning("%d requests compute their prefixes: the loads from the host failed", num_rows)


def _failure_message(request: Request, fault: StepFault, num_tokens: int) -> str:
    kind = fault.kind.replace("_", " ")
    return (
        f"the engine ran {kind} in {request.num_undone} steps of request {request.uid}, the last of {num_tokens} tokens: "
        f"{fault.message}. Lower --kv-pages or --max-running-requests, or free memory of the device, and try again."
    )
