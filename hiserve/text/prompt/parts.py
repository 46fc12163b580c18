"""The part of a conversation at a place of its prompt, found by the texts before that place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from hiserve.text.conversation import Call, Conversation, Text, Thought, Turn

PartName = Literal["system", "tools", "thought", "text", "call"]
# Characters of the template between two parts, at most, and characters by which a part is known that has begun.
BETWEEN_CHARS = 2048
BEGIN_CHARS = 8
MAX_RETAINED = 4  # breakpoints that count: the last ones
# Characters of a part that is known by itself, although words before it are missing.
SURE_CHARS = 24


class Place(NamedTuple):
    """A part of a conversation.

    Attributes:
        turn: Index of its turn; the number of turns for text after the last one. Tools are part of turn 0.
        part: Its kind. Results of tools are text.
        is_new: No turn of the assistant follows it, and it is in none.
    """

    turn: int
    part: PartName
    is_new: bool


class _Part(NamedTuple):
    turn: int
    name: PartName
    begin: str
    whole: tuple[str, ...]  # spellings
    retain_s: int = 0


class _Found(NamedTuple):
    number: int  # among the parts
    begin: int
    end: int


def place_after(chat: Conversation, before: str) -> Place:
    """Returns the first part that a text lacks, or has only the beginning of.

    A thought that the template does not show is such a part where the text ends before the words after it.

    Args:
        chat: The conversation, with the thoughts that the template was given.
        before: The prompt up to the place.
    """
    parts = list(_parts(chat))
    *_, (last_found, _, at) = (_Found(-1, 0, 0), *_find(parts, before))
    first = last_found + 1
    if first + 1 < len(parts) and parts[first].name == "thought":
        has_thought, has_next = (_has_begun(part.begin, before[at:]) for part in parts[first : first + 2])
        first += has_next and not has_thought
    last = max((index for index, turn in enumerate(chat.turns) if turn.role == "assistant"), default=-1)
    if first == len(parts):
        return Place(len(chat.turns), "text", is_new=True)
    return Place(parts[first].turn, parts[first].name, is_new=parts[first].turn > last)


def retained(chat: Conversation, prompt: str) -> list[tuple[int, int]]:
    """Returns the characters of a prompt, and for how many seconds, that the cache is to evict last: a pair for each breakpoint.

    They end where the part after that of the breakpoint begins, or the next that is found.

    Args:
        chat: The conversation, with the thoughts that the template was given.
        prompt: Its prompt.
    """
    parts = list(_parts(chat))
    found = list(_find(parts, prompt))
    points = [(index, part.retain_s) for index, part in enumerate(parts) if part.retain_s][-MAX_RETAINED:]
    return [
        (next((each.begin for each in found if each.number > index), len(prompt)), ttl_s) for index, ttl_s in points
    ]


def _find(parts: Sequence[_Part], text: str) -> Iterator[_Found]:
    """Yields the parts that a text shows, in order."""
    at, first, num_skipped, is_sure = 0, 0, 0, True
    for index, part in enumerate(parts):
        size = max(map(len, part.whole))
        is_head = part.turn == 0 or parts[first - 1].turn == 0  # tools may stand anywhere in it
        most = len(text) if is_head else at + size + num_skipped + BETWEEN_CHARS
        begin = 0 if part.name == "tools" else at
        ends = [place + len(whole) for whole in part.whole if (place := text.find(whole, begin, most)) >= 0]
        if ends and (is_sure or size >= SURE_CHARS):
            end = max(at, *ends)
            yield _Found(index, max(at, end - size), end)
            at, first, num_skipped, is_sure = end, index + 1, 0, True
        else:
            num_skipped += size
            is_sure = is_sure and part.name not in ("text", "system")  # which templates show


def _parts(chat: Conversation) -> Iterator[_Part]:
    """Yields the parts in the order in which templates show them, tools after the first system turns."""
    tools = tuple(json.dumps(tool["function"]["name"], ensure_ascii=False) for tool in (chat.tools or ())[-1:])
    has_tools = not tools
    for index, turn in enumerate(chat.turns):
        if not has_tools and turn.role != "system":
            has_tools = True
            yield _Part(0, "tools", tools[0], tools, chat.tools_retain_s)
        yield from _parts_of(index, turn)


def _parts_of(index: int, turn: Turn) -> Iterator[_Part]:
    for part in turn.parts:
        if isinstance(part, Call):
            spelled = json.dumps(part.value, ensure_ascii=False)
            yield _Part(index, "call", part.name, (part.arguments, spelled, *_leaf(part.value)), part.retain_s)
        elif text := part.text.strip():
            name: PartName = "thought" if isinstance(part, Thought) else "text"
            is_system = turn.role == "system" and isinstance(part, Text)
            retain_s = 0 if isinstance(part, Thought) else part.retain_s
            yield _Part(index, "system" if is_system else name, text[:BEGIN_CHARS], (text,), retain_s)


def _has_begun(begin: str, after: str) -> bool:
    return begin in after or any(after.endswith(begin[:size]) for size in range(2, len(begin)))


def _leaf(value: Any) -> tuple[str, ...]:
    """Returns the text of the last value within arguments, where it is long enough to differ from marks."""
    while isinstance(value, dict | list) and value:
        value = list(value.values())[-1] if isinstance(value, dict) else value[-1]
    text = value if isinstance(value, str) else json.dumps(value)
    return (text,) if len(text) >= BEGIN_CHARS else ()
