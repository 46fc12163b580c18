"""Tails: the window pages that a request reads when it is resumed at a boundary. A node keeps those of its boundaries."""

from __future__ import annotations

from collections.abc import Callable

from hiserve.core.plan import Int32Array


class Tail:
    """The window pages before a boundary.

    Attributes:
        pages: int32 ``[n]``. First to last; the last one ends at the boundary.
        last_used: Logical time of its last use.
        is_open: Whether it still holds its pages.
    """

    __slots__ = ("_close", "is_open", "last_used", "pages")

    def __init__(self, pages: Int32Array, last_used: int, close: Callable[[Tail], None]) -> None:
        self.pages = pages
        self.last_used = last_used
        self.is_open = True
        self._close = close

    def close(self) -> None:
        """Gives the pages back; nothing if they were."""
        if self.is_open:
            self.is_open = False
            self._close(self)


Tails = dict[int, Tail]  # of a node: by pages from its start to the boundary, 1 to ``num_pages``


def split_tails(tails: Tails, num_pages: int) -> tuple[Tails, Tails]:
    """Returns the tails of both parts of a node that is cut after ``num_pages``."""
    upper = {at: tail for at, tail in tails.items() if at <= num_pages}
    return upper, {at - num_pages: tail for at, tail in tails.items() if at > num_pages}


def join_tails(upper: Tails, lower: Tails, num_pages: int) -> Tails:
    """Returns the tails of a node that absorbs its parent of ``num_pages``."""
    return upper | {at + num_pages: tail for at, tail in lower.items()}


def close_tails(tails: Tails, num_pages: int = 0) -> Tails:
    """Closes the tails behind the first ``num_pages`` of a node; returns the others that are open."""
    for at, tail in tails.items():
        if at > num_pages:
            tail.close()
    return {at: tail for at, tail in tails.items() if tail.is_open}
