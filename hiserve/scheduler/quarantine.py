"""Requests that workers died with, again and again: which of them are tried together, apart from all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hiserve.scheduler.ledger import Entry, State

MIN_CRASHES = 2  # a request that made no progress between so many deaths of its workers is suspected


@dataclass(slots=True)
class _Ward:
    """One worker's suspects.

    Attributes:
        groups: Those that wait, in the order in which they are tried.
        on_trial: Those that the worker was given last.
    """

    groups: deque[list[Entry]] = field(default_factory=deque)
    on_trial: list[Entry] = field(default_factory=list)


class Quarantine:
    """Finds the request that kills its worker, by halves.

    Where a worker has suspects, it gets nobody else. It gets one group of them, and the next when each of these has made
    progress or has ended: then it is cleared. If the worker dies, those that are not cleared are halved. One that had the
    worker for itself is guilty.
    """

    def __init__(self) -> None:
        self._wards: dict[int, _Ward] = {}

    def __contains__(self, replica: int) -> bool:
        """Whether a worker has suspects."""
        return replica in self._wards

    def __iter__(self) -> Iterator[int]:
        """Walks the workers that have suspects."""
        return iter(tuple(self._wards))

    def waiting(self) -> list[Entry]:
        """Returns the suspects that no worker has."""
        return [entry for ward in self._wards.values() for group in ward.groups for entry in group]

    def judge(self, replica: int, held: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
        """A worker died: suspects stay here.

        Args:
            replica: The worker.
            held: The requests it had, oldest first; each has left it, or ended with it.

        Returns:
            Those that are free to run anywhere, and those that are guilty.
        """
        left = [entry for entry in held if entry.state is not State.ENDED]
        suspects = [entry for entry in left if entry.num_crashes >= MIN_CRASHES]
        free = [entry for entry in left if entry.num_crashes < MIN_CRASHES]
        ward = self._wards.get(replica)
        if ward is not None:
            on_trial, ward.on_trial = ward.on_trial, []
            if suspects == on_trial == held and len(held) == 1:
                return [], suspects
        if suspects:
            ward = self._wards.setdefault(replica, _Ward())
            half = (len(suspects) + 1) // 2
            ward.groups.extendleft(group for group in (suspects[half:], suspects[:half]) if group)
        return free, []

    def next(self, replica: int) -> list[Entry] | None:
        """Returns whom a living worker gets now, which may be nobody yet; None when it has no suspects any more."""
        ward = self._wards[replica]
        if not all(entry.has_moved or entry.state is State.ENDED for entry in ward.on_trial):
            return []
        if not ward.groups:
            del self._wards[replica]
            return None
        ward.on_trial = ward.groups.popleft()
        return ward.on_trial

    def remove(self, entry: Entry) -> None:
        """Takes a suspect out that no worker has."""
        for ward in self._wards.values():
            for group in ward.groups:
                if entry in group:
                    group.remove(entry)
            ward.groups = deque(group for group in ward.groups if group)

    def dissolve(self, replica: int) -> list[Entry]:
        """Returns the suspects of a worker that will not come again: they are under suspicion no more."""
        ward = self._wards.pop(replica, _Ward())
        entries = [entry for group in ward.groups for entry in group]
        for entry in entries:
            entry.num_crashes = 0
        return entries
