"""How many requests a worker may hold, and which worker gets the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LOOKAHEAD_SHARE = 8


@dataclass(slots=True)
class _WorkerLoad:
    """A worker's rows, the requests it holds (running, or waiting inside it), and when it got its last one."""

    max_running: int
    num_held: int = 0
    last_taken: int = 0

    @property
    def credit(self) -> int:
        # A few more than its rows, so that a row that frees is taken in the very next step.
        return self.max_running + max(1, self.max_running // LOOKAHEAD_SHARE) - self.num_held


class Placement:
    """Credits: a worker is sent a request only while it holds few enough."""

    def __init__(self) -> None:
        self._loads: dict[int, _WorkerLoad] = {}
        self._reserved: set[int] = set()
        self._num_taken = 0

    def join(self, replica: int, max_running: int) -> None:
        """Adds a worker that holds nothing.

        Args:
            replica: The worker.
            max_running: Requests it runs at once.
        """
        self._loads[replica] = _WorkerLoad(max_running)

    def leave(self, replica: int) -> None:
        """Removes a worker, with what it held."""
        self._loads.pop(replica, None)

    def reserve(self, replica: int) -> None:
        """From now on a worker, and its successors, are offered to nobody."""
        self._reserved.add(replica)

    def unreserve(self, replica: int) -> None:
        """They are offered again."""
        self._reserved.discard(replica)

    def is_joined(self, replica: int) -> bool:
        """Whether a worker is here."""
        return replica in self._loads

    def num_held(self, replica: int) -> int:
        """Returns the requests a worker holds."""
        return self._loads[replica].num_held

    def with_credit(self) -> list[int]:
        """Returns the workers that may be sent another request by ``place``."""
        free = self._loads.items()
        return [replica for replica, load in free if load.credit > 0 and replica not in self._reserved]

    def take_credit(self, replica: int) -> None:
        """Spends a credit: the worker is sent a request."""
        load = self._loads[replica]
        assert load.credit > 0, f"worker {replica} holds {load.num_held} requests and was sent another"
        load.num_held += 1
        self._num_taken += 1
        load.last_taken = self._num_taken

    def return_credit(self, replica: int) -> None:
        """Returns a credit: a request the worker held has ended."""
        load = self._loads[replica]
        assert load.num_held > 0, f"worker {replica} ended a request but holds none"
        load.num_held -= 1

    def place(self, num_tokens: int, matched: Callable[[int], int]) -> int | None:
        """Chooses the worker for a request; None when none has credit.

        The longest cached prefix wins while its worker is not far busier than the idlest one:
        it may hold up to half its rows more if all of the prompt is cached, and less in
        proportion (a shared system prompt must not draw all traffic to one worker).
        Equals are decided by load, then in turn, so that cold conversations spread over idle workers.

        Args:
            num_tokens: Length of the prompt.
            matched: Prompt tokens a worker has cached.
        """
        candidates = self.with_credit()
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        idlest = min(self._loads[replica].num_held for replica in candidates)
        ranked = []
        for replica in candidates:
            load, cached = self._loads[replica], matched(replica)
            slack = load.max_running * cached / (2 * num_tokens)
            if load.num_held - idlest <= slack:
                ranked.append((-cached, load.num_held, load.last_taken, replica))
        return min(ranked)[3]
