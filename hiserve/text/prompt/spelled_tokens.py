"""Keeps the words of users and tools text: tokens of control that they spell out are encoded as their characters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from hiserve.errors import RequestError
from hiserve.text.conversation import Conversation, Result, Text, Turn
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.tokens.tokenizer import Tokenizer

_PRIVATE = range(0xF0000, 0xFFFFE)  # characters without a meaning, of which one divides tokens
_GUARDED = ("user", "tool")


class SpelledTokens:
    """Finds tokens of control in words that are not the operator's or the model's.

    Such a token is special, or the chat template writes it; others, such as a run of spaces, are words of anybody.
    Encoded as one token, it would end a turn, or begin a turn of the system, a call or a thought.

    Args:
        tokenizer: Of the model. Nothing is found where a text cannot be encoded in parts (``is_concatenative``).
        template: The chat template.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        source = template.sources.source + (template.sources.tool_source or "")
        contents = [
            token.content
            for token in tokenizer.added_tokens
            if len(token.content.strip()) > 1 and (token.special or token.content in source)
        ]
        rests: dict[str, list[str]] = {}
        for content in contents if tokenizer.is_concatenative else ():
            rests.setdefault(content[0], []).append(re.escape(content[1:]))
        pattern = "|".join(f"{re.escape(first)}(?={'|'.join(found)})" for first, found in rests.items())
        self._begins = re.compile(pattern) if pattern else None

    def divided(self, chat: Conversation) -> tuple[Conversation, str]:
        """Returns a conversation whose users and tools spell no token of control, and the separator that divides these.

        The separator is empty if there is nothing to divide. Without it, the prompt is that of the conversation.

        Raises:
            RequestError: The conversation has every character that could be the separator.
        """
        if self._begins is None or not any(self._is_spelled(turn) for turn in chat.turns):
            return chat, ""
        used = set(msgspec.json.encode(chat).decode())
        separator = next((chr(code) for code in _PRIVATE if chr(code) not in used), None)
        if separator is None:
            raise RequestError("the messages have all private-use characters. Leave one out.", param="messages")
        turns = tuple(self._divided(turn, separator) if self._is_spelled(turn) else turn for turn in chat.turns)
        return msgspec.structs.replace(chat, turns=turns), separator

    def _is_spelled(self, turn: Turn) -> bool:
        if turn.role not in _GUARDED or self._begins is None:
            return False
        texts = [part.text for part in turn.parts if isinstance(part, Text | Result)]
        return any(map(self._begins.search, (*texts, *turn.fields.values())))

    def _divided(self, turn: Turn, separator: str) -> Turn:
        assert self._begins is not None

        def cut(text: str) -> str:
            return self._begins.sub(rf"\g<0>{separator}", text)  # type: ignore[union-attr]

        parts = [
            msgspec.structs.replace(part, text=cut(part.text)) if isinstance(part, Text | Result) else part
            for part in turn.parts
        ]
        fields = {name: cut(text) for name, text in turn.fields.items()}
        return msgspec.structs.replace(turn, parts=tuple(parts), fields=fields)


def joined(divided: str, separator: str) -> tuple[str, list[int]]:
    """Returns a text without separators, and their places in it, in order."""
    if not separator:
        return divided, []
    pieces, places = divided.split(separator), list[int]()
    for piece in pieces[:-1]:
        places.append(len(piece) + (places[-1] if places else 0))
    return "".join(pieces), places


def pieces(text: str, start: int, end: int, places: Sequence[int]) -> list[str]:
    """Returns ``text[start:end]``, divided at the places that lie within."""
    cuts = [start, *(place for place in places if start < place < end), end]
    return [text[first:last] for first, last in pairwise(cuts)]
