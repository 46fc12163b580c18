"""The part of a reply that is not emitted yet, and the events that were emitted."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

from hiserve.text.reader.marks import MarkSearch

SPACE = " \t\r\n"
BROKEN = "\ufffd"  # the last character of a reply that was cut within its bytes
T = TypeVar("T")
# A part of the machine that reads a reply: it yields where more text must come first.
Reading = Generator[None, None, T]


class Kind(Enum):
    """The kind of an event's addition to a reply."""

    THOUGHT = "thought"
    CONTENT = "content"
    CALL = "call"
    ARGUMENTS = "arguments"
    CALL_END = "call_end"
    END = "end"


# Kinds of which several events in a row are one.
CONTENT = Kind.CONTENT  # looking it up takes as long as a call
GROWING = frozenset({Kind.THOUGHT, Kind.CONTENT, Kind.ARGUMENTS})


class Event(NamedTuple):
    """A part of a reply.

    The spans of all events of a reply, in order, cover its tokens without a gap. A token belongs to the event in which
    its text begins; tokens of marks belong to the event that follows.

    Attributes:
        kind: Of its addition.
        text: Of a thought, content or arguments; the name of a call; empty at an end.
        start: The first token.
        stop: After the last token.
        id: Of a call, where the model gave one.
    """

    kind: Kind
    text: str
    start: int
    stop: int
    id: str = ""


class ReplyBuffer:
    """Text whose meaning is not known yet, with the token from which each part of it comes.

    Attributes:
        text: The text; its start is taken away as it is emitted.
        is_over: No more text follows.
        is_cut: The reply ended at a limit, not by itself.
        is_cut_short: The last search ended at the limit that cut the reply, where more text might have had the mark.
        is_stopped: A stop text ended the reply; nothing more is emitted.
        events: Emitted since ``take``.
        shown: While all text of a thought or content is emitted as it arrives, the kind of its events, and the search for what may end it.
    """

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False
        self.is_cut = False
        self.is_cut_short = False
        self.is_stopped = False
        self.events: list[Event] = []
        self.shown: tuple[Kind, Callable[[str], object]] | None = None
        self._sizes: deque[tuple[int, int]] = deque()  # characters, and the tokens up to them
        self._num_emitted = 0  # tokens of the events so far
        self._dropped = 0  # tokens up to the last character that was dropped

    def append(self, text: str, num_tokens: int) -> None:
        """Adds text that is certain after ``num_tokens`` tokens of the reply."""
        if text:
            self.text += text
            self._sizes.append((len(text), num_tokens))

    def passed_on(self, text: str, num_tokens: int) -> Sequence[Event] | None:
        """Returns the event that ``append`` and the machine would emit, outside ``events``; None if it must read the text.

        Content has none: the most frequent case is that of plain text, whose place follows from the event after it.
        """
        assert self.shown is not None, "the machine is elsewhere"
        kind, begin = self.shown
        if begin(text) is not None:
            return None
        start, self._num_emitted = self._num_emitted, num_tokens
        return () if kind is CONTENT else (Event(kind, text, start, num_tokens),)

    def take(self) -> list[Event]:
        """Returns the events emitted since the last call."""
        events, self.events = self.events, []
        return events

    def emit(self, kind: Kind, num_chars: int, text: str, call_id: str = "") -> None:
        """Takes characters away and emits them as an event of this text."""
        stop = max(self._num_emitted, self.drop(num_chars))
        self.add(Event(kind, text, self._num_emitted, stop, call_id))

    def drop(self, num_chars: int) -> int:
        """Takes characters away; returns the tokens up to the last of them. Their tokens belong to the next event."""
        self.text = self.text[num_chars:]
        stop = 0
        while num_chars:
            size, stop = self._sizes[0]
            if size > num_chars:
                self._sizes[0] = size - num_chars, stop
                break
            self._sizes.popleft()
            num_chars -= size
        self._dropped = max(self._dropped, stop)
        return stop

    def past(self, at: int, chars: str = SPACE, most: int | None = None) -> Reading[int]:
        """Returns the first place from ``at`` on that has none of these characters, or ``most`` of them before it."""
        end = None if most is None else at + most
        while True:
            while at < len(self.text) and at != end and self.text[at] in chars:
                at += 1
            if at < len(self.text) or at == end or self.is_over:
                return at
            yield

    def starts(self, at: int, *marks: str) -> Reading[str]:
        """Returns the mark at a place; empty without one."""
        while True:
            for mark in marks:
                if mark and self.text.startswith(mark, at):
                    self.is_cut_short = False
                    return mark
            rest = self.text[at:].rstrip(BROKEN) if self.is_cut else self.text[at:]
            may_follow = any(mark.startswith(rest) for mark in marks if mark)
            self.is_cut_short = self.is_cut and may_follow
            if self.is_over or not may_follow:
                return ""
            yield

    def find(self, at: int, search: MarkSearch, most: int | None = None) -> Reading[re.Match[str] | None]:
        """Returns the first mark from ``at`` on; None if there is none, or none within ``most`` characters."""
        start = at
        while True:
            found = search.find(self.text, at)
            self.is_cut_short = self.is_cut and not found
            if found or self.is_over or (most is not None and len(self.text) - start > most):
                return found
            at = max(at, len(self.text) - search.num_held(self.text))
            yield

    def show_until(self, kind: Kind, search: MarkSearch, shown: Callable[[str], str]) -> Reading[re.Match[str] | None]:
        """Emits text up to a mark, which then begins the text, and returns it; None at the end of the reply.

        Args:
            kind: Of the events.
            search: The marks.
            shown: Turns text into that of events.
        """
        while True:
            yield from self.pause()
            found = search.find(self.text, 0)
            size = found.start() if found else len(self.text)
            if not found and not self.is_over:
                size -= search.num_held(self.text)
            if size:
                self.emit(kind, size, shown(self.text[:size]))
            yield from self.pause()
            if found:
                return search.find(self.text, 0)
            if self.is_over:
                return None
            is_plain = not self.text and kind is not Kind.ARGUMENTS  # which may be escaped
            self.shown = (kind, search.begin) if is_plain else None
            yield
            self.shown = None

    def pause(self) -> Reading[None]:
        """Continues only if nothing has ended the reply."""
        while self.is_stopped:
            yield

    def close(self, kind: Kind) -> None:
        """Adds tokens without text, before the first character, to the events of this kind."""
        first = self._sizes[0][1] - 1 if self._sizes else self._num_emitted
        if first > self._num_emitted >= self._dropped:
            self.add(Event(kind, "", self._num_emitted, first))

    def end(self, num_tokens: int) -> None:
        """Emits the end of a reply of ``num_tokens`` tokens."""
        self.add(Event(Kind.END, "", self._num_emitted, num_tokens))

    def add(self, event: Event) -> None:
        """Emits an event; one that continues the last one is joined with it."""
        last = self.events[-1] if self.events else None
        if last is not None and last.kind is event.kind and event.kind in GROWING:
            self.events[-1] = last._replace(text=last.text + event.text, stop=event.stop)
        else:
            self.events.append(event)
        self._num_emitted = event.stop


