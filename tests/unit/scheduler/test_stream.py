"""What a client's reader has not taken yet: merged, told once, and before any error."""

from __future__ import annotations

import pytest

from hiserve.core.request import FinishReason
from hiserve.core.reuse import CacheUse
from hiserve.errors import EngineError
from hiserve.scheduler.client import Delta, _Stream

USE = CacheUse(device=16)


async def test_news_that_waits_is_one_delta() -> None:
    stream = _Stream(tag="")
    stream.push([], 0, USE, b"prompt__", 0.25)
    stream.push([5, 6], 0, None, b"abcd", -1)
    assert await stream.take() == Delta([5, 6], FinishReason.RUNNING, USE, b"prompt__abcd", 0.25)
    stream.push([7], 2, None, b"", -1)
    assert await stream.take() == Delta([7], FinishReason.LENGTH, None, b"", -1)


@pytest.mark.parametrize(("tokens", "scores"), [([5], b""), ([], b"abcd")])
async def test_an_error_comes_after_what_was_told_before_it(tokens: list[int], scores: bytes) -> None:
    stream = _Stream(tag="")
    stream.push(tokens, 0, USE, scores, 0.0)
    stream.fail(EngineError("it broke"))
    assert await stream.take() == Delta(tokens, FinishReason.RUNNING, USE, scores, 0.0)
    with pytest.raises(EngineError, match="it broke"):
        await stream.take()
