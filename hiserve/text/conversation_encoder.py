"""Conversations to token ids. Replies in the history keep the ids they were generated with."""

from __future__ import annotations

from collections.abc import Sequence

from hiserve.core.plan import Int32Array
from hiserve.text.chat_request import ChatRequest
from hiserve.text.reply_tokens import ReplyTokenCache, encode_chat
from hiserve.text.template import ChatTemplate
from hiserve.text.tokenizer import Tokenizer


class ConversationEncoder:
    """Encodes conversations and remembers the token ids of their replies."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, reply_cache: ReplyTokenCache) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._reply_cache = reply_cache

    def encode(self, namespace: bytes, chat: ChatRequest) -> Int32Array:
        """Returns the ids of a conversation, int32 ``[n]``; remembered replies keep their ids.

        ``namespace`` is a digest that separates tenants.

        Raises:
            RequestError: The template refuses the messages.
        """
        return encode_chat(chat, self._reply_cache.recall(namespace, chat), self._template, self._tokenizer)

    def remember(self, namespace: bytes, chat: ChatRequest, text: str, ids: Sequence[int]) -> None:
        """Stores the ids of a finished reply to ``chat`` for later prompts that contain it.

        ``text`` is the reply as the client received it; ``ids`` are all generated ids, end token included.
        """
        self._reply_cache.remember(namespace, chat, text, self._tokenizer.without_hidden_end(ids))
