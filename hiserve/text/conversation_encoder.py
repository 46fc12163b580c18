"""Conversations to token ids, with the replies in them as they were generated."""

from __future__ import annotations

from collections.abc import Sequence

from hiserve.core.plan import Int32Array
from hiserve.text.chat_request import ChatRequest
from hiserve.text.reply_tokens import ReplyTokenCache, encode_chat
from hiserve.text.template import ChatTemplate
from hiserve.text.tokenizer import Tokenizer


class ConversationEncoder:
    """Encodes conversations and remembers what they were answered with.

    Args:
        tokenizer: The model's tokenizer.
        template: The model's chat template.
        reply_cache: Where generated replies keep their ids.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, reply_cache: ReplyTokenCache) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._reply_cache = reply_cache

    def encode(self, namespace: bytes, chat: ChatRequest) -> Int32Array:
        """Returns the ids of a conversation, remembered replies with the ids they had, int32 ``[n]``.

        Args:
            namespace: Digest that keeps tenants apart.
            chat: The conversation.

        Raises:
            RequestError: The template refuses the messages.
        """
        return encode_chat(chat, self._reply_cache.recall(namespace, chat), self._template, self._tokenizer)

    def remember(self, namespace: bytes, chat: ChatRequest, text: str, ids: Sequence[int]) -> None:
        """Keeps the ids of a finished reply for the prompts that will contain it.

        Args:
            namespace: As given to ``encode``.
            chat: What the reply answers.
            text: What the client received.
            ids: Everything generated, end token included.
        """
        self._reply_cache.remember(namespace, chat, text, self._tokenizer.without_hidden_end(ids))
