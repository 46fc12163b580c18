"""Prompts for the engine: text or messages in, token ids out, long ones off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hiserve.core.plan import Int32Array
from hiserve.errors import ContextLengthError, RequestError
from hiserve.text.chat import ChatTemplate, Message
from hiserve.text.replies import Replies, encode_messages
from hiserve.text.tokenizer import Tokenizer

# Encoding this many characters takes about 5 ms; longer texts go to a thread.
INLINE_CHARS = 20_000


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

    def close(self) -> None:
        """Ends the threads; encodings that have not begun are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_text(self, text: str, *, max_tokens: int) -> Int32Array:
        """Returns the ids of a plain prompt, with the tokenizer's own special tokens, int32 ``[n]``.

        Args:
            text: Without lone surrogates.
            max_tokens: Context length; a text that cannot fit it is refused before it is encoded.

        Raises:
            ContextLengthError: The text is far too long.
        """
        self._check_length(len(text), max_tokens, param="prompt")
        return await self._off_loop(len(text), lambda: self._tokenizer.encode(text, add_special_tokens=True))

    async def encode_chat(self, messages: Sequence[Message], *, namespace: bytes, max_tokens: int) -> Int32Array:
        """Returns the ids of a conversation, remembered replies with the ids they had, int32 ``[n]``.

        Args:
            messages: As ``parse_messages`` returns them.
            namespace: Digest that keeps tenants apart.
            max_tokens: Context length; messages that cannot fit it are refused before they are encoded.

        Raises:
            RequestError: The model has no chat template, or it refuses these messages.
            ContextLengthError: The messages are far too long.
        """
        template = self._template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions.", param="messages")
        num_chars = sum(len(message["content"]) for message in messages)
        self._check_length(num_chars, max_tokens, param="messages")
        known = self._replies.recall(namespace, messages)
        return await self._off_loop(num_chars, lambda: encode_messages(messages, known, template, self._tokenizer))

    def remember(self, namespace: bytes, messages: Sequence[Message], text: str, ids: Sequence[int]) -> None:
        """Keeps the ids of a finished reply for the prompts that will contain it.

        Args:
            namespace: As given to ``encode_chat``.
            messages: As given to ``encode_chat``.
            text: What the client received.
            ids: Everything generated, end token included.
        """
        end = len(ids)
        while end and ids[end - 1] in self._tokenizer.hidden_ids:
            end -= 1
        self._replies.remember(namespace, messages, text, ids[:end])

    def _check_length(self, num_chars: int, max_tokens: int, *, param: str) -> None:
        least = num_chars // self._tokenizer.max_token_chars
        if least > max_tokens:
            raise ContextLengthError(
                f"{param} has {num_chars} characters, at least {least} tokens; the context is {max_tokens} tokens. "
                "Shorten it.",
                param=param,
            )

    async def _off_loop(self, num_chars: int, encode: Callable[[], Int32Array]) -> Int32Array:
        if num_chars <= INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
