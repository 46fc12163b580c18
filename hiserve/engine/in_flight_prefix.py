"""Waiting for a prefix that another row is computing right now, when that is cheaper."""

from __future__ import annotations

from hiserve.engine.rows import RowState
from hiserve.engine.waiting_queue import InFlightPrefix, Request


def find_in_flight_prefix(request: Request, num_matched: int, state: RowState, page_size: int) -> InFlightPrefix | None:
    """Looks for a row that is computing more of this prompt than the cache holds.

    Waiting for it is cheaper when it has no further to go than the request would.

    Args:
        request: Waits for a row of its own.
        num_matched: Tokens of its prompt that the cache holds.
        state: The rows.
        page_size: Tokens per page; only whole pages can be shared.
    """
    rows = state.active
    usable = request.num_reusable
    for row in rows[state.settled[rows] < state.known[rows] - 1].tolist():
        if state.tenant(row).tenant != request.tenant:
            continue
        length = min(int(state.known[row]), usable)
        differs = state.tokens[row, :length] != request.tokens[:length]
        shared = int(differs.argmax()) if differs.any() else length
        num_pages = shared // page_size
        if num_pages * page_size > num_matched and state.settled[row] >= num_matched:
            return InFlightPrefix(row, int(state.admission[row]), num_pages)
    return None


def must_wait_for(other: InFlightPrefix | None, state: RowState) -> bool:
    """Whether the row still has the same tenant, and still has to publish what is wanted of it."""
    return (
        other is not None
        and state.admission[other.row] == other.generation
        and bool(state.num_published[other.row] < other.num_pages)
    )
