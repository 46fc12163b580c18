"""Which page is evicted first: leaves in order, the shares of tenants, and the pages that the device keeps ready to lose."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Literal

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.radix import Node

EvictionOrder = Literal["lru", "priority"]

ON_DEVICE: Callable[[Node], bool] = attrgetter("is_evictable")
ON_HOST: Callable[[Node], bool] = attrgetter("is_host_evictable")

MAX_ACCOUNTS = 64  # with shares of their own; all others have one together
MAX_IDLE_TURNOVERS = 32  # a tenant that sends nothing while the tier changes hands so often has no share any more

STEPS = 2  # an offload that one step begins has ended when the step after the next takes pages
# The demand of a large step decays by these factors at each smaller step, for the least and the most spare pages. The least
# decays fast: spare pages that are not taken cost more hits than the pages that a sudden large step loses.
LEAST_KEPT, MOST_KEPT = 1 - 1 / 2, 1 - 1 / 512
DEVICE_SHARE, HOST_SHARE = 4, 2  # of the pages of a tier, one in so many may be spare: both tiers hold them


class LeafHeap:
    """Leaves by rank, lowest first.

    A heap with lazy deletion: an entry counts only while its node is one of them and has the rank that
    it was added with. Entries out of date are dropped when they surface, and all at once when they
    outnumber the rest, so the heap stays within a constant factor of the leaves.

    Args:
        rank: A node's place. Whoever changes it adds the node again.
        is_victim: What makes a node one of them.
    """

    def __init__(self, rank: Callable[[Node], Any], is_victim: Callable[[Node], bool]) -> None:
        self._rank = rank
        self._is_victim = is_victim
        self._heap: list[tuple[Any, int, Node]] = []
        self._serial = 0
        self._sweep_at = 1024

    def __len__(self) -> int:
        """Returns the number of entries, those out of date included."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Node]:
        """Walks the nodes whose entries count (for checks)."""
        return (entry[2] for entry in self._heap if self._counts(entry))

    def add(self, node: Node) -> None:
        """Records that ``node`` became one of them, or changed its place. O(log n)."""
        self._serial += 1
        heapq.heappush(self._heap, (self._rank(node), self._serial, node))
        if len(self._heap) >= self._sweep_at:
            self.sweep()

    def head(self) -> Any:
        """Returns the lowest rank, or None. O(log n) amortised."""
        while self._heap:
            if self._counts(self._heap[0]):
                return self._heap[0][0]
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Node | None:
        """Returns the leaf of the lowest rank and forgets it; of equals, the first added. O(log n) amortised."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._counts(entry):
                return entry[2]
        return None

    def _counts(self, entry: tuple[Any, int, Node]) -> bool:
        rank, _, node = entry
        is_current: bool = self._rank(node) == rank
        return is_current and self._is_victim(node)

    def sweep(self) -> None:
        """Drops all entries that are out of date. O(n log n)."""
        latest = {id(entry[2]): entry for entry in self._heap if self._counts(entry)}
        self._heap = sorted(latest.values(), key=lambda entry: entry[:2])
        self._sweep_at = max(1024, 2 * len(self._heap))


class AccountHeaps:
    """Leaves by rank, those of each account apart.

    Args:
        rank: A node's place.
        is_victim: What makes a node one of them.
    """

    def __init__(self, rank: Callable[[Node], Any], is_victim: Callable[[Node], bool]) -> None:
        self._rank = rank
        self._is_victim = is_victim
        self._heaps: dict[bytes, LeafHeap] = {}

    def __len__(self) -> int:
        """Returns the number of entries, those out of date included."""
        return sum(len(heap) for heap in self._heaps.values())

    def __iter__(self) -> Iterator[Node]:
        """Walks the nodes whose entries count (for checks)."""
        return (node for heap in self._heaps.values() for node in heap)

    def add(self, node: Node) -> None:
        """Records that ``node`` became one of them, or changed its place. O(log n)."""
        heap = self._heaps.get(node.account)
        if heap is None:
            account, is_victim = node.account, self._is_victim
            # A node may have another account since (see ``CacheTiers.assign_account``).
            heap = self._heaps[account] = LeafHeap(self._rank, lambda leaf: leaf.account == account and is_victim(leaf))
        heap.add(node)

    def sweep(self) -> None:
        """Drops all entries that are out of date, and so the nodes that they keep from being freed. O(n log n)."""
        for account, heap in list(self._heaps.items()):
            heap.sweep()
            if not len(heap):
                del self._heaps[account]

    def head(self, account: bytes) -> Any:
        """Returns the lowest rank of an account's leaves, or None. O(log n) amortised."""
        heap = self._heaps.get(account)
        head = heap.head() if heap is not None else None
        if heap is not None and head is None:
            del self._heaps[account]
        return head

    def pop(self, account: bytes | None = None) -> Node | None:
        """Returns the first leaf of an account, or of all, and forgets it."""
        if account is None and len(self._heaps) == 1:
            (account,) = self._heaps
        elif account is None:
            heads = [(head, each) for each in list(self._heaps) if (head := self.head(each)) is not None]
            account = min(heads)[1] if heads else b""
        heap = self._heaps.get(account)
        return None if heap is None else heap.pop()


