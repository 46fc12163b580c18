"""Requests that workers died with, again and again: which of them are tried together, apart from all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hiserve.scheduler.ledger import Entry, RequestState

MIN_CRASHES = 2  # a request that made no progress between so many deaths of its workers is suspected


@dataclass(slots=True)
class _Suspects:
    """One worker's suspects.

    Attributes:
        groups: Those that wait, in the order in which they are tried.
        running: Those that the worker was given last.
    """

    groups: deque[list[Entry]] = field(default_factory=deque)
    running: list[Entry] = field(default_factory=list)


class CrashIsolation:
    """Finds the request that kills its worker, by halves.

    Where a worker has suspects, it gets nobody else. It gets one group of them, and the next when each of these has made
    progress or has ended: then it is cleared. If the worker dies, those that are not cleared are halved. One that had the
    worker for itself is guilty.
    """

    def __init__(self) -> None:
        self._suspects: dict[int, _Suspects] = {}

    def __contains__(self, replica: int) -> bool:
        """Whether a worker has suspects."""
        return replica in self._suspects

    def __iter__(self) -> Iterator[int]:
        """Walks the workers that have suspects."""
        return iter(tuple(self._suspects))

    def waiting(self) -> list[Entry]:
        """Returns the suspects that no worker has."""
        return [entry for isolated in self._suspects.values() for group in isolated.groups for entry in group]

    def isolate(self, replica: int, held: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """A worker died: suspects stay here.

        Args:
            replica: The worker.
            held: The requests it had, oldest first; each has left it, or ended with it.

        Returns:
            Those that are free to run anywhere, and the culprits.
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
        """Returns whom a living worker gets now, which may be nobody yet; None when it has no suspects any more."""
        isolated = self._suspects[replica]
        if not all(entry.has_moved or entry.state is RequestState.ENDED for entry in isolated.running):
            return []
        if not isolated.groups:
            del self._suspects[replica]
            return None
        isolated.running = isolated.groups.popleft()
        return isolated.running

    def remove(self, entry: Entry) -> None:
        """Takes a suspect out that no worker has."""
        for isolated in self._suspects.values():
            for group in isolated.groups:
                if entry in group:
                    group.remove(entry)
            isolated.groups = deque(group for group in isolated.groups if group)

    def dissolve(self, replica: int) -> list[Entry]:
        """Returns the suspects of a worker that will not come again: they are under suspicion no more."""
        isolated = self._suspects.pop(replica, _Suspects())
        entries = [entry for group in isolated.groups for entry in group]
        for entry in entries:
            entry.num_crashes = 0
        return entries
