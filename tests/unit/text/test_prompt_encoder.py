"""Prompts are bounded, long ones are encoded off the event loop, replies lose their end token."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import processors

from hiserve.core.plan import Int32Array
from hiserve.errors import ContextLengthError, RequestError
from hiserve.text.conversation import Conversation, Message
from hiserve.text.prompt.encoder import (
    INLINE_CHARS,
    INLINE_MESSAGES,
    INLINE_RENDER_CHARS,
    INLINE_S,
    PromptEncoder,
    truncated,
)
from hiserve.text.prompt.reply_tokens import ReplyTokenCache
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.tokens.tokenizer import Tokenizer
from tests.helpers import tiny_text
from tests.helpers.chats import chat_of
from tests.helpers.slowness import comparable_s

MESSAGES: list[Message] = [{"role": "user", "content": "a small coffee"}]
CHAT = chat_of(MESSAGES)


def user(content: str, **fields: Any) -> Conversation:
    return chat_of([{"role": "user", "content": content}], **fields)


class WatchedTokenizer(Tokenizer):
    """Notes the thread of each encoding."""

    threads: list[str]

    def encode(self, text: str, *, add_special_tokens: bool) -> Int32Array:
        self.threads = [*getattr(self, "threads", []), threading.current_thread().name]
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest_asyncio.fixture
async def prompts() -> AsyncIterator[tuple[PromptEncoder, WatchedTokenizer, ReplyTokenCache]]:
    tokenizer = WatchedTokenizer(tiny_text.byte_level_backend(), eos_token_ids=[tiny_text.END])
    tokenizer.threads.clear()
    reply_cache = ReplyTokenCache()
    made = PromptEncoder(tokenizer, ChatTemplate(tiny_text.TEMPLATE, {"bos_token": "<|bos|>"}), reply_cache)
    yield made, tokenizer, reply_cache
    await made.close()


async def test_long_prompts_are_encoded_in_a_thread_and_short_ones_inline(prompts: Any) -> None:
    made, tokenizer, _ = prompts
    await made.encode_text("short", max_tokens=100)
    await made.encode_text("x " * INLINE_CHARS, max_tokens=10**6)
    await made.encode_chat(user("x " * INLINE_CHARS), namespace=b"", max_tokens=10**6)
    assert tokenizer.threads[0] == threading.current_thread().name
    assert all(name.startswith("hiserve-encode") for name in tokenizer.threads[1:])
    assert len(tokenizer.threads) == 3


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(prompts: Any) -> None:
    made, tokenizer, _ = prompts
    with pytest.raises(ContextLengthError, match="maximum context length is 8 tokens") as caught:
        await made.encode_text("x" * 10_000, max_tokens=8)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthError) as caught:
        await made.encode_chat(user("x" * 10_000), namespace=b"", max_tokens=8)
    assert caught.value.param == "messages"
    assert tokenizer.threads == []


async def test_a_remembered_reply_loses_its_end_token(prompts: Any) -> None:
    made, tokenizer, replies = prompts
    spelt = tiny_text.spell_in_bytes(tokenizer, "the token")
    made.remember(b"", CHAT, "the token", [*spelt, tiny_text.END])
    history = chat_of([*MESSAGES, {"role": "assistant", "content": "the token"}])
    assert replies.recall(b"", history)[1].ids.tolist() == spelt
    ids = (await made.encode_chat(history, namespace=b"", max_tokens=1000)).tolist()
    assert ",".join(map(str, [*spelt, tiny_text.END])) in ",".join(map(str, ids))


async def test_a_model_without_a_template_has_no_chat() -> None:
    made = PromptEncoder(tiny_text.byte_level(), None, ReplyTokenCache())
    with pytest.raises(RequestError, match="no chat template; use /v1/completions"):
        await made.encode_chat(CHAT, namespace=b"", max_tokens=100)
    await made.close()


@pytest.mark.parametrize(
    ("source", "chat"),
    [
        ("{% for i in range(100000) %}{% set x = i ~ '' %}{% endfor %}{{ messages[0].content }}", CHAT),
        ("{% set x = messages[0].content * 3000000 %}{{ messages[0].content }}", CHAT),
        ("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}", chat_of(MESSAGES * 600)),
    ],
    ids=["slow", "much work", "many messages"],
)
async def test_a_slow_template_does_not_hold_up_the_loop(
    source: str, chat: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told by the CPU time that this process spends on it: a process of its own renders."""
    spent_s: list[float] = []
    template = ChatTemplate(source)
    made = PromptEncoder(tiny_text.byte_level(), template, ReplyTokenCache())
    render = template.render

    def timed(*args: Any, **limits: Any) -> str:
        begin = time.thread_time()
        try:
            return render(*args, **limits)
        finally:
            spent_s.append(comparable_s(time.thread_time() - begin, INLINE_S))
            assert limits["max_s"] <= INLINE_S

    monkeypatch.setattr(template, "render", timed)
    ids = await made.encode_chat(chat, namespace=b"", max_tokens=1000)
    assert tiny_text.byte_level().decode(ids) == "a small coffee"
    assert sum(spent_s) < 10 * INLINE_S
    await made.close()


