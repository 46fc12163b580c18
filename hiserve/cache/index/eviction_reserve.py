"""Leaves that the device can lose at no loss, kept ready for the next steps."""

from __future__ import annotations

from collections.abc import Callable

from hiserve.cache.index.eviction import OwnedHeaps
from hiserve.cache.index.node import Node
from hiserve.cache.index.tier import TierPages

STEPS = 2  # a store that one step begins has ended when the step after the next takes pages
# What is remembered of a large step fades by so much at each smaller one: for the least, the most. The least follows what
# steps take closely: pages kept ready for longer cost more hits than the pages that a sudden large step loses.
FADE = (1 / 2, 1 / 512)
DEVICE_SHARE, HOST_SHARE = 4, 2  # of the pages of a tier, one in so many may be spare: both tiers hold them


class EvictionReserve:
    """The next victims of the device, as far as the host has them or does not want them.

    What is on both tiers is a page less for something else. So other pages leave the host only for the sake of as many
    spare ones as the last steps took; as many as the largest steps took become spare where the host has room anyway.

    Args:
        device: The device's pages.
        host: The host's.
        is_kept: Whether there is a host tier; else there is no reserve.
        on_change: Hears of a node that became spare, or is spare no more: its place among others has changed.

    Attributes:
        num_pages: Spare pages.
        num_taken: Device pages taken so far.
    """

    def __init__(
        self, device: TierPages, host: TierPages, *, is_kept: bool, on_change: Callable[[Node], object]
    ) -> None:
        self._device = device
        self._host = host
        self._is_kept = is_kept
        self._on_change = on_change
        self._candidates = OwnedHeaps(device.eviction.age, lambda node: node.is_candidate)
        self._demand = [0.0, 0.0]
        self._num_seen = 0
        self.num_pages = 0
        self.num_taken = 0

    @property
    def num_short(self) -> int:
        """Pages that should be spare, or free, and are not: another page may go for them."""
        return self._short(self._demand[0])

    @property
    def num_wanted(self) -> int:
        """Pages that should be spare if nothing has to go for them."""
        return self._short(STEPS * self._demand[1])

    def _short(self, wanted: float) -> int:
        most = min(self._device.pages.num_pages // DEVICE_SHARE, self._host.pages.num_ready // HOST_SHARE)
        return max(0, min(int(wanted), most) - self.num_pages - self._device.pages.num_free)

    @property
    def has_candidates(self) -> bool:
        """Whether there may be leaves to take into it."""
        return len(self._candidates) > 0

    def end_step(self) -> bool:
        """A step was planned, which took what it needed; returns whether it took anything."""
        num_taken = self.num_taken - self._num_seen
        self._num_seen = self.num_taken
        if num_taken:
            self._demand = [max(num_taken, (1 - fade) * each) for fade, each in zip(FADE, self._demand, strict=True)]
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
        return next((leaf for leaf, _ in self._device.shares.next(self._candidates)), None)

    def mark(self, leaf: Node) -> None:
        """Makes a leaf spare that may go at no loss, and what was used with it and goes after it."""
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
        """A node may not go at no loss any more, nor what would have gone after it."""
        step: Node | None = node
        while step is not None and step.is_spare:
            self.leave(step)
            step = step.parent

    @staticmethod
    def _goes_with(parent: Node, leaf: Node) -> bool:
        is_last = parent.num_device_children == 1 and not parent.num_locks and parent.last_used == leaf.last_used
        return is_last and not (parent.is_root or parent.is_spare or parent.is_unbacked)
