"""Accepted requests without a worker: callers take turns, the policy chooses among the requests of one caller."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from hiserve.scheduler.ledger import Entry
from hiserve.scheduler.placement import Prefix

MAX_OVERTAKEN = 256
LONGEST_PREFIX_WINDOW = 64
MIN_RETRY_S = 1
MAX_RETRY_S = 60
RATE_MEMORY_S = 10.0


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A queued request."""

    entry: Entry
    prefix: Prefix  # its prompt as the prefix index sees it
    rank: int = 0  # larger is sooner; set by the policy
    number: int = 0  # requests of its caller that were pushed before it; set by the queue


class _CallerQueue:
    """Queued requests of one caller.

    Attributes:
        num_tokens: Their prompt tokens.
    """

    def __init__(self) -> None:
        self._in_order: OrderedDict[int, QueuedRequest] = OrderedDict()
        self._by_rank: dict[int, OrderedDict[int, QueuedRequest]] = {}
        self._num_pushed = 0
        self._num_gone = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._in_order)

    def push(self, waiting: QueuedRequest) -> None:
        waiting.number, self._num_pushed = self._num_pushed, self._num_pushed + 1
        self._add(waiting)

    def requeue(self, waiting: QueuedRequest) -> None:
        waiting.number = self._num_gone - MAX_OVERTAKEN
        self._add(waiting)
        self._in_order.move_to_end(waiting.entry.uid, last=False)
        self._by_rank[waiting.rank].move_to_end(waiting.entry.uid, last=False)

    def _add(self, waiting: QueuedRequest) -> None:
        uid = waiting.entry.uid
        self._in_order[uid] = self._by_rank.setdefault(waiting.rank, OrderedDict())[uid] = waiting
        self.num_tokens += len(waiting.entry.prompt)

    def remove(self, uid: int) -> None:
        waiting = self._in_order.pop(uid)
        of_rank = self._by_rank[waiting.rank]
        del of_rank[uid]
        if not of_rank:
            del self._by_rank[waiting.rank]
        self._num_gone += 1
        self.num_tokens -= len(waiting.entry.prompt)

    def window(self, size: int) -> list[QueuedRequest]:
        oldest = next(iter(self._in_order.values()))
        # All requests before the oldest have gone: those that have gone beyond their number came later.
        if self._num_gone - oldest.number >= MAX_OVERTAKEN:
            return [oldest]
        return list(islice(self._by_rank[max(self._by_rank)].values(), size))

    def last(self) -> QueuedRequest:
        return next(reversed(self._by_rank[min(self._by_rank)].values()))


class Queue:
    """Queued requests of all callers: unordered removal, ordered iteration, bounded, shared fairly.

    The next request is of the caller with the fewest computed tokens, of prompts and replies together. A caller without
    queued requests returns with the count of the latest turn, so that no caller accumulates turns (Sheng et al.,
    "Fairness in serving large language models", 2024; the rule for returning callers is that of start-time fair
    queueing).

    Under any policy, no request is overtaken by more than ``MAX_OVERTAKEN`` later ones of its caller.

    Args:
        max_requests: Requests it holds at most.
        max_tokens: Prompt tokens it holds at most, unless a single request has more.

    Attributes:
        num_tokens: Prompt tokens of all waiting requests.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._waiting: dict[int, QueuedRequest] = {}
        self._queues: dict[int, _CallerQueue] = {}
        self._served: dict[int, int] = {}
        self._latest_turn = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        """Returns the number of waiting requests."""
        return len(self._waiting)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a prompt of this length may be pushed; an empty queue takes any."""
        return not self._waiting or (
            len(self._waiting) < self._max_requests and self.num_tokens + num_tokens <= self._max_tokens
        )

    def shed_candidate(self, caller: int, num_tokens: int) -> QueuedRequest | None:
        """Returns the request to shed for a new one without room: the last of the caller with most in the queue.

        None, so that the new request is refused, if its caller would get more than an equal share of the queue, or if the
        last request had a worker that died.

        Args:
            caller: Of the new request.
            num_tokens: Length of its prompt.
        """
        mine = self._queues.get(caller) or _CallerQueue()
        others = [each for each in self._queues.values() if each is not mine]
        num_callers = len(others) + 1
        is_fair = (len(mine) + 1) * num_callers <= self._max_requests
        is_fair = is_fair and (mine.num_tokens + num_tokens) * num_callers <= self._max_tokens
        if not others or not is_fair:
            return None
        has_places = len(self._waiting) < self._max_requests
        last = max(others, key=lambda each: each.num_tokens if has_places else len(each)).last()
        return None if last.entry.num_admissions else last

    def __contains__(self, uid: int) -> bool:
        """Whether a request waits here."""
        return uid in self._waiting

    def push(self, waiting: QueuedRequest) -> None:
        """Adds a request after all others of its caller and rank."""
        self._queue_of(waiting).push(waiting)

    def requeue(self, waiting: Sequence[QueuedRequest]) -> None:
        """Adds requests that lost their worker before all others of their callers, in their order, room or not."""
        for each in reversed(waiting):
            self._queue_of(each).requeue(each)

    def window(self, size: int) -> list[QueuedRequest]:
        """Returns the first ``size`` requests of the next caller, of its largest rank, oldest first."""
        if not self._queues:
            return []
        return self._queues[min(self._queues, key=self._served.__getitem__)].window(size)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Walks a copy of the queue, so that requests may be removed meanwhile."""
        return iter(list(self._waiting.values()))

    def remove(self, uid: int) -> QueuedRequest:
        """Removes a request from any position."""
        waiting = self._waiting.pop(uid)
        own = self._queues[waiting.entry.caller]
        own.remove(uid)
        if not own:
            del self._queues[waiting.entry.caller]
        self.num_tokens -= len(waiting.entry.prompt)
        return waiting

    def admit(self, uid: int, num_cached: int = 0) -> None:
        """Removes a request that a worker gets; charges its caller the prompt tokens that are not cached there."""
        entry = self.remove(uid).entry
        self._latest_turn = max(self._latest_turn, self._served[entry.caller])
        self.charge(entry.caller, len(entry.prompt) - num_cached)

    def charge(self, caller: int, num_tokens: int) -> None:
        """Counts tokens computed for a caller."""
        self._served[caller] += num_tokens

    def _queue_of(self, waiting: QueuedRequest) -> _CallerQueue:
        """Counts a request that is added; returns its caller's queue."""
        caller = waiting.entry.caller
        self._waiting[waiting.entry.uid] = waiting
        self.num_tokens += len(waiting.entry.prompt)
        if caller not in self._queues:
            self._queues[caller] = _CallerQueue()
            self._served[caller] = max(self._served.get(caller, 0), self._latest_turn)
        return self._queues[caller]


