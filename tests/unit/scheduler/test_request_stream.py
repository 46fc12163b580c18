"""What a client's reader has not taken yet: merged, told once, and before any error."""

from __future__ import annotations

import pytest

from hiserve.core.request import FinishReason
from hiserve.core.usage import CacheUse, DraftUse
from hiserve.errors import EngineError, SlowReaderError
from hiserve.ipc.updates import TokenDelta
from hiserve.scheduler.request_stream import TOKEN_BYTES, RequestStream

USE = CacheUse(device=16)
DRAFTS = DraftUse(2, 6, (2, 1, 0))


async def test_news_that_waits_is_one_delta() -> None:
    stream = RequestStream(tag="")
    stream.push(TokenDelta(scores=b"prompt__", cached=USE, drafts=DRAFTS, queue_s=0.25))
    stream.push(TokenDelta([5, 6], scores=b"abcd"))
    assert await stream.take() == TokenDelta([5, 6], scores=b"prompt__abcd", cached=USE, drafts=DRAFTS, queue_s=0.25)
    stream.push(TokenDelta([7], FinishReason.LENGTH))
    assert await stream.take() == TokenDelta([7], FinishReason.LENGTH)


async def test_of_a_request_that_no_worker_looked_up_nothing_is_said_of_the_cache() -> None:
    stream = RequestStream(tag="")
    stream.push(TokenDelta(finish=FinishReason.ABORT))
    assert await stream.take() == TokenDelta(finish=FinishReason.ABORT)


async def test_of_drafts_the_latest_news_is_told_and_once() -> None:
    stream, later = RequestStream(tag=""), DRAFTS + DRAFTS
    for drafts in (DRAFTS, later, None):
        stream.push(TokenDelta([5], drafts=drafts))
    assert (await stream.take()).drafts == later
    stream.push(TokenDelta([5]))
    assert (await stream.take()).drafts is None


@pytest.mark.parametrize(("tokens", "scores"), [([5], b""), ([], b"abcd")])
async def test_an_error_comes_after_what_was_told_before_it(tokens: list[int], scores: bytes) -> None:
    stream = RequestStream(tag="")
    stream.push(TokenDelta(tokens, scores=scores, cached=USE, queue_s=0.0))
    stream.fail(EngineError("it broke"))
    assert await stream.take() == TokenDelta(tokens, scores=scores, cached=USE, queue_s=0.0)
    with pytest.raises(EngineError, match="it broke"):
        await stream.take()


def test_more_than_a_reader_may_leave_unread_is_too_long() -> None:
    stream = RequestStream("", 10 * TOKEN_BYTES)
    stream.push(TokenDelta(10 * [5], cached=USE, queue_s=0.0))
    assert not stream.is_too_long
    stream.push(TokenDelta([5]))
    assert stream.is_too_long
    with_scores = RequestStream("", 10 * TOKEN_BYTES)
    with_scores.push(
        TokenDelta([5], scores=bytes(10 * TOKEN_BYTES), cached=USE, queue_s=0.0)
    )  # those of the prompt, for all we know
    assert not with_scores.is_too_long
    with_scores.push(TokenDelta([5], scores=bytes(9 * TOKEN_BYTES)))
    assert with_scores.is_too_long


async def test_what_was_read_does_not_count() -> None:
    stream = RequestStream("", 10 * TOKEN_BYTES)
    for _ in range(20):
        stream.push(TokenDelta(8 * [5]))
        assert not stream.is_too_long
        await stream.take()


def test_a_stream_is_not_too_long_without_a_limit_after_its_end_or_by_the_scores_of_its_prompt() -> None:
    unlimited, ended, scored = RequestStream(""), RequestStream("", 0), RequestStream("", 0)
    unlimited.push(TokenDelta(10**6 * [5], cached=USE, queue_s=0.0))
    ended.push(TokenDelta(10 * [5], FinishReason.LENGTH, cached=USE, queue_s=0.0))
    scored.push(TokenDelta(scores=bytes(10**6), cached=USE, queue_s=0.0))
    assert [each.is_too_long for each in (unlimited, ended, scored)] == [False] * 3


async def test_a_stream_that_was_cut_keeps_nothing_and_says_why() -> None:
    stream = RequestStream("", TOKEN_BYTES)
    stream.push(TokenDelta([5, 6], scores=b"abcd", cached=USE, queue_s=0.0))
    stream.cut()
    assert not stream.is_too_long
    stream.push(TokenDelta([7], FinishReason.ABORT, scores=b"abcd"))  # the engine's answer to the abort
    with pytest.raises(SlowReaderError, match=r"72 bytes .* the limit is 36"):
        await stream.take()
