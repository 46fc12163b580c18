"""The output of one request on its way to its reader: merged while it waits, limited in bytes, ended by an error."""

from __future__ import annotations

import asyncio

from hiserve.errors import HiserveError, SlowReaderError
from hiserve.ipc.updates import TokenDelta

TOKEN_BYTES = 36  # an int, and its place in a list


class RequestStream:
    """Output of one request that its reader has not taken, merged to one delta.

    Args:
        tag: Name by which its request can be aborted.
        max_unread_bytes: Limit of unread output; None is no limit.
    """

    def __init__(self, tag: str, max_unread_bytes: int | None = None) -> None:
        self.tag = tag
        self._max_unread_bytes = max_unread_bytes
        self._num_unread_bytes = 0
        self._has_begun = False
        self._unread: TokenDelta | None = None
        self._error: HiserveError | None = None
        self._arrived = asyncio.Event()

    def push(self, delta: TokenDelta) -> None:
        """Adds output; ignored after an error."""
        if self._error is not None:
            return
        if delta.tokens:  # scores of a prompt do not count: all arrive by the first token, at any speed of the reader
            self._num_unread_bytes += TOKEN_BYTES * len(delta.tokens) + (len(delta.scores) if self._has_begun else 0)
            self._has_begun = True
        if self._unread is None:
            self._unread = delta
        else:
            self._unread.append(delta)
        self._arrived.set()

    @property
    def is_too_long(self) -> bool:
        """Whether the unread output of a running request exceeds its limit."""
        if self._max_unread_bytes is None or self._error is not None or self._unread is None or self._unread.finish:
            return False
        return self._num_unread_bytes > self._max_unread_bytes

    def fail(self, error: HiserveError) -> None:
        """Ends the stream with an error, after the unread output."""
        self._error = error
        self._arrived.set()

    def cut(self) -> None:
        """Ends the stream of a reader that is too slow, and frees its unread output."""
        unread = f"{self._num_unread_bytes} bytes of this stream were not read in time"
        self._unread = None
        self.fail(SlowReaderError(f"{unread}; the limit is {self._max_unread_bytes}. Read as fast as tokens come."))

    async def take(self) -> TokenDelta:
        """Waits for output; an error comes after the tokens and scores that preceded it."""
        await self._arrived.wait()
        self._arrived.clear()
        delta, self._unread = self._unread, None
        if self._error is not None:
            if delta is None or not (delta.tokens or delta.scores):
                raise self._error
            self._arrived.set()
        assert delta is not None, "woken without output"
        self._num_unread_bytes = 0
        return delta
