"""Calls of custom tools in chat completions: the client gets their input, and not the arguments that the model writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hiserve.text.custom_tools import InputReader
from hiserve.text.reader.buffer import Event, Kind


class CustomEvents:
    """The events of one choice, with inputs in place of the arguments of custom tools.

    Args:
        names: Of the custom tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._reader: InputReader | None = None  # of the call that has not ended

    def read(self, events: Sequence[Event], *, is_last: bool) -> Sequence[Event]:
        """Returns the events to show for some of the reader's; ``is_last``: no others follow."""
        made: list[Event] = []
        for event in events:
            if event.kind is Kind.ARGUMENTS and self._reader is not None:
                made.append(event._replace(text=self._reader.push(event.text)))
                continue
            if event.kind is Kind.CALL_END:
                made += self._rest(event.start)
            if event.kind is Kind.CALL and event.text in self._names:
                self._reader = InputReader()
            made.append(event)
        return [*made, *self._rest(made[-1].stop if made else 0)] if is_last else made

    def _rest(self, token: int) -> list[Event]:
        """Returns the rest of the input of the call that has not ended, if there is one."""
        text, self._reader = "" if self._reader is None else self._reader.end(), None
        return [Event(Kind.ARGUMENTS, text, token, token)] if text else []
