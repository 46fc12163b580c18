"""Accepted requests that no worker has yet: who is sooner goes first, then who came first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from hiserve.scheduler.ledger import Entry
from hiserve.scheduler.prefix_index import Prefix


@dataclass(slots=True, eq=False)
class Waiting:
    """A queued request.

    Attributes:
        prefix: Its prompt as the prefix index sees it.
        rank: Larger is sooner; the policy's word.
        num_overtaken: Later requests of the same rank that were admitted before it.
    """

    entry: Entry
    prefix: Prefix
    rank: int = 0
    num_overtaken: int = 0


class Queue:
    """Unordered removal, ordered iteration, bounded.

    Args:
        max_requests: Requests it holds at most.
        max_tokens: Prompt tokens it holds at most, unless a single request has more.

    Attributes:
        num_tokens: Prompt tokens of all waiting requests.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._by_rank: dict[int, dict[int, Waiting]] = {}
        self._ranks: dict[int, int] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        """Returns the number of waiting requests."""
        return len(self._ranks)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a prompt of this length may be pushed; an empty queue takes any."""
        return not self._ranks or (
            len(self._ranks) < self._max_requests and self.num_tokens + num_tokens <= self._max_tokens
        )

    def push(self, waiting: Waiting) -> None:
        """Adds a request behind all others of its rank."""
        uid = waiting.entry.uid
        self._ranks[uid] = waiting.rank
        self._by_rank.setdefault(waiting.rank, {})[uid] = waiting
        self.num_tokens += len(waiting.entry.prompt)

    def window(self, size: int) -> list[Waiting]:
        """Returns the first ``size`` requests of the largest rank, oldest first."""
        return list(islice(self._by_rank[max(self._by_rank)].values(), size)) if self._by_rank else []

    def __iter__(self) -> Iterator[Waiting]:
        """Walks the queue as it stands, so that the walker may remove."""
        return iter([waiting for rank in self._by_rank.values() for waiting in rank.values()])

    def remove(self, uid: int) -> Waiting:
        """Takes a request out, wherever it stands."""
        rank = self._ranks.pop(uid)
        waiting = self._by_rank[rank].pop(uid)
        if not self._by_rank[rank]:
            del self._by_rank[rank]
        self.num_tokens -= len(waiting.entry.prompt)
        return waiting
