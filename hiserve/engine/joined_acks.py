"""The ends of copies that every rank of a group makes of its share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hiserve.core.transfers import CopyAck


class JoinedAcks:
    """An order has ended when all ranks have ended it, and has failed if it failed on one.

    Args:
        num_ranks: In the group.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, list[CopyAck]] = {}  # by order; of the ranks that have ended it
        self._ended: list[CopyAck] = []

    def add(self, acks: Iterable[CopyAck]) -> None:
        """Adds what one rank has ended."""
        for ack in acks:
            got = self._open.setdefault(ack.op, [])
            got.append(ack)
            if len(got) == self._num_ranks:
                del self._open[ack.op]
                self._ended.append(_joined(got))

    def take(self) -> list[CopyAck]:
        """Returns the orders that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


def _joined(acks: list[CopyAck]) -> CopyAck:
    """Returns the first failure, or, if there is none, the bytes of one rank; the fewest pages, in the time of the slowest."""
    slowest, num_pages = max(ack.seconds for ack in acks), min(ack.num_pages for ack in acks)
    return replace(next((ack for ack in acks if not ack.is_ok), acks[0]), seconds=slowest, num_pages=num_pages)
