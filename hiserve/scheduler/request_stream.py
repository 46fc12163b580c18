"""What waits for the reader of a request's news: merged, told once, bounded."""

from __future__ import annotations

import asyncio

import msgspec

from hiserve.core.cache_usage import CacheUse
from hiserve.core.draft_use import DraftUse
from hiserve.core.request import FinishReason
from hiserve.errors import HiserveError, SlowReaderError
from hiserve.ipc.coalesce import UNREPORTED

TOKEN_BYTES = 36  # an int, and its place in a list


class TokenDelta(msgspec.Struct):
    """News of one request; what came while the reader was away is one delta.

    Attributes:
        tokens: New tokens; may be empty with a finish, and with scores of the prompt.
        finish: RUNNING but in the last delta.
        cached: What of the prompt came from the cache, once; None where no worker looked.
        drafts: All drafts until now; None when nothing is new, and without speculation.
        scores: Of tokens, as ``ipc.messages.Tokens`` says; those of a prompt come before its first token.
        queue_s: Seconds until a worker got the request in the first delta (-1 if none got it), -1 after.
    """

    tokens: list[int]
    finish: FinishReason
    cached: CacheUse | None
    drafts: DraftUse | None
    scores: bytes
    queue_s: float


class RequestStream:
    """News of one request that its reader has not taken. Bounded by the request's own length, and by what is kept unread.

    Args:
        tag: Name by which its request can be aborted.
        max_unread_bytes: What may wait for a reader that is slow; None is no limit.
    """

    def __init__(self, tag: str, max_unread_bytes: int | None = None) -> None:
        self.tag = tag
        self._max_unread_bytes = max_unread_bytes
        self._num_unread_bytes = 0
        self._has_begun = False
        self._tokens: list[int] = []
        self._finish = 0
        self._scores = bytearray()
        self._cached: CacheUse | None = None
        self._drafts: DraftUse | None = None
        self._queue_s: float = UNREPORTED
        self._is_cache_told = False
        self._error: HiserveError | None = None
        self._news = asyncio.Event()

    def push(
        self,
        tokens: list[int],
        finish: int,
        cached: CacheUse | None,
        drafts: DraftUse | None,
        scores: bytes,
        queue_s: float,
    ) -> None:
        """Takes in news; after an error there are none."""
        if self._error is not None:
            return
        if tokens:  # the scores of a prompt come at once, with the first token at the latest: nobody is slow for that
            self._num_unread_bytes += TOKEN_BYTES * len(tokens) + (len(scores) if self._has_begun else 0)
            self._has_begun = True
        self._tokens += tokens
        self._scores += scores
        self._finish = finish
        self._queue_s = max(self._queue_s, queue_s)
        if self._cached is None:
            self._cached = cached
        self._drafts = drafts or self._drafts
        self._news.set()

    @property
    def is_too_long(self) -> bool:
        """Whether more waits than may, of a request that goes on."""
        if self._max_unread_bytes is None or self._finish or self._error is not None:
            return False
        return self._num_unread_bytes > self._max_unread_bytes

    def fail(self, error: HiserveError) -> None:
        """Ends the stream behind what waits."""
        self._error = error
        self._news.set()

    def cut(self) -> None:
        """Ends the stream of a reader that is too slow, and frees what waits for it."""
        unread = f"{self._num_unread_bytes} bytes of this stream were not read in time"
        self._tokens, self._scores = [], bytearray()
        self.fail(SlowReaderError(f"{unread}; the limit is {self._max_unread_bytes}. Read as fast as tokens come."))

    async def take(self) -> TokenDelta:
        """Waits for news; an error comes after the tokens and scores that preceded it."""
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            if not self._tokens and not self._scores:
                raise self._error
            self._news.set()
        cached = None if self._is_cache_told else self._cached
        self._is_cache_told = cached is not None or self._is_cache_told
        scores = bytes(self._scores)
        delta = TokenDelta(self._tokens, FinishReason(self._finish), cached, self._drafts, scores, self._queue_s)
        self._tokens, self._scores, self._queue_s = [], bytearray(), UNREPORTED
        self._num_unread_bytes = 0
        self._drafts = None
        return delta
