"""Waiting for a prefix that another row is computing right now, when that is cheaper."""

from __future__ import annotations

from hiserve.worker.columns import Columns
from hiserve.worker.waiting import Forerunner, Request


def find_forerunner(request: Request, num_matched: int, columns: Columns, page_size: int) -> Forerunner | None:
    """Looks for a row that is computing more of this prompt than the cache holds.

    Waiting for it is cheaper when it has no further to go than the request would.

    Args:
        request: Waits for a row of its own.
        num_matched: Tokens of its prompt that the cache holds.
        columns: The rows.
        page_size: Tokens per page; only whole pages can be shared.
    """
    rows = columns.active
    usable = request.num_reusable
    for row in rows[columns.settled[rows] < columns.known[rows] - 1].tolist():
        if columns.tenant(row).tenant != request.tenant:
            continue
        length = min(int(columns.known[row]), usable)
        differs = columns.tokens[row, :length] != request.tokens[:length]
        shared = int(differs.argmax()) if differs.any() else length
        num_pages = shared // page_size
        if num_pages * page_size > num_matched and columns.settled[row] >= num_matched:
            return Forerunner(row, int(columns.admission[row]), num_pages)
    return None


def must_wait_for(other: Forerunner | None, columns: Columns) -> bool:
    """Whether the row still has the same tenant, and still has to publish what is wanted of it."""
    return (
        other is not None
        and columns.admission[other.row] == other.admission
        and bool(columns.num_published[other.row] < other.num_pages)
    )
