"""The order of eviction: leaves by rank, the shares of tenants, and the reserve of pages that the device can evict without loss."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.nodes import Node, Tail
from hiserve.config.caching import EvictionOrder

ON_DEVICE: Callable[[Node], bool] = attrgetter("is_evictable")
ON_HOST: Callable[[Node | Tail], bool] = attrgetter("is_host_evictable")

MAX_ACCOUNTS = 64  # with shares of their own; all others have one together
MAX_IDLE_TURNOVERS = 32  # an account without requests while the whole tier was evicted so often has no share

STEPS = 2  # an offload that one step begins has ended when the step after the next allocates pages
# The demand of a large step decays by these factors at each smaller step, for the least and the most spare pages. The least
# decays fast: spare pages that are not taken cost more hits than the pages that a sudden large step loses.
LEAST_KEPT, MOST_KEPT = 1 - 1 / 2, 1 - 1 / 512
DEVICE_SHARE, HOST_SHARE = 4, 2  # of the pages of each tier, one in so many may be spare


class Evictable(Protocol):
    """A leaf of the tree, or a tail."""

    @property
    def account(self) -> bytes:
        """Charged for its pages."""

    @property
    def num_pages(self) -> int:
        """Pages that its eviction frees, at most."""


T = TypeVar("T", bound=Evictable)


class LeafHeap(Generic[T]):
    """Leaves, or tails, by rank, lowest first.

    A heap with lazy deletion: an entry is current while its node is a victim of the rank that it was added with. Entries
    out of date are removed when they reach the top, and all at once when they outnumber the others, so the heap stays
    within a constant factor of the leaves.

    Args:
        rank: A node's rank; a node is added again after each change.
        is_victim: Whether a node belongs to the heap.
    """

    def __init__(self, rank: Callable[[T], Any], is_victim: Callable[[T], bool]) -> None:
        self._rank = rank
        self._is_victim = is_victim
        self._heap: list[tuple[Any, int, T]] = []
        self._serial = 0
        self._sweep_at = 1024

    def __len__(self) -> int:
        """Returns the number of entries, those out of date included."""
        return len(self._heap)

    def __iter__(self) -> Iterator[T]:
        """Walks the nodes of current entries (for tests)."""
        return (entry[2] for entry in self._heap if self._counts(entry))

    def add(self, node: T) -> None:
        """Adds a node that became a victim, or changed its rank. O(log n)."""
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

    def pop(self) -> T | None:
        """Removes and returns the leaf of the lowest rank; of equals, the first added. O(log n) amortised."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._counts(entry):
                return entry[2]
        return None

    def _counts(self, entry: tuple[Any, int, T]) -> bool:
        rank, _, node = entry
        is_current: bool = self._rank(node) == rank
        return is_current and self._is_victim(node)

    def sweep(self) -> None:
        """Removes all entries out of date. O(n log n)."""
        latest = {id(entry[2]): entry for entry in self._heap if self._counts(entry)}
        self._heap = sorted(latest.values(), key=lambda entry: entry[:2])
        self._sweep_at = max(1024, 2 * len(self._heap))


class AccountHeaps(Generic[T]):
    """Leaves, or tails, by rank, a heap for each account; arguments as of ``LeafHeap``."""

    def __init__(self, rank: Callable[[T], Any], is_victim: Callable[[T], bool]) -> None:
        self._rank = rank
        self._is_victim = is_victim
        self._heaps: dict[bytes, LeafHeap[T]] = {}

    def __len__(self) -> int:
        """Returns the number of entries, those out of date included."""
        return sum(len(heap) for heap in self._heaps.values())

    def __iter__(self) -> Iterator[T]:
        """Walks the nodes of current entries (for tests)."""
        return (node for heap in self._heaps.values() for node in heap)

    def add(self, node: T) -> None:
        """Adds a node that became a victim, or changed its rank. O(log n)."""
        heap = self._heaps.get(node.account)
        if heap is None:
            account, is_victim = node.account, self._is_victim
            # A node may have got another account (see ``CacheTiers.assign_account``).
            heap = self._heaps[account] = LeafHeap(self._rank, lambda leaf: leaf.account == account and is_victim(leaf))
        heap.add(node)

    def sweep(self) -> None:
        """Removes all entries out of date, so that their nodes can be collected. O(n log n)."""
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

    def pop(self, account: bytes | None = None) -> T | None:
        """Removes and returns the first leaf of an account, or of all."""
        if account is None and len(self._heaps) == 1:
            (account,) = self._heaps
        elif account is None:
            heads = [(head, each) for each in list(self._heaps) if (head := self.head(each)) is not None]
            account = min(heads)[1] if heads else b""
        heap = self._heaps.get(account)
        return None if heap is None else heap.pop()


