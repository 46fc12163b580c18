"""Prompts for the engine: text or messages in, token ids out, long ones off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from hiserve.core.plan import Int32Array
from hiserve.errors import ContextLengthError, RequestError
from hiserve.text.chat_request import ChatRequest
from hiserve.text.encoding_steps import Render, Steps, Wanted, text_steps
from hiserve.text.fair_threads import FairThreads
from hiserve.text.helper_pool import HelperPool
from hiserve.text.reply_tokens import ReplyTokenCache, chat_steps
from hiserve.text.split_points import SplitPoints
from hiserve.text.template import TOO_SLOW, ChatTemplate
from hiserve.text.tokenizer import Tokenizer

# Encoding this many characters takes about 5 ms; longer texts go to a thread.
INLINE_CHARS = 20_000
# A template that takes longer or works more goes to a process, and so do conversations with more: it holds the GIL.
INLINE_S = 0.02
INLINE_RENDER_CHARS = 2**20
INLINE_WORK_CHARS = 2**23
INLINE_MESSAGES = 512
STEP_CHARS = 200  # what the encoding of an empty text costs


class PromptEncoder:
    """Encodes what clients send. Everything but ``close`` is called from one event loop.

    Args:
        tokenizer: The model's tokenizer.
        template: The model's chat template, or None.
        reply_cache: Where generated replies keep their ids.
        num_threads: Threads that encode long prompts.

    Attributes:
        helpers: Processes that render long conversations, and read large bodies.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, reply_cache: ReplyTokenCache, *, num_threads: int = 2
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._reply_cache = reply_cache
        self._split_points = SplitPoints(tokenizer)
        self._threads = FairThreads(num_threads, "hiserve-encode")
        self.helpers = HelperPool(template)

    def hides_tools(self, chat: ChatRequest) -> bool:
        """Whether a conversation has tools that the chat template does not show to the model."""
        return bool(chat.tools) and self._template is not None and not self._template.shows_tools

    def prepare(self) -> None:
        """Finds out where long texts may be cut, before the first one comes: 0.1 s."""
        self._split_points.find()

    async def close(self) -> None:
        """Ends threads and processes; encodings that have not begun are cancelled."""
        self._threads.close()
        await self.helpers.close()

    async def encode_text(
        self,
        text: str,
        *,
        max_tokens: int,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        param: str = "prompt",
        caller: int = 0,
    ) -> Int32Array:
        """Returns the ids of a plain prompt, int32 ``[n]``.

        Args:
            text: Without lone surrogates.
            max_tokens: Context length; of a text that does not fit it, no more is encoded.
            add_special_tokens: Add what the tokenizer puts around a text (such as a start token).
            truncate: Keep the last so many tokens; -1 keeps as many as leave room for one more. Only the end of the text
                is encoded then, as far as it counts.
            param: The request field it came from.
            caller: Whose text it is; callers take turns.

        Raises:
            ContextLengthError: The text is far too long.
        """
        self._check_length(len(text), max_tokens, truncate, param=param)
        wanted = _wanted(max_tokens, truncate, param)
        steps = text_steps(text, self._split_points, wanted, add_special_tokens=add_special_tokens)
        return truncated(await self._run(steps, caller), truncate, max_tokens)

    async def encode_chat(
        self, chat: ChatRequest, *, namespace: bytes, max_tokens: int, truncate: int | None = None, caller: int = 0
    ) -> Int32Array:
        """Returns the ids of a conversation, remembered replies with the ids they had, int32 ``[n]``.

        Args:
            chat: The conversation.
            namespace: Digest that keeps tenants apart.
            max_tokens: Context length; of messages that do not fit it, no more is encoded.
            truncate: As for ``encode_text``.
            caller: As for ``encode_text``.

        Raises:
            RequestError: The model has no chat template, or it refuses these messages.
            ContextLengthError: The messages are far too long.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions.", param="messages")
        shown = sum(len(message["content"]) for message in chat.messages)
        self._check_length(shown, max_tokens, truncate, param="messages")
        known = self._reply_cache.recall(namespace, chat)
        max_chars = max_tokens * self._tokenizer.max_token_chars
        if truncate is not None:
            max_chars = max(max_chars, 4 * chat.num_chars)
        wanted = _wanted(max_tokens, truncate, "messages")
        steps = chat_steps(chat, known, self._split_points, wanted, max_chars=max_chars)
        return truncated(await self._run(steps, caller), truncate, max_tokens)

    async def _run(self, steps: Steps, caller: int) -> Int32Array:
        """Runs steps, each where it holds nobody up; the event loop goes round between them."""
        done: Any = None
        num_chars = 0
        while True:
            try:
                step = steps.send(done)
            except StopIteration as end:
                ids: Int32Array = end.value
                return ids
            if isinstance(step, Render):
                done = await self._render(step, caller)
                continue
            num_chars += len(step.text) + STEP_CHARS
            encode = partial(self._tokenizer.encode, step.text, add_special_tokens=step.add_special_tokens)
            if len(step.text) > INLINE_CHARS:
                done = await self._threads.do(encode, caller)
            else:
                done = encode()
            if num_chars > INLINE_CHARS:
                await asyncio.sleep(0)
                num_chars = 0

    async def _render(self, step: Render, caller: int) -> str:
        assert self._template is not None, "a conversation without a template"
        if len(step.chat.messages) <= INLINE_MESSAGES and step.chat.num_chars <= INLINE_RENDER_CHARS:
            try:
                return self._template.render(
                    step.chat, max_chars=step.max_chars, max_s=INLINE_S, max_work=INLINE_WORK_CHARS
                )
            except RequestError as error:
                if error.code != TOO_SLOW:
                    raise
        return await self.helpers.render(step.chat, step.max_chars, caller)

    def remember(self, namespace: bytes, chat: ChatRequest, text: str, ids: Sequence[int]) -> None:
        """Keeps the ids of a finished reply for the prompts that will contain it.

        Args:
            namespace: As given to ``encode_chat``.
            chat: As given to ``encode_chat``.
            text: What the client received.
            ids: Everything generated, end token included.
        """
        self._reply_cache.remember(namespace, chat, text, self._tokenizer.without_hidden_end(ids))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens as they are spelled."""
        return self._tokenizer.decode(ids, skip_hidden=False)

    def _check_length(self, num_chars: int, max_tokens: int, truncate: int | None, *, param: str) -> None:
        least = num_chars // self._tokenizer.max_token_chars
        if least > max_tokens and truncate is None:
            raise ContextLengthError(
                f"the prompt is too long: {param} has {num_chars} characters, at least {least} tokens; this model's maximum "
                f"context length is {max_tokens} tokens. "
                "Shorten it.",
                param=param,
            )


def _wanted(max_tokens: int, truncate: int | None, param: str) -> Wanted:
    """Returns how much of a prompt counts; one token more than fits is enough to refuse it."""
    if truncate is None:
        return Wanted(max_tokens, param=param)
    return Wanted(min(max_tokens, max_tokens - 1 if truncate == -1 else truncate), from_end=True, param=param)


def truncated(ids: Int32Array, truncate: int | None, max_tokens: int) -> Int32Array:
    """Keeps the end of a prompt, as ``truncate_prompt_tokens`` of a request says.

    Args:
        ids: int32 ``[n]``.
        truncate: Tokens to keep; -1 keeps as many as leave room for one more in the context, None keeps all.
        max_tokens: Context length.
    """
    if truncate is None:
        return ids
    return ids[-(max_tokens - 1 if truncate == -1 else truncate) :]
