"""A happens-before model of streams: whether every access to a page is ordered against those it conflicts with.

Each stream runs in order; an event orders what waits for it; what the host knows to be over is over for everything that
it starts later. It shares nothing with the cache and knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Clock = dict[str, int]


class Page(NamedTuple):
    """A page of a pool."""

    tier: str
    number: int


@dataclass(frozen=True)
class Event:
    """The end of something that was started on a stream.

    Attributes:
        stream: Where.
        index: Its place there, from 1.
        clock: What is over when it begins: how far each stream has come. Its own place included.
    """

    stream: str
    index: int
    clock: Clock

    def is_before(self, later: Event) -> bool:
        return later.clock.get(self.stream, 0) >= self.index


def joined(*clocks: Clock) -> Clock:
    return {stream: max(clock.get(stream, 0) for clock in clocks) for clock in clocks for stream in clock}


class Streams:
    """Starts things, and checks every access when it is started."""

    def __init__(self) -> None:
        self._tails: dict[str, Clock] = {}
        self._known: Clock = {}
        self._accesses: dict[Page, list[tuple[Event, str]]] = {}
        self.num_checked = 0

    def start(self, stream: str, *after: Event) -> Event:
        """Starts something that waits for what is before it on its stream, and for events."""
        tail = self._tails.get(stream, {})
        clock = joined(tail, self._known, *(event.clock for event in after))
        clock[stream] = index = tail.get(stream, 0) + 1
        self._tails[stream] = clock
        return Event(stream, index, clock)

    def know(self, event: Event) -> None:
        """The host learns that something is over."""
        self._known = joined(self._known, event.clock)

    def cancel(self, event: Event) -> None:
        """What was started never ran."""
        for accesses in self._accesses.values():
            accesses[:] = [access for access in accesses if access[0] is not event]

    def read(self, event: Event, page: Page) -> None:
        self._access(event, page, "read")

    def write(self, event: Event, page: Page) -> None:
        self._access(event, page, "write")

    def _access(self, event: Event, page: Page, how: str) -> None:
        others = self._accesses.setdefault(page, [])
        others[:] = [access for access in others if self._known.get(access[0].stream, 0) < access[0].index]
        for other, other_how in others:
            if other is event or "write" not in (how, other_how):
                continue
            self.num_checked += 1
            assert other.is_before(event), f"{how} of {page} by {event} is not ordered after the {other_how} by {other}"
        others.append((event, how))
