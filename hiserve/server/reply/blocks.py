"""The blocks of a reply, from the events of its reader: texts, thoughts and calls, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from hiserve.core.request import FinishReason
from hiserve.server.reply.choices import Choices
from hiserve.server.reply.generation import OutputDelta
from hiserve.text.reader.buffer import Kind

CONTENT, CALL, ARGUMENTS = Kind.CONTENT, Kind.CALL, Kind.ARGUMENTS  # an attribute of an enum costs time for each token


class BlockEvent(msgspec.Struct, kw_only=True):
    """An event of a protocol.

    Attributes:
        token_ids: Tokens of the deltas since the last event with some; its client has all that they say.
    """

    token_ids: list[int] | UnsetType = UNSET


E = TypeVar("E", bound=BlockEvent)


class BlockWriter(ABC, Generic[E]):
    """Writes the blocks of one reply as the events of a protocol, which a subclass defines.

    Any partition of the reply into deltas gives the same blocks. Content of white space alone is no block, unless it is
    the whole reply: clients may not send such a block back.

    Args:
        is_never_empty: A reply without text has an empty block of content.
        shows_tokens: The last event of each delta that has events has the new tokens, so that a client that has it can resume
            after them; those of the last delta come with the events after the last block.
    """

    def __init__(self, *, is_never_empty: bool, shows_tokens: bool = False) -> None:
        self._is_never_empty = is_never_empty
        self._shows_tokens = shows_tokens
        self._is_resumed = False
        self._made: list[E] = []  # not taken yet
        self._index = -1  # of the latest block
        self._kind: Kind | None = None  # of the open block; None where none is open
        self._texts: list[str] = []  # of the open block
        self._space = ""  # content that may be no block
        self._num_tokens = 0  # so far
        # The first token of the open block of content, and the one after the last event; as of ``Event``, marks count with the next.
        self._start = self._stop = 0

    @abstractmethod
    def open(self, choices: Choices) -> None:
        """Makes the events before the first block."""

    @abstractmethod
    def begin(self, kind: Kind, name: str, call_id: str) -> None:
        """Makes the events of a block's start; a call has a name and perhaps an id."""

    @abstractmethod
    def add(self, kind: Kind, text: str) -> None:
        """Makes the events of more text in the open block."""

    @abstractmethod
    def end(self, kind: Kind, text: str, *, is_whole: bool) -> None:
        """Makes the events of a block's end; ``text`` is all of it, and a block that was cut is not whole."""

    @abstractmethod
    def close(self, choices: Choices) -> None:
        """Makes the events after the last block."""

    @abstractmethod
    def encoded(self, events: list[E]) -> bytes:
        """Returns events as they are sent."""

    def resume(self, shown: OutputDelta) -> None:
        """Begins the reply after output that its client has."""
        self.push(shown)
        self._is_resumed = True

    def push(self, delta: OutputDelta) -> list[E]:
        """Returns the events of a delta."""
        self._num_tokens += len(delta.tokens)
        if delta.text and not delta.events:
            start, self._stop = self._stop, self._num_tokens
            self._write(CONTENT, delta.text, start)
        for kind, text, start, stop, call_id in delta.events:
            self._stop = stop
            if kind is CALL:
                self._begin(kind, text, call_id)
            elif kind is ARGUMENTS and text:
                self._texts.append(text)
                self.add(CALL, text)
            elif kind is Kind.CALL_END:
                self._end(is_whole=True)
            elif text:
                self._write(kind, text, start)
        if delta.finish:
            if self._index < 0 and (self._space or self._is_never_empty):
                space = self._space
                self._begin(CONTENT)
                if space:
                    self._write(CONTENT, space, self._start)
            self._end(is_whole=delta.finish is FinishReason.STOP and self._kind is not CALL)
        return self._taken()

    async def events(
        self,
        deltas: AsyncGenerator[OutputDelta, None],
        choices: Choices,
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yields the events of the reply, those of one delta together.

        Args:
            deltas: Of the one choice; the first has the cached tokens of the prompt.
            choices: The one choice.
            keep: Called when the reply is complete, before its last events are sent.
        """
        is_begun, tokens = self._is_resumed, list[int]()
        async with aclosing(deltas):
            async for delta in deltas:
                if not is_begun:
                    is_begun = True
                    self.open(choices)
                events = self.push(delta)
                if self._shows_tokens:
                    tokens += delta.tokens
                    if events and not delta.finish:
                        events[-1].token_ids, tokens = tokens, []
                if events:
                    yield self.encoded(events)
        self.close(choices)
        ending = self._taken()
        if self._shows_tokens:
            ending[0].token_ids = tokens
        last = self.encoded(ending)
        if keep is not None:
            await keep()
        yield last

    def _write(self, kind: Kind, text: str, start: int) -> None:
        """Adds to a text or a thought, from this token on."""
        if kind is not self._kind:
            if kind is CONTENT:
                self._start = self._start if self._space else start
                text = self._space + text
                if not text.strip():
                    self._space = text
                    return
            self._begin(kind)
        self._texts.append(text)
        self.add(kind, text)

    def _begin(self, kind: Kind, name: str = "", call_id: str = "") -> None:
        self._end(is_whole=self._kind is not CALL)
        self._index += 1
        self._kind, self._texts, self._space = kind, [], ""
        self.begin(kind, name, call_id)

    def _end(self, *, is_whole: bool) -> None:
        """Ends the open block, if there is one."""
        if self._kind is not None:
            self.end(self._kind, "".join(self._texts), is_whole=is_whole)
            self._kind = None

    def _taken(self) -> list[E]:
        made, self._made = self._made, []
        return made
