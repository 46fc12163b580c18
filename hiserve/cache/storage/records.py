"""The record of each host page, with its checksum, written so that a crash at any moment leaves only true records."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hiserve.core.digest import DIGEST_BYTES, Chain, chain, pack_tokens
from hiserve.core.plan import Int32Array, Int64Array
from hiserve.core.transfers import PageRun, TailImage

NO_CHECKSUM = 0
RecordArray = NDArray[np.void]


class PageState(IntEnum):
    """State of a host page: FREE, WRITING while it is copied, VALID."""

    FREE = 0
    WRITING = 1
    VALID = 2


def record_type(page_size: int) -> np.dtype[np.void]:
    """Returns the type of one record; its size is a multiple of 8 bytes, so that no counter straddles a cache line."""
    digest = ("u1", (DIGEST_BYTES,))
    return np.dtype(
        [
            ("state", "<u8"),
            ("checksum", "<u8"),
            ("draft_revision", "<u8"),
            ("retained_until_s", "<i8"),
            ("part", "<u4"),  # of a frame: its place in its tail
            ("num_parts", "<u4"),  # of a frame: those of its tail, at least 1; 0 of a page of history
            ("namespace", *digest),
            ("parent", *digest),
            ("digest", *digest),
            ("tokens", "<i4", (page_size + page_size % 2,)),
        ]
    )


class Records:
    """The records of a segment. One process writes at a time; its threads may share this object.

    Crash safety: a record stops being VALID before any other field of its page changes, and becomes VALID
    after all others are written; its checksum is written last. The time until which it is retained changes in any state. A
    process dies between two instructions, so the next one sees the writes in this order.

    Args:
        table: ``[num_pages]`` of ``record_type(page_size)``; usually a view of a segment.
        page_size: Tokens per page.
        link: Computes the digests of pages (``core.digest.chain_of``).

    Attributes:
        num_used: Pages that are WRITING or VALID, since ``recover`` or ``clear``.
    """

    def __init__(self, table: RecordArray, page_size: int, link: Chain = chain) -> None:
        assert table.dtype == record_type(page_size), f"records of {table.itemsize} bytes, page size {page_size}"
        self._table = table
        self._fields: dict[str, NDArray[Any]] = {name: table[name] for name in table.dtype.names or ()}
        self._fields["tokens"] = table["tokens"][:, :page_size]
        self._page_size = page_size
        self._link = link
        self.num_used = 0
        self._tails: list[TailImage] = []
        self._generations = np.zeros(table.size, dtype=np.int64)  # times that this process began or freed a page
        self._lock = threading.Lock()

    def begin(self, run: PageRun) -> None:
        """FREE to WRITING: these pages may now be written."""
        pages = run.pages
        assert pages.size == len(run.digests) > 0, f"{len(run.digests)} digests for {pages.size} pages"
        tokens = np.frombuffer(run.key, dtype="<i4").reshape(pages.size, self._page_size)
        with self._lock:
            self._expect(pages, self._fields["state"][pages] == PageState.FREE, "FREE")
            self.num_used += pages.size
            self._generations[pages] += 1
            self._write("state", pages, PageState.WRITING)
            self._write("checksum", pages, NO_CHECKSUM)
            self._write("draft_revision", pages, run.draft_revision)
            self._write("retained_until_s", pages, run.retained_until_s)
            self._write("part", pages, 0)
            self._write("num_parts", pages, 0)
            self._write("namespace", pages, _rows([run.namespace]))
            self._write("parent", pages, _rows([run.parent, *run.digests[:-1]]))
            self._write("digest", pages, _rows(run.digests))
            self._write("tokens", pages, tokens)

    def begin_tail(self, image: TailImage) -> None:
        """FREE to WRITING: these frames of a tail may now be written. Each has the digest of the page before its boundary."""
        frames = image.frames
        with self._lock:
            self._expect(frames, self._fields["state"][frames] == PageState.FREE, "FREE")
            self.num_used += frames.size
            self._generations[frames] += 1
            self._write("state", frames, PageState.WRITING)
            self._write("checksum", frames, NO_CHECKSUM)
            self._write("retained_until_s", frames, 0)
            self._write("part", frames, np.arange(frames.size))
            self._write("num_parts", frames, frames.size)
            self._write("namespace", frames, _rows([image.namespace]))
            self._write("digest", frames, _rows([image.digest]))

    def finish(self, pages: Int32Array) -> None:
        """WRITING to VALID: all bytes have arrived. Without a checksum, a restart does not recover these pages."""
        with self._lock:
            self._expect(pages, self._fields["state"][pages] == PageState.WRITING, "WRITING")
            self._write("state", pages, PageState.VALID)

    def retain(self, pages: Int32Array, until_s: Int64Array) -> None:
        """Records until when each of these pages is retained, int64 ``[n]``; ``begin`` forgets it."""
        with self._lock:
            self._write("retained_until_s", pages, until_s)

    def free(self, pages: Int32Array) -> None:
        """WRITING or VALID to FREE: these pages may be allocated again."""
        with self._lock:
            self._expect(pages, self._fields["state"][pages] != PageState.FREE, "in use")
            self.num_used -= pages.size
            self._generations[pages] += 1
            self._write("state", pages, PageState.FREE)

    def clear(self) -> None:
        """Frees every page, also those of a former process."""
        with self._lock:
            self._generations += 1
            self.num_used = 0
            self._write("state", np.arange(self._table.size, dtype=np.int32), PageState.FREE)

    def in_use(self, pages: Int32Array) -> NDArray[np.bool_]:
        """Whether each page is WRITING or VALID."""
        return np.asarray(self._fields["state"][pages] != PageState.FREE)

    def state(self, page: int) -> PageState:
        """Returns the state of a page."""
        return PageState(int(self._fields["state"][page]))

    def checksum(self, page: int) -> int:
        """Returns the checksum of a page's bytes, or ``NO_CHECKSUM``."""
        return int(self._fields["checksum"][page])

    def digest(self, page: int) -> bytes:
        """Returns the digest of a page; meaningless while the page is FREE."""
        return bytes(self._fields["digest"][page])

    def identities(self, pages: Int32Array) -> NDArray[np.uint8]:
        """Returns what tells the content of pages in use: uint8 ``[n, k]`` of namespace, digest and place in a tail."""
        places = [self._fields[name][pages].astype("<u4")[:, None].view(np.uint8) for name in ("part", "num_parts")]
        return np.concatenate([self._fields["namespace"][pages], self._fields["digest"][pages], *places], 1)

    def unsealed(self, pages: Int32Array) -> tuple[Int32Array, NDArray[np.int64], list[bytes]]:
        """Returns the VALID pages without a checksum, their generations, and their digests."""
        with self._lock:
            fields = self._fields
            lacks = (fields["state"][pages] == PageState.VALID) & (fields["checksum"][pages] == NO_CHECKSUM)
            ours = pages[lacks]
            return ours, self._generations[ours], [bytes(digest) for digest in fields["digest"][ours]]

    def seal(self, pages: Int32Array, generations: NDArray[np.int64], checksums: Sequence[int]) -> Int32Array:
        """Records checksums, except of pages that were freed since ``unsealed``; returns the sealed pages.

        Args:
            pages: int32 ``[n]``.
            generations: int64 ``[n]``, from ``unsealed``.
            checksums: Of each page's bytes.
        """
        values = np.array(checksums, dtype=np.uint64)
        assert (values != NO_CHECKSUM).all(), f"one of {pages} cannot have the checksum that stands for none"
        with self._lock:
            is_same = self._generations[pages] == generations
            ours: Int32Array = pages[is_same]
            self._write("checksum", ours, values[is_same])
            return ours

    def recover(self) -> list[PageRun]:
        """Recovers the pages of a former process: its VALID pages with a checksum, parents first.

        All others are freed: torn and unfinished records, records whose digest does not follow from
        their parent and tokens, second copies, and pages whose parents are missing. The bytes of a
        recovered page are not read; they must be verified before the first use. Tails whose frames are all there, and
        whose history is, are recovered too: see ``tails``.

        Returns:
            Unbranched runs; the parent of each is a namespace or is in an earlier run.
        """
        runs = list(_runs(_valid_records(self._table, self._page_size, self._link)))
        kept = np.zeros(self._table.size, dtype=np.bool_)
        for run in runs:
            kept[run.pages] = True
        self._tails = whole_tails(self._table, {digest for run in runs for digest in run.digests})
        for tail in self._tails:
            kept[tail.frames] = True
        with self._lock:
            self.num_used = int(np.count_nonzero(kept))
            self._write("state", np.flatnonzero(~kept).astype(np.int32), PageState.FREE)
        return runs

    def tails(self) -> list[TailImage]:
        """Returns the tails that ``recover`` has found."""
        return self._tails

    def _expect(self, pages: Int32Array, is_right: NDArray[np.bool_], state: str) -> None:
        assert is_right.all(), f"pages {pages[~is_right]} are not {state}"
        assert pages.min(initial=1) >= 1, "page 0 is never used"

    def _write(self, field: str, pages: Int32Array, value: Any) -> None:
        """Writes one field of some records. All writes use this method, and their order matters."""
        self._fields[field][pages] = value


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """One record read back."""

    page: int
    namespace: bytes
    parent: bytes
    digest: bytes
    key: bytes
    draft_revision: int
    retained_until_s: int

    @property
    def numbers(self) -> tuple[int, int]:
        """The numbers that all pages of a run share."""
        return self.draft_revision, self.retained_until_s


