"""A host tier that outlives its process: a named segment with its records, as the copy engines keep them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hiserve.cache.storage.checksums import page_checksum
from hiserve.cache.storage.records import Records
from hiserve.cache.storage.segment import Segment, SegmentLayout, segment_path
from hiserve.core.digest import namespace_digest
from hiserve.core.plan import Int32Array, Int64Array
from hiserve.core.transfers import PageRun

NAME = "machine"
PAGE_BYTES = 64


class Shelf:
    """Keeps the real records of host pages, and a plain account of what they must say.

    Args:
        directory: Stands for /dev/shm.
        page_size: Tokens per page.
        num_pages: Host pages, page 0 included.

    Attributes:
        unsealed: Pages that have arrived and have no checksum yet.
        sealed: Pages that have one: what a restart finds.
    """

    def __init__(self, directory: Path, page_size: int, num_pages: int) -> None:
        self._directory = directory
        self._layout = SegmentLayout(namespace_digest("a model"), page_size, PAGE_BYTES, num_pages)
        self.unsealed: set[int] = set()
        self.sealed: set[int] = set()
        segment_path(NAME, directory).unlink(missing_ok=True)
        self._open()

    def _open(self) -> None:
        self._segment = Segment.named(NAME, self._layout, self._directory)
        self._records = Records(self._segment.records, self._layout.page_size)

    def close(self) -> None:
        """The process ends."""
        del self._records
        self._segment.close()

    def restart(self) -> list[PageRun]:
        """The process dies, and the next one adopts."""
        self.close()
        self._open()
        self.unsealed.clear()
        return self._records.recover()

    def begin(self, run: PageRun) -> None:
        """Bytes are on their way."""
        self._records.begin(run)
        for page, digest in zip(run.pages.tolist(), run.digests, strict=True):
            self._segment.pages[page] = np.frombuffer(digest * (PAGE_BYTES // len(digest)), dtype=np.uint8)

    def finish(self, pages: Int32Array) -> None:
        """They have arrived."""
        self._records.finish(pages)
        self.unsealed |= set(pages.tolist())

    def seal(self, pages: set[int]) -> None:
        """They got their checksums."""
        ours, lives, _ = self._records.unsealed(np.array(sorted(pages), dtype=np.int32))
        sealed = self._records.seal(ours, lives, [self._checksum(page) for page in ours.tolist()])
        assert set(sealed.tolist()) == pages
        self.unsealed -= pages
        self.sealed |= pages

    def retain(self, pages: Int32Array, until_s: Int64Array) -> None:
        """The index retains them."""
        self._records.retain(pages, until_s)

    def free(self, pages: Int32Array) -> None:
        """The index gave them back."""
        self._records.free(pages[self._records.in_use(pages)])
        self.unsealed -= set(pages.tolist())
        self.sealed -= set(pages.tolist())

    def keep(self, pages: set[int]) -> None:
        """Of what a restart found, these were adopted."""
        self.sealed &= pages

    def is_intact(self, page: int) -> bool:
        """Whether the bytes are those that the checksum, if there is one, was made of."""
        return self._records.checksum(page) in (0, self._checksum(page))

    def _checksum(self, page: int) -> int:
        return page_checksum(memoryview(self._segment.pages[page]), self._records.digest(page))
