"""Prompts are bounded, long ones are encoded off the event loop, replies lose their end token."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from hiserve.core.plan import Int32Array
from hiserve.errors import ContextLengthError, RequestError
from hiserve.text.chat import ChatTemplate
from hiserve.text.prompts import INLINE_CHARS, Prompts
from hiserve.text.replies import Replies
from hiserve.text.tokenizer import Tokenizer
from tests.helpers import tiny_text

MESSAGES = [{"role": "user", "content": "a small coffee"}]


class WatchedTokenizer(Tokenizer):
    """Notes the thread of each encoding."""

    threads: list[str]

    def encode(self, text: str, *, add_special_tokens: bool) -> Int32Array:
        self.threads = [*getattr(self, "threads", []), threading.current_thread().name]
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest_asyncio.fixture
async def prompts() -> AsyncIterator[tuple[Prompts, WatchedTokenizer, Replies]]:
    tokenizer = WatchedTokenizer(tiny_text.byte_level_backend(), eos_token_ids=[tiny_text.END])
    tokenizer.threads.clear()
    replies = Replies()
    made = Prompts(tokenizer, ChatTemplate(tiny_text.TEMPLATE, {"bos_token": "<|bos|>"}), replies)
    yield made, tokenizer, replies
    made.close()


async def test_long_prompts_are_encoded_in_a_thread_and_short_ones_inline(prompts: Any) -> None:
    made, tokenizer, _ = prompts
    await made.encode_text("short", max_tokens=100)
    await made.encode_text("x " * INLINE_CHARS, max_tokens=10**6)
    await made.encode_chat([{"role": "user", "content": "x " * INLINE_CHARS}], namespace=b"", max_tokens=10**6)
    assert tokenizer.threads[0] == threading.current_thread().name
    assert all(name.startswith("hiserve-encode") for name in tokenizer.threads[1:])
    assert len(tokenizer.threads) == 3


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(prompts: Any) -> None:
    made, tokenizer, _ = prompts
    with pytest.raises(ContextLengthError, match="the context is 8 tokens") as caught:
        await made.encode_text("x" * 10_000, max_tokens=8)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthError) as caught:
        await made.encode_chat([{"role": "user", "content": "x" * 10_000}], namespace=b"", max_tokens=8)
    assert caught.value.param == "messages"
    assert tokenizer.threads == []


async def test_a_remembered_reply_loses_its_end_token(prompts: Any) -> None:
    made, tokenizer, replies = prompts
    spelt = tiny_text.spell_in_bytes(tokenizer, "the token")
    made.remember(b"", MESSAGES, "the token", [*spelt, tiny_text.END])
    history = [*MESSAGES, {"role": "assistant", "content": "the token"}]
    assert replies.recall(b"", history)[1].tolist() == spelt
    ids = (await made.encode_chat(history, namespace=b"", max_tokens=1000)).tolist()
    assert ",".join(map(str, [*spelt, tiny_text.END])) in ",".join(map(str, ids))


async def test_a_model_without_a_template_has_no_chat() -> None:
    made = Prompts(tiny_text.byte_level(), None, Replies())
    with pytest.raises(RequestError, match="no chat template; use /v1/completions"):
        await made.encode_chat(MESSAGES, namespace=b"", max_tokens=100)
    made.close()