def _valid_records(table: RecordArray, page_size: int, link: Chain) -> Iterator[_Record]:
    """Yields the VALID records with a checksum whose digest follows from their parent and tokens."""
    found = _sealed(table, of_tails=False)
    rows = table[found]
    columns = [rows[name].tobytes() for name in ("namespace", "parent", "digest")]
    keys = pack_tokens(rows["tokens"][:, :page_size])
    stride = 4 * page_size
    numbers = zip(found.tolist(), rows["draft_revision"].tolist(), rows["retained_until_s"].tolist(), strict=True)
    for index, (page, revision, until_s) in enumerate(numbers):
        namespace, parent, digest = (column[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)] for column in columns)
        key = keys[stride * index : stride * (index + 1)]
        if page and link(parent, key, page_size) == [digest]:
            yield _Record(page, namespace, parent, digest, key, revision, until_s)


def _sealed(table: RecordArray, *, of_tails: bool) -> NDArray[np.intp]:
    """Returns the VALID pages with a checksum, of history or of tails."""
    is_sealed = (table["state"] == PageState.VALID) & (table["checksum"] != NO_CHECKSUM)
    return np.flatnonzero(is_sealed & ((table["num_parts"] > 0) == of_tails))


def whole_tails(table: RecordArray, history: Set[bytes]) -> list[TailImage]:
    """Returns the tails of which every frame is VALID with a checksum, behind pages with these digests."""
    found: dict[tuple[bytes, bytes, int], dict[int, int]] = {}
    for page in _sealed(table, of_tails=True).tolist():
        record = table[page]
        name = bytes(record["namespace"]), bytes(record["digest"]), int(record["num_parts"])
        if page and name[1] in history:
            found.setdefault(name, {}).setdefault(int(record["part"]), page)
    tails = []
    for (namespace, digest, num_parts), parts in found.items():
        if parts.keys() == set(range(num_parts)):
            frames = np.array([parts[part] for part in range(num_parts)], dtype=np.int32)
            tails.append(TailImage(frames, namespace, digest, int(table["retained_until_s"][frames].min())))
    return tails


def _rows(digests: list[bytes]) -> NDArray[np.uint8]:
    """Returns digests as uint8 ``[n, 16]``."""
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)


def _runs(records: Iterable[_Record]) -> Iterator[PageRun]:
    """Yields runs from the namespaces down; a run ends where the prefix branches or ends, or a number of its pages changes."""
    below: dict[tuple[bytes, bytes], dict[bytes, _Record]] = {}
    for record in records:
        below.setdefault((record.namespace, record.parent), {}).setdefault(record.digest, record)
    starts = [record for (namespace, parent), rows in below.items() if parent == namespace for record in rows.values()]
    while starts:
        run = [starts.pop()]
        while True:
            end = run[-1]
            # Popped, so that digests that form a ring, as in a forged segment, end.
            children = list(below.pop((end.namespace, end.digest), {}).values())
            if len(children) != 1 or children[0].numbers != end.numbers:
                break
            run += children
        starts += children
        yield PageRun(
            pages=np.array([record.page for record in run], dtype=np.int32),
            namespace=run[0].namespace,
            parent=run[0].parent,
            digests=[record.digest for record in run],
            key=b"".join(record.key for record in run),
            draft_revision=run[0].draft_revision,
            retained_until_s=run[0].retained_until_s,
        )