class Eviction(AccountHeaps):
    """The leaves that one tier may lose, by account; persistent, never rebuilt per call.

    ``lru`` evicts the least recently used leaf first, by the tree's logical clock; ``priority`` first looks at the highest
    priority of the requests that used a leaf. In both, pages that lie elsewhere too go before the last copies.

    Args:
        order: Of the leaves.
        is_victim: ``ON_DEVICE`` or ``ON_HOST``.

    Attributes:
        age: A node's place among those of equal ``Node.turn``.
    """

    def __init__(self, order: EvictionOrder = "lru", is_victim: Callable[[Node], bool] = ON_DEVICE) -> None:
        first = ("priority",) if order == "priority" else ()
        super().__init__(attrgetter(*first, "turn", "last_used"), is_victim)
        self.age: Callable[[Node], Any] = attrgetter(*first, "last_used")


class TenantShares:
    """Keeps tenants from evicting each other below their shares.

    A share is the tier's pages divided by the number of tenants that have some and were seen lately. Tenants above their
    share lose pages first, least recently used pages first; an unused share is lent, because no page is evicted while
    pages are free.

    Args:
        pages: The tier's.
    """

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._held: dict[bytes, int] = {}
        self._seen: dict[bytes, int] = {}
        self._num_given = 0

    @property
    def held(self) -> dict[bytes, int]:
        """Pages of each account that has some."""
        return self._held

    def charge(self, account: bytes, count: int) -> None:
        """An account has ``count`` pages more, or less."""
        held = self._held.get(account, 0) + count
        assert held >= 0, f"{-held} pages more were given up than {account.hex()} had"
        if held:
            self._held[account] = held
        else:
            self._held.pop(account, None)
        if count < 0:
            self._num_given -= count
        elif account not in self._seen:
            self._seen[account] = self._num_given

    def see(self, account: bytes) -> None:
        """A request of an account came."""
        self._seen[account] = self._num_given
        if len(self._seen) > 4 * MAX_ACCOUNTS:
            self._seen = {each: seen for each, seen in self._seen.items() if each in self._held or each == account}

    def next(self, leaves: AccountHeaps) -> Iterator[tuple[Node, int]]:
        """Takes leaves in the order in which they should go.

        The caller charges the evicted pages before it asks for the next leaf. With one account, this is the order of its leaves.

        Yields:
            A leaf, and how many of its pages its account should give at most.
        """
        if len(self._held) <= 1:
            while (leaf := leaves.pop()) is not None:
                yield leaf, leaf.num_pages
            return
        for floors in self._floors():
            heads: list[tuple[Any, bytes]] = [(leaves.head(account), account) for account in floors]
            heads = [each for each in heads if each[0] is not None]
            heapq.heapify(heads)
            while heads:
                account = heads[0][1]
                excess = self._held.get(account, 0) - floors[account]
                found = leaves.pop(account) if excess > 0 else None
                if found is not None:
                    yield found, excess
                head = leaves.head(account) if found is not None else None
                if head is None:
                    heapq.heappop(heads)
                else:
                    heapq.heapreplace(heads, (head, account))

    def _floors(self) -> Iterator[dict[bytes, int]]:
        """Yields the pages that each account keeps: its share; if that frees too few, the mean, then nothing."""
        capacity = self._pages.num_ready - 1
        since = self._num_given - MAX_IDLE_TURNOVERS * capacity
        active = {account for account in self._held if self._seen[account] >= since}
        share = capacity // max(1, len(active))
        yield {account: share if account in active else 0 for account in self._held}
        mean = sum(self._held.values()) // max(1, len(self._held))
        yield dict.fromkeys(self._held, mean)
        yield dict.fromkeys(self._held, 0)


