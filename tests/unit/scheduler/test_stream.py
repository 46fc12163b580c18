"""What a client's reader has not taken yet: merged, told once, and before any error."""

from __future__ import annotations

import pytest

from hiserve.core.draft_use import DraftUse
from hiserve.core.request import FinishReason
from hiserve.core.reuse import CacheUse
from hiserve.errors import EngineError
from hiserve.scheduler.client import Delta, _Stream

USE = CacheUse(device=16)
DRAFTS = DraftUse(2, 6, (2, 1, 0))


async def test_news_that_waits_is_one_delta() -> None:
    stream = _Stream(tag="")
    stream.push([], 0, USE, DRAFTS, b"prompt__", 0.25)
    stream.push([5, 6], 0, None, None, b"abcd", -1)
    assert await stream.take() == Delta([5, 6], FinishReason.RUNNING, USE, DRAFTS, b"prompt__abcd", 0.25)
    stream.push([7], 2, None, None, b"", -1)
    assert await stream.take() == Delta([7], FinishReason.LENGTH, None, None, b"", -1)


async def test_of_drafts_the_latest_news_is_told_and_once() -> None:
    stream, later = _Stream(tag=""), DRAFTS + DRAFTS
    for drafts in (DRAFTS, later, None):
        stream.push([5], 0, None, drafts, b"", -1)
    assert (await stream.take()).drafts == later
    stream.push([5], 0, None, None, b"", -1)
    assert (await stream.take()).drafts is None


@pytest.mark.parametrize(("tokens", "scores"), [([5], b""), ([], b"abcd")])
async def test_an_error_comes_after_what_was_told_before_it(tokens: list[int], scores: bytes) -> None:
    stream = _Stream(tag="")
    stream.push(tokens, 0, USE, None, scores, 0.0)
    stream.fail(EngineError("it broke"))
    assert await stream.take() == Delta(tokens, FinishReason.RUNNING, USE, None, scores, 0.0)
    with pytest.raises(EngineError, match="it broke"):
        await stream.take()
