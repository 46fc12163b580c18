"""Conversations from messages in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hiserve.text.body.chat import parse_chat
from hiserve.text.conversation import Conversation


def chat_of(messages: Iterable[dict[str, Any]], **fields: Any) -> Conversation:
    """Returns a conversation of these messages."""
    return Conversation(turns=parse_chat({"messages": list(messages)}).turns, **fields)
