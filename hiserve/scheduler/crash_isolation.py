"""Isolation of requests that were running at repeated deaths of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hiserve.scheduler.ledger import Entry, RequestState

MIN_CRASHES = 2  # consecutive deaths of its workers, without progress between, that make a request a suspect


@dataclass(slots=True)
class _Suspects:
    """One worker's suspects."""

    groups: deque[list[Entry]] = field(default_factory=deque)  # waiting groups, in the order of their trials
    running: list[Entry] = field(default_factory=list)  # the group that the worker has now


class CrashIsolation:
    """Finds the request that kills its worker, by bisection.

    A worker with suspects runs only these. It gets one group of them, and the next when each request of the group has
    made progress, which clears it, or has ended. If the worker dies, the suspects that are not cleared are halved. A
    suspect that ran alone when the worker died is the culprit.
    """

    def __init__(self) -> None:
        self._suspects: dict[int, _Suspects] = {}

    def __contains__(self, replica: int) -> bool:
        """Whether a worker has suspects."""
        return replica in self._suspects

    def __iter__(self) -> Iterator[int]:
        """Iterates over a copy of the workers that have suspects."""
        return iter(tuple(self._suspects))

    def isolate(self, replica: int, held: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Keeps the suspects of a dead worker.

        ``held`` are the requests it had, oldest first, none of them assigned any more. Returns the requests that may
        run anywhere, and the culprits.
        """
        left = [entry for entry in held if entry.state is not RequestState.ENDED]
        suspects = [entry for entry in left if entry.num_crashes >= MIN_CRASHES]
        free = [entry for entry in left if entry.num_crashes < MIN_CRASHES]
        isolated = self._suspects.get(replica)
        if isolated is not None:
            running, isolated.running = isolated.running, []
            if suspects == running == held and len(held) == 1:
                return [], suspects
        if suspects:
            isolated = self._suspects.setdefault(replica, _Suspects())
            half = (len(suspects) + 1) // 2
            isolated.groups.extendleft(group for group in (suspects[half:], suspects[:half]) if group)
        return free, []

    def next(self, replica: int) -> list[Entry] | None:
        """Returns the next requests for a living worker, which may be none; None when it has no suspects any more."""
        isolated = self._suspects[replica]
        if not all(entry.has_moved or entry.state is RequestState.ENDED for entry in isolated.running):
            return []
        if not isolated.groups:
            del self._suspects[replica]
            return None
        isolated.running = isolated.groups.popleft()
        return isolated.running

    def remove(self, entry: Entry) -> None:
        """Removes a suspect without a worker."""
        for isolated in self._suspects.values():
            for group in isolated.groups:
                if entry in group:
                    group.remove(entry)
            isolated.groups = deque(group for group in isolated.groups if group)

    def dissolve(self, replica: int) -> list[Entry]:
        """Returns the suspects of a worker without a successor, and clears them."""
        isolated = self._suspects.pop(replica, _Suspects())
        entries = [entry for group in isolated.groups for entry in group]
        for entry in entries:
            entry.num_crashes = 0
        return entries
