"""Replies of several messages, each with a header: the channel is the kind of the message, the recipient the called function."""

from __future__ import annotations

import re
from collections.abc import Callable

from hiserve.text.reader.buffer import Kind, Reading, ReplyBuffer
from hiserve.text.reader.calls import MAX_HEAD, NAME
from hiserve.text.reader.marks import MarkSearch, ReplySyntax

ASSISTANT = "assistant"  # the author in the header of each message of a reply
THOUGHTS = "analysis"
FINAL = "final"  # the channel of a text that is no thought
FUNCTIONS = "functions."
FUNCTION = f"commentary to={FUNCTIONS}"  # and its name, in the header of a call as models write it
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"\s*(\w*)")


class MessageReader:
    """Reads the messages of one reply.

    Args:
        syntax: How headers and messages are spelled.
        buffer: The text.
        content: Returns the part of a content that is certain.
        end_text: Called at the end of a message.
        call_id: Returns an id for a call; None reads none: calls are content.
        is_single: The first call ends the reply.

    Attributes:
        num_unread: Messages to a recipient that cannot be called, so that they are content.
    """

    def __init__(
        self,
        syntax: ReplySyntax,
        buffer: ReplyBuffer,
        content: Callable[[str], str],
        end_text: Callable[[], None],
        call_id: Callable[[], str] | None,
        *,
        is_single: bool,
    ) -> None:
        row = syntax.row
        self._syntax = syntax
        self._buffer = buffer
        self._content = content
        self._end_text = end_text
        self._call_id = call_id
        self._is_single = is_single
        self._channel, self._message = syntax.pair(row.header)
        self._ends = MarkSearch(map(syntax.spell, row.message_ends))
        self._in_header = MarkSearch([self._message, *map(syntax.spell, row.message_ends)])
        self._has_arguments = False
        self.num_unread = 0

    def read(self, kind: Kind | None) -> Reading[None]:
        """Reads messages until the end of the reply, of which the first has begun if its kind is given."""
        buffer = self._buffer
        while True:
            kind = kind or (yield from self._header())
            if kind is Kind.ARGUMENTS:
                yield from self._arguments()
            elif kind is not None:
                shown = self._syntax.shown if kind is Kind.THOUGHT else self._content
                found = yield from buffer.show_until(kind, self._ends, shown)
                self._end_text()
                if found:
                    buffer.close(kind)
                    buffer.drop(found.end())
            if buffer.is_over and not buffer.text:
                return
            kind = None

    def _header(self) -> Reading[Kind | None]:
        """Reads a header; returns the kind of its message (content without a header), or None at the end of the reply."""
        buffer, syntax = self._buffer, self._syntax
        at = yield from buffer.past(0)
        found = yield from buffer.find(at, self._in_header, MAX_HEAD)
        head = syntax.shown(buffer.text[: found.start() if found else len(buffer.text)])
        if found is None or found[1] != self._message:
            is_begun = head.lstrip().startswith((syntax.row.header[0], *syntax.row.header_starts))
            if found is None and (not head.strip() or (buffer.is_cut and is_begun)):
                buffer.drop(len(buffer.text))
                return None
            return Kind.CONTENT
        recipient = _RECIPIENT.search(head)
        if recipient is None:
            channel = _CHANNEL.match(head.partition(syntax.row.header[0])[2])
            buffer.drop(found.end())
            return Kind.THOUGHT if channel is not None and channel[1] == THOUGHTS else Kind.CONTENT
        name = recipient[1].removeprefix(FUNCTIONS)
        if self._call_id is not None and NAME.fullmatch(name):
            buffer.emit(Kind.CALL, found.end(), name, self._call_id())
            return Kind.ARGUMENTS
        self.num_unread += self._call_id is not None
        buffer.emit(Kind.CONTENT, found.end(), self._content(buffer.text[: found.end()]))
        return Kind.CONTENT

    def _arguments(self) -> Reading[None]:
        """Reads the arguments of a call, as they are, and its end."""
        buffer = self._buffer
        self._has_arguments = False
        found = yield from buffer.show_until(Kind.ARGUMENTS, self._ends, self._begun)
        if not found and buffer.is_cut:
            return
        if not self._has_arguments:
            buffer.emit(Kind.ARGUMENTS, 0, "{}")
        buffer.emit(Kind.CALL_END, found.end() if found else 0, "")
        buffer.is_stopped = self._is_single
        yield from buffer.pause()

    def _begun(self, text: str) -> str:
        self._has_arguments = True
        return self._syntax.shown(text)
