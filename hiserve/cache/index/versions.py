"""The two counters: when a match may be stale, and when a page address may be."""

from __future__ import annotations


class Versions:
    """Two counters that answer two different questions.

    Attributes:
        tree_epoch: Grows when the result of a match could change (insert, load, demote, evict, flush). A
            match made under another epoch must be made again. Graphs never look at it.
        relocation_version: Grows when the device address of bytes that a live request owns
            changes: its copy gave way to another's, or a load that was to bring them failed. Metadata built
            under an older one is stale for the rows concerned. Ordinary allocation and release leave it alone.
    """

    __slots__ = ("relocation_version", "tree_epoch")

    def __init__(self) -> None:
        self.tree_epoch = 1
        self.relocation_version = 1
