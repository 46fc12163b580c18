"""Caches the token ids of generated replies, so that a reply in the history keeps them.

A sampled reply is rarely tokenized the way the tokenizer would: "token" may have been sampled as
"to" + "ken". Re-tokenizing the history would end the prefix hit at the first such place, so the ids
of each reply are stored by conversation and inserted into later prompts.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate

import msgspec
import numpy as np

from hiserve.config.serving import MAX_INT32
from hiserve.core.digest import namespace_digest
from hiserve.core.plan import Int32Array
from hiserve.text.conversation import Call, Conversation, Result, Text, Thought, Turn
from hiserve.text.prompt.known_replies import KnownReply, canonical
from hiserve.text.prompt.spelled_tokens import SpelledTokens, joined, pieces
from hiserve.text.prompt.steps import PromptLimit, Render, Steps, join_steps, run_steps
from hiserve.text.reader.buffer import Event, Kind
from hiserve.text.reader.formats import ReplyFormat
from hiserve.text.template.chat_template import ChatTemplate
from hiserve.text.template.probes import SWITCHES
from hiserve.text.tokens.split_points import SplitPoints
from hiserve.text.tokens.tokenizer import Tokenizer

# Precedes a reply's first part, in private-use characters. A prompt that contains one is tokenized whole.
_PLACEHOLDER = "\ue000{}\ue001"
_PLACEHOLDER_PATTERN = re.compile("\ue000([0-9]{1,6})\ue001")
PLAIN = frozenset({Kind.CONTENT, Kind.END})


class Splice(StrEnum):
    """The tokens of a turn of the assistant in a prompt: those that were generated, or why they are others."""

    KEPT = "kept"
    CUT = "cut"  # kept up to a change
    UNKNOWN = "unknown"  # encoded anew: the cache has no such reply to this conversation
    HIDDEN = "hidden"  # the template does not show the reply's first part
    INSPECTED = "inspected"  # the template does more with the parts than show them
    CHANGED = "changed"  # the prompt has another text from the first token on
    TOKENIZER = "tokenizer"  # the tokenizer does not encode parts of a text as it encodes the whole


class ReplyTokenCache:
    """Generated token ids by the conversation before the reply; least recently used first out.

    The reply's words alone are no sufficient key: the same words may have been sampled as different ids in
    another turn, and only the ids of this very turn continue this prefix.

    Args:
        max_entries: Most replies.
        max_tokens: Most tokens of all replies together (4 bytes each).
        row: The format that replies are read by; None for text.

    Attributes:
        splices: Turns of the assistant in prompts, by their tokens.
    """

    def __init__(
        self, *, max_entries: int = 16_384, max_tokens: int = 4_000_000, row: ReplyFormat | None = None
    ) -> None:
        self.splices = Counter(dict.fromkeys(Splice, 0))
        self._row = row
        self._max_entries = max_entries
        self._max_tokens = max_tokens
        self._replies: OrderedDict[bytes, KnownReply] = OrderedDict()
        self._after: dict[bytes, list[bytes]] = {}  # keys of the replies to a conversation, oldest first
        self._num_tokens = 0

    @property
    def num_entries(self) -> int:
        """Cached replies."""
        return len(self._replies)

    @property
    def num_tokens(self) -> int:
        """Cached tokens."""
        return self._num_tokens

    def remember(
        self, namespace: bytes, chat: Conversation, text: str, ids: Sequence[int], events: Sequence[Event] = ()
    ) -> None:
        """Stores the ids of a finished reply to ``chat``.

        If the reply continues the last turn, both are stored as one reply, provided that the ids of that turn are
        known and both are text alone.

        Args:
            namespace: Digest that separates tenants.
            chat: The conversation.
            text: The content of the reply as the client received it.
            ids: Generated ids without an end token.
            events: Of the reply; empty if it is text alone.
        """
        turns = chat.turns
        if chat.continue_final_message:
            begun = self.recall(namespace, chat).get(len(turns) - 1)
            if begun is None or begun.calls or begun.thought or any(event.kind not in PLAIN for event in events):
                return
            *turns_before, last = turns
            turns, text, ids, events = tuple(turns_before), last.text + text, [*begun.ids.tolist(), *ids], ()
        if not ids or len(ids) > self._max_tokens:
            return
        *_, before = _befores(namespace, msgspec.structs.replace(chat, turns=turns))
        reply = KnownReply.of(np.array(ids, dtype=np.int32), text, events, self._row)
        key = before + namespace_digest(b"", text, json.dumps(reply.calls), reply.thought)
        self._forget(key)
        self._replies[key] = reply
        self._after.setdefault(before, []).append(key)
        self._num_tokens += len(ids)
        while len(self._replies) > self._max_entries or self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._replies)))

    def recall(self, namespace: bytes, chat: Conversation) -> dict[int, KnownReply]:
        """Returns the remembered replies among the assistant's turns, by index in ``chat.turns``.

        A reply that equals a turn goes before one that resembles it, and a later one before an earlier one.
        """
        found = {}
        for i, (turn, before) in enumerate(zip(chat.turns, _befores(namespace, chat), strict=False)):
            keys = self._after.get(before, []) if turn.role == "assistant" else []
            for is_same in (KnownReply.answers, KnownReply.resembles):
                key = next((key for key in reversed(keys) if is_same(self._replies[key], turn)), None)
                if key is not None:
                    self._replies.move_to_end(key)
                    found[i] = self._replies[key]
                    break
        return found

    def _forget(self, key: bytes) -> None:
        reply = self._replies.pop(key, None)
        if reply is not None:
            self._num_tokens -= len(reply.ids)
            before = key[: len(key) // 2]
            self._after[before].remove(key)
            if not self._after[before]:
                del self._after[before]


def _befores(namespace: bytes, chat: Conversation) -> Iterator[bytes]:
    """Yields a digest before each turn, and after the last: of everything so far that a template may show.

    Thoughts are left out: clients may leave them out too. So are the spelling of arguments and the switches of thoughts,
    which may differ between requests.
    """
    variables = {name: value for name, value in chat.template_kwargs.items() if name not in SWITCHES}
    setting = [chat.tools, chat.documents, variables]
    before = namespace_digest(namespace, json.dumps(setting)) if any(setting) else namespace_digest(namespace)
    for turn in chat.turns:
        yield before
        before = namespace_digest(before, turn.role, turn.text)
        calls = [[part.name, canonical(part.arguments)] for part in turn.parts if isinstance(part, Call)]
        if calls or turn.fields:
            before = namespace_digest(before, json.dumps([calls, turn.fields]))
    yield before


def encode_chat(
    chat: Conversation,
    known: Mapping[int, KnownReply],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    splices: Counter[Splice] | None = None,
) -> Int32Array:
    """Runs ``chat_steps`` in this thread, without a limit of tokens.

    Raises:
        RequestError: The template refuses the messages.
    """
    split_points, spelled_tokens = SplitPoints(tokenizer), SpelledTokens(tokenizer, template)
    steps = chat_steps(chat, known, split_points, PromptLimit(MAX_INT32), spelled_tokens, splices=splices)
    return run_steps(steps, tokenizer, template)


def chat_steps(
    chat: Conversation,
    known: Mapping[int, KnownReply],
    split_points: SplitPoints,
    limit: PromptLimit,
    spelled_tokens: SpelledTokens,
    *,
    max_chars: int | None = None,
    splices: Counter[Splice] | None = None,
) -> Steps:
    """Renders a conversation and encodes it; known replies keep their ids, and words of users are text. Returns the prompt, int32 ``[n]``.

    A thought that the client left out is put back before. The template is rendered a second time with a placeholder before
    the first part of each known reply. If the text without the placeholders is exactly the true text, the placeholders are
    the places of the replies, and only the rest is tokenized::

        <|user|>Hi<|end|><|assistant|>•Hello<|end|><|user|>Bye<|end|><|assistant|>
        └────────── encode ──────────┘ └ids┘└───────────── encode ──────────────┘

    A reply that the template cuts keeps the ids up to there. With a template that inspects the contents (counts them,
    compares them) the comparison fails, and the whole text is tokenized.

    Args:
        chat: The conversation.
        known: Replies among its turns, by index. Ids that spell something else are ignored.
        split_points: Where texts may be cut, for the model's tokenizer.
        limit: Of the prompt.
        spelled_tokens: Of the model: those in the words of users and tools are encoded as text.
        max_chars: As for ``ChatTemplate.render``.
        splices: Counts the turns of the assistant.

    Raises:
        ContextLengthError: The prompt is too long.
        RequestError: The template refuses the messages.
    """
    chat, separator = spelled_tokens.divided(with_thoughts(chat, known))
    text, cuts = joined((yield Render(chat, max_chars)), separator)
    tokenizer = split_points.tokenizer
    count = Counter[Splice]() if splices is None else splices
    count[Splice.UNKNOWN] += sum(turn.role == "assistant" and i not in known for i, turn in enumerate(chat.turns))
    if not tokenizer.is_concatenative:
        count[Splice.TOKENIZER] += len(known)
        known = {}
    shown = {i: reply for i, reply in known.items() if reply.first[1].rstrip() in text}
    spelled, _ = joined((yield Render(_with_placeholders(chat, shown), None)), separator) if shown else (text, [])
    places = _places(text, spelled, shown)
    if places is None:
        count[Splice.INSPECTED] += len(shown)
        places = dict.fromkeys(shown, -1)
    count[Splice.HIDDEN] += len(known) - len(places)
    parts, at = list[str | Int32Array](), 0
    for i, place in places.items():
        found = shown[i].place(text, place, tokenizer) if place >= 0 else None
        if found is not None and found[0] >= at:
            start, end, ids = found
            parts += [*pieces(text, at, start, cuts), ids]
            at = end
            count[Splice.KEPT if len(ids) == len(shown[i].ids) else Splice.CUT] += 1
        elif place >= 0:
            count[Splice.CHANGED] += 1
    parts += pieces(text, at, len(text), cuts)
    return (yield from join_steps(parts, split_points, limit))


def with_thoughts(chat: Conversation, known: Mapping[int, KnownReply]) -> Conversation:
    """Returns the conversation with the thoughts of known replies, by index in ``turns``, that the client left out."""
    if not any(reply.thought for reply in known.values()):
        return chat
    turns = tuple(known[i].restored(turn) if i in known else turn for i, turn in enumerate(chat.turns))
    return msgspec.structs.replace(chat, turns=turns)


def _with_placeholders(chat: Conversation, known: Mapping[int, KnownReply]) -> Conversation:
    """Returns the conversation with a placeholder before the first part of each known reply."""
    turns = tuple(
        _with_placeholder(turn, known[i].first[0], _PLACEHOLDER.format(i)) if i in known else turn
        for i, turn in enumerate(chat.turns)
    )
    return msgspec.structs.replace(chat, turns=turns)


def _with_placeholder(turn: Turn, kind: Kind, placeholder: str) -> Turn:
    parts: list[Text | Thought | Call | Result] = []
    for part in turn.parts:
        kinds = {Thought: Kind.THOUGHT, Text: Kind.CONTENT, Call: Kind.CALL}
        if placeholder and kinds.get(type(part)) is kind:
            name = "name" if isinstance(part, Call) else "text"
            text: str = getattr(part, name)
            bare = text.lstrip()
            part = msgspec.structs.replace(part, **{name: text.removesuffix(bare) + placeholder + bare})
            placeholder = ""
        parts.append(part)
    return msgspec.structs.replace(turn, parts=tuple(parts))


def _places(text: str, spelled: str, known: Collection[int]) -> dict[int, int] | None:
    """Returns where the placeholders are in the true text, in order; None if the template does more than show the parts."""
    split = _PLACEHOLDER_PATTERN.split(spelled)
    numbers = list(map(int, split[1::2]))
    if "".join(split[::2]) != text or len(set(numbers)) < len(numbers) or not set(numbers) <= set(known):
        return None
    ends = accumulate(map(len, split[::2]))
    return dict(zip(numbers, ends, strict=False))
