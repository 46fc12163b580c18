"""Page-table entries that the device has not been told of yet."""

from __future__ import annotations

import numpy as np

from hiserve.core.plan import Int32Array, TableWrites


class TableJournal:
    """Collects entries between two plans.

    A relocation may wait here while its row changes hands; then it must not reach the next
    tenant, so every entry remembers the tenancy it was made for.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Int32Array, Int32Array]] = []

    def write(self, row: int, admission: int, indices: Int32Array, pages: Int32Array) -> None:
        """Records that ``indices`` of the row's table are now ``pages``; both int32 ``[n]``."""
        if pages.size:
            self._entries.append((row, admission, indices, pages))

    def take(self, admissions: np.ndarray, owners: Int32Array) -> TableWrites:
        """Returns what still concerns the rows' present tenants, and starts afresh.

        Args:
            admissions: int64 ``[R]``. Present tenancy of each row.
            owners: int32 ``[num_pages]``. Present allocation of each page.
        """
        live = [entry for entry in self._entries if admissions[entry[0]] == entry[1]]
        self._entries = []
        if not live:
            return TableWrites()
        pages = np.concatenate([pages for *_, pages in live])
        return TableWrites(
            rows=np.repeat([row for row, *_ in live], [part.size for *_, part in live]).astype(np.int32),
            indices=np.concatenate([indices for _, _, indices, _ in live]).astype(np.int32),
            pages=pages,
            owners=owners[pages],
        )
