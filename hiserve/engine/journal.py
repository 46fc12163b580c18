"""Page-table entries that the device has not been told of yet."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import BoolArray, Int32Array, TableWrites

Int64Array = NDArray[np.int64]


class TableJournal:
    """Collects entries between two plans.

    A relocation may wait here while its row changes hands; then it must not reach the next
    tenant, so every entry remembers the tenancy it was made for.
    """

    def __init__(self) -> None:
        self._writes: list[tuple[Int64Array, Int64Array, NDArray[np.integer], Int32Array, BoolArray]] = []

    def write(
        self,
        rows: Int64Array,
        admissions: Int64Array,
        indices: NDArray[np.integer],
        pages: Int32Array,
        *,
        are_new: bool = False,
    ) -> None:
        """Records that entry ``indices[i]`` of row ``rows[i]``'s table is now ``pages[i]``.

        Args:
            rows: int64 ``[n]``.
            admissions: int64 ``[n]``. Tenancy of each row.
            indices: int32 or int64 ``[n]``.
            pages: int32 ``[n]``.
            are_new: They were handed out for tokens that are to be computed.
        """
        self._writes.append((rows, admissions, indices, pages, np.full(pages.size, are_new)))

    def take(self, admissions: Int64Array, owners: Int32Array) -> TableWrites:
        """Returns what still concerns the rows' present tenants, and starts afresh.

        Args:
            admissions: int64 ``[R]``. Present tenancy of each row.
            owners: int32 ``[num_pages]``. Present allocation of each page.
        """
        if not self._writes:
            return TableWrites()
        rows, tenancies, indices, pages, are_new = self._writes[0]
        if len(self._writes) > 1:
            rows, tenancies, indices, pages, are_new = (
                np.concatenate(column) for column in zip(*self._writes, strict=True)
            )
        self._writes = []
        live = admissions[rows] == tenancies
        pages = pages[live]
        return TableWrites(
            rows=rows[live].astype(np.int32),
            indices=indices[live].astype(np.int32),
            pages=pages,
            owners=owners[pages],
            are_new=are_new[live],
        )