class Eviction(AccountHeaps[T]):
    """The leaves, and on the host the tails, that one tier may evict, by account.

    ``lru`` evicts the least recently used leaf first, by the tree's logical clock; ``priority`` orders first by the highest
    priority of the requests that used a leaf. Both evict pages that are on another tier before last copies, and retained
    leaves after all others, of these the one first whose retention ends first.

    Args:
        order: Of the leaves.
        is_victim: ``ON_DEVICE`` or ``ON_HOST``.

    Attributes:
        age: A node's rank among those of equal ``Node.eviction_cost``.
    """

    def __init__(self, order: EvictionOrder = "lru", is_victim: Callable[[Any], bool] = ON_DEVICE) -> None:
        first = ("retained_until_s", "priority") if order == "priority" else ("retained_until_s",)
        super().__init__(attrgetter(*first, "eviction_cost", "last_used"), is_victim)
        self.age: Callable[[T], Any] = attrgetter(*first, "last_used")


class TenantShares:
    """Keeps accounts from evicting each other's pages below their shares.

    A share is the tier's pages divided by the number of accounts that have pages and had a request lately. Pages of
    accounts above their share are evicted first, least recently used first. Others may use a free part of a share: no page
    is evicted while pages are free.
    """

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._held: dict[bytes, int] = {}
        self._seen: dict[bytes, int] = {}
        self._num_given = 0

    @property
    def held(self) -> dict[bytes, int]:
        """Pages of each account that has any."""
        return self._held

    def charge(self, account: bytes, count: int) -> None:
        """Counts pages that an account gained, or lost (``count`` < 0)."""
        held = self._held.get(account, 0) + count
        assert held >= 0, f"{-held} pages too many were freed of {account.hex()}"
        if held:
            self._held[account] = held
        else:
            self._held.pop(account, None)
        if count < 0:
            self._num_given -= count
        elif account not in self._seen:
            self._seen[account] = self._num_given

    def see(self, account: bytes) -> None:
        """Records a request of an account."""
        self._seen[account] = self._num_given
        if len(self._seen) > 4 * MAX_ACCOUNTS:
            self._seen = {each: seen for each, seen in self._seen.items() if each in self._held or each == account}

    def next(self, leaves: AccountHeaps[T]) -> Iterator[tuple[T, int]]:
        """Removes leaves in the order of eviction.

        The caller charges the evicted pages before it takes the next leaf. With one account, this is the order of its leaves.

        Yields:
            A leaf, and the most of its pages to evict.
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
        """Yields the pages that each account keeps: its share; if that frees too few, the mean, then none."""
        capacity = self._pages.num_ready - 1
        since = self._num_given - MAX_IDLE_TURNOVERS * capacity
        active = {account for account in self._held if self._seen[account] >= since}
        share = capacity // max(1, len(active))
        yield {account: share if account in active else 0 for account in self._held}
        mean = sum(self._held.values()) // max(1, len(self._held))
        yield dict.fromkeys(self._held, mean)
        yield dict.fromkeys(self._held, 0)


class EvictionReserve:
    """Spare leaves: the next to evict from the device, which are on the host or not worth an offload.

    A spare page occupies a page of both tiers. So the host evicts last copies only for as many spare pages as the last
    steps allocated; where it has room, as many as the largest steps allocated become spare.

    Args:
        pages: Of the device.
        host_pages: Of the host.
        eviction: Of the device.
        shares: Of the device.
        is_kept: Whether there is a host tier; else there is no reserve.
        on_change: Called with each node that became spare, or no longer is: its rank has changed.

    Attributes:
        num_pages: Spare pages.
        num_taken: Device pages allocated so far.
    """

    def __init__(
        self,
        pages: PageAllocator,
        host_pages: PageAllocator,
        eviction: Eviction[Node],
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
        self._least = self._most = 0.0  # pages that the next steps will allocate
        self._num_seen = 0
        self.num_pages = 0
        self.num_taken = 0

    @property
    def num_short(self) -> int:
        """Pages missing from the least reserve: the host may evict last copies for them."""
        return self._short(self._least)

    @property
    def num_wanted(self) -> int:
        """Pages missing from the full reserve: the host evicts no last copy for them."""
        return self._short(STEPS * self._most)

    def _short(self, wanted: float) -> int:
        most = min(self._pages.num_pages // DEVICE_SHARE, self._host_pages.num_ready // HOST_SHARE)
        return max(0, min(int(wanted), most) - self.num_pages - self._pages.num_free)

    @property
    def is_outrun(self) -> bool:
        """Whether a step took more than may be spare: what it evicts is lost, unless that was offloaded while it was in use.

        Only of a large host: one that holds little more than the device had better hold other pages.
        """
        is_small = self._host_pages.num_ready < HOST_SHARE * self._pages.num_pages
        return self._is_kept and not is_small and self._most > self._pages.num_pages // DEVICE_SHARE

    @property
    def has_candidates(self) -> bool:
        """Whether there may be leaves to make spare."""
        return len(self._candidates) > 0

    def end_step(self) -> bool:
        """Ends the count of a step's device pages; returns whether it allocated any."""
        num_taken = self.num_taken - self._num_seen
        self._num_seen = self.num_taken
        if num_taken:
            self._least = max(num_taken, LEAST_KEPT * self._least)
            self._most = max(num_taken, MOST_KEPT * self._most)
        return num_taken > 0

    def add(self, node: Node) -> None:
        """Adds a leaf that became evictable, or was used while it was evictable."""
        if self._is_kept and not node.is_spare:
            self._candidates.add(node)

    def sweep(self) -> None:
        """Removes entries out of date."""
        self._candidates.sweep()

    def next(self) -> Node | None:
        """Removes and returns the next leaf to evict of those that are not spare."""
        return next((leaf for leaf, _ in self._shares.next(self._candidates)), None)

    def mark(self, leaf: Node) -> None:
        """Makes a leaf spare, and the parents that were used with it and are evicted after it."""
        marked = [leaf]
        while (parent := marked[-1].parent) is not None and self._goes_with(parent, leaf):
            marked.append(parent)
        for node in marked:
            node.is_spare = True
            self.num_pages += node.num_pages
            self._on_change(node)

    def leave(self, node: Node, count: int | None = None) -> None:
        """Removes a used node, or its last ``count`` pages."""
        if node.is_spare:
            self.num_pages -= node.num_pages if count is None else count
            node.is_spare = count is not None and count < node.num_pages
            if not node.is_spare:
                self._on_change(node)

    def leave_path(self, node: Node) -> None:
        """Removes a node, and the parents that would have been evicted after it."""
        step: Node | None = node
        while step is not None and step.is_spare:
            self.leave(step)
            step = step.parent

    @staticmethod
    def _goes_with(parent: Node, leaf: Node) -> bool:
        is_last = parent.num_device_children == 1 and not parent.num_locks and parent.last_used == leaf.last_used
        is_last = is_last and parent.retained_until_s == leaf.retained_until_s
        return is_last and not (parent.is_root or parent.is_spare or parent.is_unbacked)