@pytest.mark.parametrize(
    ("num_messages", "num_chars", "is_in_loop"),
    [
        (INLINE_MESSAGES, 1, True),
        (INLINE_MESSAGES + 1, 1, False),
        (1, INLINE_RENDER_CHARS - 100, True),
        (1, INLINE_RENDER_CHARS + 1, False),
    ],
)
async def test_a_large_conversation_is_not_begun_in_the_loop(
    num_messages: int, num_chars: int, is_in_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, places = ChatTemplate("{{ messages[0].content }}"), list[str]()
    made = PromptEncoder(tiny_text.byte_level(), template, ReplyTokenCache())

    async def aside(*args: Any) -> str:
        places.append("aside")
        return "a"

    monkeypatch.setattr(template, "render", lambda *args, **limits: places.append("loop") or "a")
    monkeypatch.setattr(made.helpers, "render", aside)
    chat = chat_of([{"role": "user", "content": "a" * num_chars}] * num_messages)
    await made.encode_chat(chat, namespace=b"", max_tokens=10**7)
    assert places == ["loop" if is_in_loop else "aside"]
    await made.close()


async def test_a_template_that_refuses_is_not_asked_again() -> None:
    calls = []
    template = ChatTemplate("{{ raise_exception('no') }}")
    render = template.render
    template.render = lambda *args, **kwargs: calls.append(1) or render(*args, **kwargs)  # type: ignore[method-assign]
    made = PromptEncoder(tiny_text.byte_level(), template, ReplyTokenCache())
    with pytest.raises(RequestError, match="refuses"):
        await made.encode_chat(CHAT, namespace=b"", max_tokens=1000)
    assert len(calls) == 1
    await made.close()


async def test_what_the_template_adds_counts_for_the_length_too() -> None:
    made = PromptEncoder(tiny_text.byte_level(), ChatTemplate("{{ messages[0].content * 1000 }}"), ReplyTokenCache())
    with pytest.raises(ContextLengthError):
        await made.encode_chat(CHAT, namespace=b"", max_tokens=100)
    await made.close()


async def test_special_tokens_of_the_tokenizer_are_added_unless_not_wanted() -> None:
    backend = tiny_text.byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tiny_text.BOS)]
    )
    made = PromptEncoder(Tokenizer(backend), None, ReplyTokenCache())
    bare = (await made.encode_text("the", max_tokens=100, add_special_tokens=False)).tolist()
    assert (await made.encode_text("the", max_tokens=100)).tolist() == [tiny_text.BOS, *bare]
    await made.close()


@pytest.mark.parametrize(("truncate", "kept"), [(None, 40), (7, 7), (30, 30), (100, 30), (-1, 29)])
async def test_a_truncated_prompt_keeps_its_end(prompts: Any, truncate: int | None, kept: int) -> None:
    """Of more than the context holds, no more than that is encoded: it is refused in any case."""
    made, tokenizer, _ = prompts
    text = "x " * 20
    whole = tokenizer.encode(text, add_special_tokens=True)
    assert len(whole) == 40
    ids = await made.encode_text(text, max_tokens=30, truncate=truncate)
    assert ids.tolist() == whole[-kept:].tolist()
    assert (
        truncated(whole, truncate, 30).tolist() == whole[-min(40, truncate or 40) if truncate != -1 else -29 :].tolist()
    )
    whole = await made.encode_chat(user(text), namespace=b"", max_tokens=1000)
    ids = await made.encode_chat(user(text), namespace=b"", max_tokens=1000, truncate=5)
    assert ids.tolist() == whole[-5:].tolist()


async def test_a_prompt_of_any_length_may_be_truncated(prompts: Any) -> None:
    made, _, _ = prompts
    text = "x" * 10_000
    assert len(await made.encode_text(text, max_tokens=8, truncate=-1)) == 7
    assert len(await made.encode_chat(user(text), namespace=b"", max_tokens=8, truncate=-1)) == 7


async def test_ids_become_text_again_with_special_tokens(prompts: Any) -> None:
    made, _, _ = prompts
    ids = await made.encode_chat(CHAT, namespace=b"", max_tokens=100)
    assert made.detokenize(ids.tolist()) == "<|bos|><|user|>a small coffee<|end|><|assistant|>"


async def test_what_no_template_expects_is_a_typed_error_in_bounded_time(prompts: Any) -> None:
    made, _, _ = prompts
    begin = time.process_time()
    many = Conversation(turns=chat_of([{"role": "user", "content": "\x00"}]).turns * 16_384)
    assert len(await made.encode_chat(many, namespace=b"", max_tokens=10**6)) == 3 * 16_384 + 2
    deep = {"role": "user", "content": "x", "name": "y" * 10**6}
    await made.encode_chat(chat_of([deep]), namespace=b"", max_tokens=100)
    assert comparable_s(time.process_time() - begin, 5.0) < 5.0