class EventLog:
    """The events of a reply so far. Those in a row that continue each other are one; their texts are joined at the end."""

    __slots__ = ("_ended", "_kind", "_num_tokens", "_start", "_stop", "_texts")

    def __init__(self) -> None:
        self._ended: list[Event] = []
        self._kind: Kind | None = None  # of the last event, if others may continue it
        self._texts: list[str] = []
        self._start = self._stop = self._num_tokens = 0

    def add(self, events: Sequence[Event], plain: str = "") -> None:
        """Adds the next events.

        Args:
            events: At least one.
            plain: The content since the last ones, which came without events.
        """
        if plain:
            events = (Event(CONTENT, plain, self._num_tokens, events[0].start), *events)
        self._num_tokens = events[-1].stop
        for event in events:
            kind, text, start, stop, _ = event
            if kind is self._kind:
                self._texts.append(text)
                self._stop = stop
                continue
            self._ended, self._kind = self.events, None
            if kind in GROWING:
                self._kind, self._texts, self._start, self._stop = kind, [text], start, stop
            else:
                self._ended.append(event)

    @property
    def events(self) -> list[Event]:
        """All of them."""
        if self._kind is None:
            return [*self._ended]
        return [*self._ended, Event(self._kind, "".join(self._texts), self._start, self._stop)]

    @property
    def has_calls(self) -> bool:
        """Whether a call has ended."""
        return any(event.kind is Kind.CALL_END for event in self._ended)


def thought(events: Iterable[Event]) -> str:
    """Returns the text of the thoughts."""
    return "".join([event.text for event in events if event.kind is Kind.THOUGHT])


def called(events: Iterable[Event], first: int = 0) -> dict[int, tuple[str, str, str]]:
    """Returns id, name and arguments that events add to calls, by index in the reply.

    Args:
        events: In order; arguments before the first call belong to the last one before.
        first: Calls emitted before.
    """
    found: dict[int, tuple[str, str, str]] = {}
    index = first - 1
    for event in events:
        if event.kind is Kind.CALL:
            index += 1
            found[index] = event.id, event.text, ""
        elif event.kind is Kind.ARGUMENTS and event.text:
            call_id, name, arguments = found.get(index, ("", "", ""))
            found[index] = call_id, name, arguments + event.text
    return found
