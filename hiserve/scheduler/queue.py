"""Accepted requests that no worker has yet, in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from hiserve.scheduler.ledger import Entry
from hiserve.scheduler.prefix_index import Prefix


@dataclass(slots=True, eq=False)
class Waiting:
    """A queued request.

    Attributes:
        prefix: Its prompt as the prefix index sees it.
        num_overtaken: Later requests that were admitted before it.
    """

    entry: Entry
    prefix: Prefix
    num_overtaken: int = 0


class Queue:
    """Unordered removal, ordered iteration."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return sum(len(waiting.entry.prompt) for waiting in self._waiting.values())

    def push(self, waiting: Waiting) -> None:
        """Adds a request behind all others."""
        self._waiting[waiting.entry.uid] = waiting

    def window(self, size: int) -> list[Waiting]:
        """Returns the ``size`` oldest requests, oldest first."""
        return list(islice(self._waiting.values(), size))

    def remove(self, uid: int) -> Waiting:
        """Takes a request out, wherever it stands."""
        return self._waiting.pop(uid)
