"""The server's prompt encoder: text or messages to token ids; long prompts leave the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.core.request import Retain
from hiserve.errors import ContextLengthError, RequestError
from hiserve.text.conversation import Conversation
from hiserve.text.helpers.fair_threads import FairThreads
from hiserve.text.helpers.pool import HelperPool
from hiserve.text.prompt.parts import Place, place_after, retained
from hiserve.text.prompt.reply_tokens import ReplyTokenCache, Splice, chat_steps, with_thoughts
from hiserve.text.prompt.spelled_tokens import SpelledTokens
from hiserve.text.prompt.steps import PromptLimit, Render, Steps, text_steps
from hiserve.text.reader.buffer import Event
from hiserve.text.template.chat_template import TOO_SLOW, ChatTemplate
from hiserve.text.tokens.detokenizer import TokenBytes
from hiserve.text.tokens.split_points import SplitPoints
from hiserve.text.tokens.tokenizer import Tokenizer

NUM_THREADS = 2
# Encoding this many characters takes about 5 ms; longer texts go to a thread.
INLINE_CHARS = 20_000
# Rendering holds the GIL. Beyond these limits a conversation is rendered in a process.
INLINE_S = 0.02
INLINE_RENDER_CHARS = 2**20
INLINE_WORK_CHARS = 2**23
INLINE_MESSAGES = 512
STEP_CHARS = 200  # fixed cost of an encoding, in characters
INLINE_TOKENS = 4096  # the places of parts in so many tokens are found in about 2 ms


class PromptEncoder:
    """Encodes prompts and conversations. All methods but ``close`` are called from one event loop; ``caller`` names the
    tenant, and tenants take turns.

    Attributes:
        helpers: Processes that render long conversations and parse large bodies.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, reply_cache: ReplyTokenCache) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._reply_cache = reply_cache
        self._split_points = SplitPoints(tokenizer)
        self._spelled_tokens = None if template is None else SpelledTokens(tokenizer, template)
        self._threads = FairThreads(NUM_THREADS, "hiserve-encode")
        self.helpers = HelperPool(template)

    @property
    def splices(self) -> Counter[Splice]:
        """Turns of the assistant in prompts so far, by their tokens."""
        return self._reply_cache.splices

    def hides_tools(self, chat: Conversation) -> bool:
        """Whether a conversation has tools that the chat template does not show to the model."""
        return bool(chat.tools) and self._template is not None and not self._template.shows_tools

    def prepare(self) -> None:
        """Finds the split points before the first long text arrives (0.1 s)."""
        self._split_points.find()

    async def close(self) -> None:
        """Ends threads and processes and cancels encodings that have not begun."""
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
        """Returns the ids of a plain prompt, int32 ``[n]``. No more of the text is encoded than can be needed.

        Args:
            text: Without lone surrogates.
            max_tokens: Context length.
            add_special_tokens: Add the tokens that the tokenizer puts around a text (such as a start token).
            truncate: Keep this number of tokens, the last ones; -1 keeps one less than the context length.
            param: The request field that the text came from.
            caller: The tenant.

        Raises:
            ContextLengthError: The text is far too long.
        """
        self._check_length(len(text), max_tokens, truncate, param=param)
        limit = _prompt_limit(max_tokens, truncate, param)
        steps = text_steps(text, self._split_points, limit, add_special_tokens=add_special_tokens)
        return truncated(await self._run(steps, caller), truncate, max_tokens)

    async def encode_chat(
        self, chat: Conversation, *, namespace: bytes, max_tokens: int, truncate: int | None = None, caller: int = 0
    ) -> Int32Array:
        """Returns the ids of a conversation, int32 ``[n]``; remembered replies keep their ids.

        ``namespace`` is a digest that separates tenants; the other parameters are those of ``encode_text``.

        Raises:
            RequestError: The model has no chat template, or it refuses these messages.
            ContextLengthError: The messages are far too long.
        """
        if self._spelled_tokens is None:
            raise RequestError("this model has no chat template; use /v1/completions.", param="messages")
        shown = sum(len(turn.text) for turn in chat.turns)
        self._check_length(shown, max_tokens, truncate, param="messages")
        known = self._reply_cache.recall(namespace, chat)
        max_chars = max_tokens * self._tokenizer.max_token_chars
        if truncate is not None:
            max_chars = max(max_chars, 4 * chat.num_chars)
        limit = _prompt_limit(max_tokens, truncate, "messages")
        splices = self._reply_cache.splices
        steps = chat_steps(
            chat, known, self._split_points, limit, self._spelled_tokens, max_chars=max_chars, splices=splices
        )
        return truncated(await self._run(steps, caller), truncate, max_tokens)

    def place(self, chat: Conversation, namespace: bytes, prompt: Int32Array, at: int) -> Place:
        """Returns the part of a conversation at a token of its prompt, int32 ``[n]``."""
        chat = with_thoughts(chat, self._reply_cache.recall(namespace, chat))
        return place_after(chat, self._tokenizer.decode(prompt[:at], skip_hidden=False))

    async def retain(
        self, chat: Conversation, namespace: bytes, prompt: Int32Array, token_bytes: TokenBytes, caller: int
    ) -> Retain:
        """Returns the prefixes of a prompt, int32 ``[n]``, that the cache is to evict last: those up to a breakpoint."""
        if not chat.retains:
            return ()
        chat = with_thoughts(chat, self._reply_cache.recall(namespace, chat))
        find = partial(_retained_tokens, chat, prompt, self._tokenizer, token_bytes)
        return await self._threads.do(find, caller) if prompt.size > INLINE_TOKENS else find()

    async def _run(self, steps: Steps, caller: int) -> Int32Array:
        """Runs each step where it does not block the event loop, and yields to the loop between steps."""
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
        if len(step.chat.turns) <= INLINE_MESSAGES and step.chat.num_chars <= INLINE_RENDER_CHARS:
            try:
                return self._template.render(
                    step.chat, max_chars=step.max_chars, max_s=INLINE_S, max_work=INLINE_WORK_CHARS
                )
            except RequestError as error:
                if error.code != TOO_SLOW:
                    raise
        return await self.helpers.render(step.chat, step.max_chars, caller)

    def remember(
        self, namespace: bytes, chat: Conversation, text: str, ids: Sequence[int], events: Sequence[Event] = ()
    ) -> None:
        """Stores the ids of a finished reply to ``chat`` for later prompts that contain it.

        ``text`` is the reply as the client received it; ``ids`` are all generated ids, end token included; ``events``
        are those of the reply; empty if it is text alone.
        """
        self._reply_cache.remember(namespace, chat, text, self._tokenizer.without_hidden_end(ids), events)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens spelled out."""
        return self._tokenizer.decode(ids, skip_hidden=False)

    def _check_length(self, num_chars: int, max_tokens: int, truncate: int | None, *, param: str) -> None:
        least = num_chars // self._tokenizer.max_token_chars
        if least > max_tokens and truncate is None:
            raise ContextLengthError.of(f"{num_chars} characters, at least {least} tokens", max_tokens, param)


def _retained_tokens(chat: Conversation, prompt: Int32Array, tokenizer: Tokenizer, token_bytes: TokenBytes) -> Retain:
    text = tokenizer.decode(prompt, skip_hidden=False)
    ids, places = np.unique(prompt, return_inverse=True)
    ends = np.cumsum(np.array([len(token_bytes.bytes_of(index)) for index in ids.tolist()])[places])
    found = [(len(text[:num_chars].encode()), ttl_s) for num_chars, ttl_s in retained(chat, text)]
    return tuple((int(np.searchsorted(ends, num_bytes, side="right")), ttl_s) for num_bytes, ttl_s in found)


def _prompt_limit(max_tokens: int, truncate: int | None, param: str) -> PromptLimit:
    """Returns the limit of a prompt: encoding ends at the first token beyond it."""
    if truncate is None:
        return PromptLimit(max_tokens, param=param)
    return PromptLimit(min(max_tokens, max_tokens - 1 if truncate == -1 else truncate), from_end=True, param=param)


def truncated(ids: Int32Array, truncate: int | None, max_tokens: int) -> Int32Array:
    """Returns the end of a prompt, int32 ``[n]``, by ``truncate_prompt_tokens``.

    ``truncate`` is a number of tokens; -1 keeps one less than the context length, None keeps all.
    """
    if truncate is None:
        return ids
    return ids[-(max_tokens - 1 if truncate == -1 else truncate) :]
