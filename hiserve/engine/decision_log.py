"""The gate's decisions on the steps of an executor: counted, and the latest remembered."""

from __future__ import annotations

from collections import Counter, deque

from hiserve.ipc.messages import GateCounts
from hiserve.runners.gate import Action, Decision, Reason


class DecisionLog:
    """Decisions, which may be added in another thread than read. It touches no device.

    Args:
        max_steps: Steps that are remembered.
    """

    def __init__(self, max_steps: int) -> None:
        self._counts: Counter[tuple[Action, Reason]] = Counter()
        self._latest: deque[tuple[int, Decision]] = deque(maxlen=max_steps)

    def add(self, step_id: int, decision: Decision) -> None:
        """Records the decision on a step."""
        self._counts[decision.action, decision.reason] += 1
        self._latest.append((step_id, decision))

    def counts(self) -> GateCounts:
        """Returns decision -> reason -> steps, until now."""
        counts: GateCounts = {}
        for (action, reason), count in dict(self._counts).items():  # a copy: steps may run in another thread
            counts.setdefault(action.value, {})[reason.value] = count
        return counts

    def last(self) -> tuple[int, str]:
        """Returns the latest step, and the decision in words."""
        if not self._latest:
            return 0, ""
        step_id, decision = self._latest[-1]
        graph = f" of {decision.bucket}" if decision.bucket else ""
        loads = f" after loads {decision.loads}" if decision.loads else ""
        return step_id, f"{decision.action.value}{graph}: {decision.reason.value} {decision.sampling}{loads}".strip()

    def of(self, step_id: int) -> tuple[str, str]:
        """Returns the decision on one of the latest steps, and the reason; empty strings for any other."""
        latest = dict(tuple(self._latest))  # a copy, likewise
        decision = latest.get(step_id)
        return ("", "") if decision is None else (decision.action.value, decision.reason.value)
