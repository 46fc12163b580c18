"""Remembers the token ids of generated replies, so that a reply in the history keeps them.

A sampled reply is rarely tokenized the way the tokenizer would: "token" may have been sampled as
"to" + "ken". Re-tokenizing the history would end the prefix hit at the first such place, so the ids
of each reply are stored by conversation and inserted into later prompts.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from hiserve.config.serving import MAX_INT32
from hiserve.core.digest import namespace_digest
from hiserve.core.plan import Int32Array
from hiserve.text.conversation import Conversation, Text, Turn
from hiserve.text.encoding_steps import Render, Steps, Wanted, join_steps, run_steps
from hiserve.text.split_points import SplitPoints
from hiserve.text.template import RENDER_S, ChatTemplate
from hiserve.text.tokenizer import Tokenizer

# Placeholder of the content of message i, in private-use characters. A prompt that contains one is tokenized whole.
_STAND_IN = "\ue000{}\ue001"
_STAND_IN_PATTERN = re.compile("\ue000([0-9]{1,6})\ue001")


class ReplyTokenCache:
    """Generated token ids by conversation, the reply included; least recently used first out.

    The reply's text alone is no sufficient key: the same words may have been sampled as different ids in
    another turn, and only the ids of this very turn continue this prefix.

    Args:
        max_entries: Most replies.
        max_tokens: Most tokens of all replies together (4 bytes each).
    """

    def __init__(self, *, max_entries: int = 16_384, max_tokens: int = 4_000_000) -> None:
        self._max_entries = max_entries
        self._max_tokens = max_tokens
        self._ids: OrderedDict[bytes, Int32Array] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_entries(self) -> int:
        """Replies remembered."""
        return len(self._ids)

    @property
    def num_tokens(self) -> int:
        """Tokens remembered."""
        return self._num_tokens

    def remember(self, namespace: bytes, chat: Conversation, text: str, ids: Sequence[int]) -> None:
        """Stores the ids of a finished reply to ``chat``.

        If the reply continues the last message, both are stored as one reply, provided that the ids of that message are
        known. ``text`` is the reply as the client received it; ``ids`` have no end token.
        """
        turns = list(chat.turns)
        if chat.continue_final_message:
            begun = self.recall(namespace, chat).get(len(turns) - 1)
            if begun is None:
                return
            *turns, last = turns
            text, ids = last.text + text, [*begun.tolist(), *ids]
        if not ids or len(ids) > self._max_tokens:
            return
        answered = (*turns, Turn("assistant", (Text(text),)))
        *_, key = _reply_keys(namespace, msgspec.structs.replace(chat, turns=answered))
        self._num_tokens -= len(self._ids.pop(key, ()))
        self._ids[key] = np.array(ids, dtype=np.int32)
        self._num_tokens += len(ids)
        while len(self._ids) > self._max_entries or self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._ids.popitem(last=False)[1])

    def recall(self, namespace: bytes, chat: Conversation) -> dict[int, Int32Array]:
        """Returns the known ids of the assistant's messages, by index in ``chat.turns``."""
        found = {}
        for i, key in enumerate(_reply_keys(namespace, chat)):
            if chat.turns[i].role == "assistant" and key in self._ids:
                self._ids.move_to_end(key)
                found[i] = self._ids[key]
        return found


def _reply_keys(namespace: bytes, chat: Conversation) -> Iterator[bytes]:
    """Yields one digest per message: of its words, and of everything before it that a template may show."""
    setting = [chat.tools, chat.documents, chat.template_kwargs]
    before = namespace_digest(namespace, json.dumps(setting)) if any(setting) else namespace
    for message in chat.messages:
        before = key = namespace_digest(before, message["role"], message["content"])
        yield key
        if len(message) > 2:  # a name, tool calls, ...
            more = {name: value for name, value in message.items() if name not in ("role", "content")}
            before = namespace_digest(key, json.dumps(more))


def encode_chat(
    chat: Conversation,
    known: Mapping[int, Int32Array],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    max_chars: int | None = None,
    max_s: float = RENDER_S,
) -> Int32Array:
    """Runs ``chat_steps`` in this thread, without a limit of tokens.

    ``max_s`` limits the template's time, in seconds; the other parameters are those of ``chat_steps``.

    Raises:
        RequestError: The template refuses the messages.
    """
    steps = chat_steps(chat, known, SplitPoints(tokenizer), Wanted(MAX_INT32), max_chars=max_chars)
    return run_steps(steps, tokenizer, template, max_s)


def chat_steps(
    chat: Conversation,
    known: Mapping[int, Int32Array],
    split_points: SplitPoints,
    wanted: Wanted,
    *,
    max_chars: int | None = None,
) -> Steps:
    """Renders a conversation and encodes it; known replies keep their ids. Returns the prompt, int32 ``[n]``.

    The template is rendered a second time with placeholders for the known contents. If replacing the placeholders
    gives exactly the true text, the text is split there and only the rest is tokenized::

        <|user|>Hi<|end|><|assistant|>{0}<|end|><|user|>Bye<|end|><|assistant|>
        └────────── encode ──────────┘ids└───────────── encode ──────────────┘

    A reply that the template trims or cuts is not in the text and is tokenized again. With a template that inspects
    the contents (counts them, compares them) the comparison fails, and the whole text is tokenized.

    Args:
        chat: The conversation.
        known: Ids of assistant messages, by index. Ids that do not decode to the message's content are ignored.
        split_points: Where texts may be cut, for the model's tokenizer.
        wanted: The needed part of the prompt.
        max_chars: As for ``ChatTemplate.render``.

    Raises:
        ContextLengthError: The prompt is too long.
        RequestError: The template refuses the messages.
    """
    text: str = yield Render(chat, max_chars)
    usable = {i: ids for i, ids in known.items() if _is_usable(ids, chat.turns[i].text, text, split_points.tokenizer)}
    pieces = [text]
    if usable:
        marked: str = yield Render(_marked(chat, usable), None)
        pieces = _split(text, marked, chat, usable)
    parts = [usable[int(piece)] if at % 2 else piece for at, piece in enumerate(pieces)]
    return (yield from join_steps(parts, split_points, wanted))


def _is_usable(ids: Int32Array, content: str, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a reply is in the text unchanged and its ids decode to it."""
    is_verbatim = tokenizer.is_concatenative and content in text
    return is_verbatim and tokenizer.decode(ids, skip_hidden=False) == content


def _marked(chat: Conversation, chosen: Collection[int]) -> Conversation:
    """Returns the conversation with placeholders for the chosen contents."""
    turns = tuple(_stood_in(turn, _STAND_IN.format(i)) if i in chosen else turn for i, turn in enumerate(chat.turns))
    return msgspec.structs.replace(chat, turns=turns)


def _stood_in(turn: Turn, text: str) -> Turn:
    parts = tuple(part for part in turn.parts if not isinstance(part, Text))
    return msgspec.structs.replace(turn, parts=(*parts, Text(text)))


def _split(text: str, marked: str, chat: Conversation, chosen: Collection[int]) -> list[str]:
    """Returns text, index, text, index, ..., text; the text alone if the template does more than insert contents."""
    pieces = _STAND_IN_PATTERN.split(marked)
    if any(int(i) not in chosen for i in pieces[1::2]):
        return [text]
    pieces_back = [chat.turns[int(piece)].text if at % 2 else piece for at, piece in enumerate(pieces)]
    return pieces if "".join(pieces_back) == text else [text]
