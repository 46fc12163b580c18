"""Copies of pages between tiers: orders of the planning half, and their acknowledgements."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class CopyKind(IntEnum):
    """The direction of a copy."""

    LOAD = 0  # host to device
    OFFLOAD = 1  # device to host
    PREFETCH = 2  # store to host
    UPLOAD = 3  # host to store
    STAGE = 4  # device to host, on the way to the store: in the index alone, ordered as an OFFLOAD


DEVICE_KINDS = (CopyKind.LOAD, CopyKind.OFFLOAD)
NO_PAGES: NDArray[np.int32] = np.empty(0, dtype=np.int32)
NO_PAGES.setflags(write=False)
STORE_LANES = 4  # lookups and prefetches that run at once
# Staging memory of a CUDA device for large pages, both directions together. Other copies wait for the copy engine during a
# piece, a fifth of this memory at least. But enqueuing a piece takes the GIL from the thread that launches forwards: with
# pieces of 16 MiB a step took twice as long.
STAGING_BYTES = 160 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PageRun:
    """Adjacent full pages of a prefix, and their content.

    Attributes:
        pages: int32 ``[n]``. Host pages, first to last; n is at least 1.
        namespace: 16 bytes. Digest of the root of the prefix.
        parent: 16 bytes. Digest of the page before the first; ``namespace`` where there is none.
        digests: One chain digest per page (see ``core.digest.chain``).
        key: Packed int32 tokens of all pages.
        draft_revision: Revision of the draft head that wrote the draft part, 0 to 2**64 - 1; 0 where it is not valid.
        retained_until_s: Of recovered pages: the time until which their process retained them; 0 where it did not.
    """

    pages: NDArray[np.int32]
    namespace: bytes
    parent: bytes
    digests: list[bytes]
    key: bytes
    draft_revision: int = 0
    retained_until_s: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TailImage:
    """A tail on the host: the images of its window pages and of its snapshot, and the boundary that they belong to.

    Attributes:
        frames: int32 ``[n]``. Host pages, first to last: as many for each window page as hold its bytes, then as many as
            hold a snapshot.
        namespace: 16 bytes. Digest of the root of the prefix.
        digest: 16 bytes. Of the page before the boundary.
        retained_until_s: Of a recovered tail: the time until which its process retained it; 0 where it did not.
        history: Digests of all pages before the boundary, first to last; empty of a copy that is not of a store.
    """

    frames: NDArray[np.int32]
    namespace: bytes
    digest: bytes
    retained_until_s: int = 0
    history: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PageCopy:
    """An order to copy pages, a tail, or pages and the tail at their end. Every order is answered by one ``CopyAck``.

    Attributes:
        op: Number of the order, monotone from 1.
        kind: Direction.
        device_pages: int32 ``[n]``; empty for a copy between host and store, and of a tail alone.
        host_pages: int32 ``[n]``. The partner of each device page.
        after_step: The copy may begin when the forward of this step is done: the last one that may touch the device
            pages before a LOAD, the one that wrote them before an OFFLOAD. 0 is at once.
        run: Content of the host pages; None of a LOAD, and of a tail alone.
        window_pages: int32 ``[w]``. Window pages of the tail; empty without one.
        image: The tail's partner on the host; None without one.
        slots: int32 ``[1]``. The slot of the tail's snapshot; empty without one.
    """

    op: int
    kind: CopyKind
    device_pages: NDArray[np.int32]
    host_pages: NDArray[np.int32]
    after_step: int
    run: PageRun | None = None
    window_pages: NDArray[np.int32] = field(default_factory=lambda: NO_PAGES)
    image: TailImage | None = None
    slots: NDArray[np.int32] = field(default_factory=lambda: NO_PAGES)

    @property
    def num_host_pages(self) -> int:
        """Host pages that it reads or writes, frames included."""
        return self.host_pages.size + (0 if self.image is None else self.image.frames.size)

    @property
    def is_tail_alone(self) -> bool:
        """Whether it copies a tail without history."""
        return self.image is not None and not self.host_pages.size

    @property
    def all_host_pages(self) -> NDArray[np.int32]:
        """They themselves, int32 ``[num_host_pages]``."""
        return self.host_pages if self.image is None else np.concatenate((self.host_pages, self.image.frames))


@dataclass(frozen=True, slots=True, eq=False)
class StoreLookup:
    """A lookup of the leading pages of a prompt that a store has. Answered once, by ``StoreEnds``.

    Attributes:
        uid: The request.
        digests: Of the pages, at least one, in the order of their prefix.
        num_here: Leading pages that are cached: the store needs a tail behind them, and not them.
        needs_tail: Whether boundaries need tails.
    """

    uid: int
    digests: list[bytes]
    num_here: int = 0
    needs_tail: bool = False


# Of the answer to a lookup: its uid, and where what the store has can end, in pages, ascending. Where boundaries need tails, the
# deepest ones with a tail; else the number of pages. Empty if it has nothing.
StoreEnds = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CopyAck:
    """The end of a copy, which no longer reads or writes any page."""

    op: int
    reason: str = ""  # of a failure, one word for a counter; empty if all bytes arrived
    num_bytes: int = 0
    seconds: float = 0.0  # duration, without waits
    num_pages: int = 0  # leading pages of a PREFETCH that arrived, and all frames of its tail if that did, behind them

    @property
    def is_ok(self) -> bool:
        """Whether all bytes arrived."""
        return not self.reason
