"""Prompts for the engine: text or messages in, token ids out, long ones off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hiserve.core.plan import Int32Array
from hiserve.errors import ContextLengthError, RequestError
from hiserve.text.chat import ChatRequest
from hiserve.text.replies import Replies, encode_chat
from hiserve.text.template import TOO_SLOW, ChatTemplate
from hiserve.text.tokenizer import Tokenizer

# Encoding this many characters takes about 5 ms; longer texts go to a thread, and so do templates that run longer.
INLINE_CHARS = 20_000
INLINE_S = 0.02


class Prompts:
    """Encodes what clients send. Everything but ``close`` is called from one event loop.

    Args:
        tokenizer: The model's tokenizer.
        template: The model's chat template, or None.
        replies: Where generated replies keep their ids.
        num_threads: Threads that encode long prompts.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, replies: Replies, *, num_threads: int = 2
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._replies = replies
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="hiserve-encode")

    def hides_tools(self, chat: ChatRequest) -> bool:
        """Whether a conversation has tools that the chat template does not show to the model."""
        return bool(chat.tools) and self._template is not None and not self._template.shows_tools

    def close(self) -> None:
        """Ends the threads; encodings that have not begun are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_text(
        self,
        text: str,
        *,
        max_tokens: int,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        param: str = "prompt",
    ) -> Int32Array:
        """Returns the ids of a plain prompt, int32 ``[n]``.

        Args:
            text: Without lone surrogates.
            max_tokens: Context length; a text that cannot fit it is refused before it is encoded.
            add_special_tokens: Add what the tokenizer puts around a text (such as a start token).
            truncate: Keep the last so many tokens; -1 keeps as many as leave room for one more. The text may
                then be of any length.
            param: The request field it came from.

        Raises:
            ContextLengthError: The text is far too long.
        """
        self._check_length(len(text), max_tokens, truncate, param=param)
        encode = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        ids = encode() if len(text) <= INLINE_CHARS else await self._in_thread(encode)
        return truncated(ids, truncate, max_tokens)

    async def encode_chat(
        self, chat: ChatRequest, *, namespace: bytes, max_tokens: int, truncate: int | None = None
    ) -> Int32Array:
        """Returns the ids of a conversation, remembered replies with the ids they had, int32 ``[n]``.

        Args:
            chat: The conversation.
            namespace: Digest that keeps tenants apart.
            max_tokens: Context length; messages that cannot fit it are refused before they are encoded.
            truncate: As for ``encode_text``.

        Raises:
            RequestError: The model has no chat template, or it refuses these messages.
            ContextLengthError: The messages are far too long.
        """
        template = self._template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions.", param="messages")
        shown = sum(len(message["content"]) for message in chat.messages)
        self._check_length(shown, max_tokens, truncate, param="messages")
        known = self._replies.recall(namespace, chat)
        num_chars = chat.num_chars
        max_chars = max_tokens * self._tokenizer.max_token_chars
        if truncate is not None:
            max_chars = max(max_chars, 4 * num_chars)
        encode = partial(encode_chat, chat, known, template, self._tokenizer, max_chars=max_chars)
        if num_chars <= INLINE_CHARS:
            try:
                return truncated(encode(max_s=INLINE_S), truncate, max_tokens)
            except RequestError as error:
                if error.code != TOO_SLOW:
                    raise
        return truncated(await self._in_thread(encode), truncate, max_tokens)

    def remember(self, namespace: bytes, chat: ChatRequest, text: str, ids: Sequence[int]) -> None:
        """Keeps the ids of a finished reply for the prompts that will contain it.

        Args:
            namespace: As given to ``encode_chat``.
            chat: As given to ``encode_chat``.
            text: What the client received.
            ids: Everything generated, end token included.
        """
        end = len(ids)
        while end and ids[end - 1] in self._tokenizer.hidden_ids:
            end -= 1
        self._replies.remember(namespace, chat, text, ids[:end])

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

    async def _in_thread(self, encode: Callable[[], Int32Array]) -> Int32Array:
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)


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