class EvictionReserve:
    """The next victims of the device that the host has, or need not have.

    A page on both tiers takes the place of another. So other pages leave the host only for as many spare ones as the last
    steps took; as many as the largest steps took become spare where the host has room anyway.

    Args:
        pages: The device's.
        host_pages: The host's.
        eviction: The device's.
        shares: The device's.
        is_kept: Whether there is a host tier; else there is no reserve.
        on_change: Called with each node that became spare or ceased to be: its rank has changed.

    Attributes:
        num_pages: Spare pages.
        num_taken: Device pages taken so far.
    """

    def __init__(
        self,
        pages: PageAllocator,
        host_pages: PageAllocator,
        eviction: Eviction,
        shares: TenantShares,
        *,
        is_kept: bool,
        on_change: Callable[[Node], object],
    ) -> None:
        self._pages = pages
        self._host_pages = host_pages
        self._shares = shares
        self._is_kept = is_kept
        self._on_change = on_change
        self._candidates = AccountHeaps(eviction.age, lambda node: node.is_candidate)
        self._least = self._most = 0.0  # pages that the next steps take
        self._num_seen = 0
        self.num_pages = 0
        self.num_taken = 0

    @property
    def num_short(self) -> int:
        """Pages that should be spare, or free, and are not: another page may go for them."""
        return self._short(self._least)

    @property
    def num_wanted(self) -> int:
        """Pages that should be spare if nothing has to go for them."""
        return self._short(STEPS * self._most)

    def _short(self, wanted: float) -> int:
        most = min(self._pages.num_pages // DEVICE_SHARE, self._host_pages.num_ready // HOST_SHARE)
        return max(0, min(int(wanted), most) - self.num_pages - self._pages.num_free)

    @property
    def has_candidates(self) -> bool:
        """Whether there may be leaves to take into it."""
        return len(self._candidates) > 0

    def end_step(self) -> bool:
        """Ends the count of a step's device pages; returns whether it took any."""
        num_taken = self.num_taken - self._num_seen
        self._num_seen = self.num_taken
        if num_taken:
            self._least = max(num_taken, LEAST_KEPT * self._least)
            self._most = max(num_taken, MOST_KEPT * self._most)
        return num_taken > 0

    def add(self, node: Node) -> None:
        """Records that a leaf became evictable, or was used while it was."""
        if self._is_kept and not node.is_spare:
            self._candidates.add(node)

    def sweep(self) -> None:
        """Drops leaves that are none any more."""
        self._candidates.sweep()

    def next(self) -> Node | None:
        """Returns the leaf that goes next of those that are not spare, and forgets it."""
        return next((leaf for leaf, _ in self._shares.next(self._candidates)), None)

    def mark(self, leaf: Node) -> None:
        """Makes a leaf spare that may go at no loss, and the parents that were used with it and go after it."""
        marked = [leaf]
        while (parent := marked[-1].parent) is not None and self._goes_with(parent, leaf):
            marked.append(parent)
        for node in marked:
            node.is_spare = True
            self.num_pages += node.num_pages
            self._on_change(node)

    def leave(self, node: Node, count: int | None = None) -> None:
        """A node was used, or loses its last ``count`` pages, or all."""
        if node.is_spare:
            self.num_pages -= node.num_pages if count is None else count
            node.is_spare = count is not None and count < node.num_pages
            if not node.is_spare:
                self._on_change(node)

    def leave_path(self, node: Node) -> None:
        """Makes a node spare no more, nor the parents that would have gone after it."""
        step: Node | None = node
        while step is not None and step.is_spare:
            self.leave(step)
            step = step.parent

    @staticmethod
    def _goes_with(parent: Node, leaf: Node) -> bool:
        is_last = parent.num_device_children == 1 and not parent.num_locks and parent.last_used == leaf.last_used
        return is_last and not (parent.is_root or parent.is_spare or parent.is_unbacked)