class Policy:
    """Chooses among the oldest requests of one caller; this one, first come, first served.

    A request that was overtaken too often is the only one that a policy sees.

    Attributes:
        window: Requests it chooses among.
    """

    window = 1

    def rank(self, priority: int) -> int:
        """Returns the rank of a request of this priority in the queue; a larger rank is chosen first."""
        return 0

    def choose(self, waiting: Sequence[QueuedRequest], matched: Callable[[QueuedRequest], int]) -> int:
        """Returns the index of the next request.

        Args:
            waiting: At least one request, all of one caller and of its largest rank, oldest first.
            matched: Prompt tokens that a worker with credit has cached for a request.
        """
        return 0


class Fcfs(Policy):
    """First come, first served."""


class LongestPrefix(Policy):
    """The request with the longest cached prefix; the oldest among equals."""

    window = LONGEST_PREFIX_WINDOW

    def choose(self, waiting: Sequence[QueuedRequest], matched: Callable[[QueuedRequest], int]) -> int:
        """Returns the index of the longest match."""
        lengths = [matched(candidate) for candidate in waiting]
        return lengths.index(max(lengths))


class Priority(Policy):
    """The largest priority; first come, first served among equals."""

    def rank(self, priority: int) -> int:
        """Returns the priority itself."""
        return priority


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs, "longest-prefix": LongestPrefix, "priority": Priority}


class DrainRate:
    """Requests and tokens that left a queue per second in which others waited; the past counts exponentially less.

    Time in which the queue is empty does not count: requests pass it at once.
    """

    def __init__(self) -> None:
        self._num_requests = 0.0
        self._num_tokens = 0.0
        self._busy_s = 0.0
        self._since_s: float | None = None

    def observe(self, now_s: float, num_requests: int, num_tokens: int, *, is_busy: bool) -> None:
        """Records the departures since the last call.

        Args:
            now_s: The monotonic clock.
            num_requests: Requests that workers got.
            num_tokens: Tokens of their prompts.
            is_busy: Others still wait.
        """
        if self._since_s is not None:
            passed_s = now_s - self._since_s
            kept = math.exp(-passed_s / RATE_MEMORY_S)
            self._num_requests = self._num_requests * kept + num_requests
            self._num_tokens = self._num_tokens * kept + num_tokens
            self._busy_s = self._busy_s * kept + passed_s
        self._since_s = now_s if is_busy else None

    def retry_after_s(self, num_requests: int, num_tokens: int) -> int:
        """Returns the seconds until a queue like this has been emptied, ``MIN_RETRY_S`` to ``MAX_RETRY_S``.

        Args:
            num_requests: Requests in the queue.
            num_tokens: Tokens of their prompts.
        """
        seconds = num_requests * self._busy_s / max(1.0, self._num_requests)
        if self._num_tokens:
            seconds = max(seconds, num_tokens * self._busy_s / self._num_tokens)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds)))
