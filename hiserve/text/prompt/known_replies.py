"""A remembered reply and the place of its tokens in a prompt that contains it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hiserve.core.plan import Int32Array
from hiserve.text.conversation import Call, Thought, Turn
from hiserve.text.reader.buffer import Event, Kind, called, thought
from hiserve.text.reader.formats import ReplyFormat
from hiserve.text.reader.json_values import ANY, JsonValue, as_json
from hiserve.text.tokens.tokenizer import Tokenizer

MAX_OCCURRENCES = 8


class KnownReply(NamedTuple):
    """A generated reply.

    Attributes:
        ids: int32 ``[n]``, without an end token.
        text: Its content.
        thought: Its thoughts.
        calls: Name and arguments of its calls, as ``canonical`` spells them.
        first: The first part that a template shows: thought, content or the name of a call, without white space before it.
        first_stop: Tokens up to its end.
        arguments: Arguments of the calls as JSON, with the token from which they are looked for.
        row: The format, where it has tagged arguments.
    """

    ids: Int32Array
    text: str
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    first: tuple[Kind, str] = (Kind.CONTENT, "")
    first_stop: int = 0
    arguments: tuple[tuple[int, str], ...] = ()
    row: ReplyFormat | None = None

    @classmethod
    def of(cls, ids: Int32Array, text: str, events: Sequence[Event], row: ReplyFormat | None = None) -> KnownReply:
        """Returns the reply that was read as these events by this format, or is text alone if there are none."""
        shown = (Kind.THOUGHT, Kind.CONTENT, Kind.CALL)
        parts = [event for event in events if event.text.strip() and event.kind in shown]
        if not parts:
            return cls(ids, text, first=(Kind.CONTENT, text.lstrip()), first_stop=len(ids))
        first, arguments, begin = parts[0], list[tuple[int, str]](), 0
        for event in events:
            if event.kind is Kind.CALL:
                begin = event.start
            elif event.kind is Kind.ARGUMENTS:
                arguments.append((begin, event.text))
        calls = tuple((name, canonical(written)) for _, name, written in called(events).values())
        tagged = row if row is not None and row.arguments == "tagged" else None
        first_part = first.kind, first.text.lstrip()
        return cls(ids, text, thought(events), calls, first_part, first.stop, tuple(arguments), tagged)

    def answers(self, turn: Turn) -> bool:
        """Whether a turn of the assistant has the content and the calls of this reply, but for white space around it."""
        calls = tuple((part.name, canonical(part.arguments)) for part in turn.parts if isinstance(part, Call))
        return turn.text.strip() == self.text.strip() and calls == self.calls

    def resembles(self, turn: Turn) -> bool:
        """Whether a turn has the content and calls the functions of this reply."""
        names = [part.name for part in turn.parts if isinstance(part, Call)]
        return turn.text.strip() == self.text.strip() and names == [name for name, _ in self.calls]

    def restored(self, turn: Turn) -> Turn:
        """Returns the turn with the thought that the client left out or whose outer white space the client removed."""
        given = "".join([part.text for part in turn.parts if isinstance(part, Thought)]).strip()
        if not self.thought or not self.answers(turn) or given not in ("", self.thought.strip()):
            return turn
        others = [part for part in turn.parts if not isinstance(part, Thought)]
        return Turn(turn.role, (Thought(self.thought), *others), turn.fields)

    def place(self, text: str, at: int, tokenizer: Tokenizer) -> tuple[int, int, Int32Array] | None:
        """Returns the place of the reply in a prompt, and its ids; None without one.

        The ids have the text of that place, except that arguments may spell the same JSON value otherwise. The place
        ends at the first other difference.

        Args:
            text: The prompt.
            at: Start of the reply's first part in it.
            tokenizer: Of the model.
        """
        whole = tokenizer.decode(self.ids, skip_hidden=False)
        start = self._start(whole, text, at, tokenizer)
        if start is None:
            return None
        # places in the reply and in the prompt, and how many characters are equal
        equal: list[tuple[int, int, int]] = []
        x, y = 0, start
        for begin, end in [*self._regions(whole, tokenizer), (len(whole), len(whole))]:
            size = _num_equal(whole, x, begin, text, y)
            equal.append((x, y, size))
            x, y = x + size, y + size
            if x < begin:
                break
            end_in_text = _end_of_same(whole[begin:end], text, y, "" if self.row is None else self.row.value[1])
            if end_in_text is None:
                break
            x, y = end, end_in_text
        else:
            return start, y, self.ids
        return self._part(whole, equal, tokenizer)

    def _start(self, whole: str, text: str, at: int, tokenizer: Tokenizer) -> int | None:
        """Returns where the reply begins in a prompt that has its first part at a place."""
        _, shown = self.first
        end = len(tokenizer.decode(self.ids[: self.first_stop], skip_hidden=False))
        for _ in range(MAX_OCCURRENCES):
            before = whole.rfind(shown, 0, end)
            if before < 0:
                break
            if at >= before and text.startswith(whole[:before], at - before):
                return at - before
            end = before + len(shown) - 1
        return None

    def _regions(self, whole: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
        """Returns the places in the reply of values that may be spelled otherwise: JSON arguments, tagged ones but for texts."""
        if self.row is not None:
            begin = len(tokenizer.decode(self.ids[: self.arguments[0][0]], skip_hidden=False)) if self.arguments else 0
            return self._tagged_values(whole, max(begin - MAX_OCCURRENCES, 0), self.row)
        found, at, last = list[tuple[int, int]](), 0, 0
        for first, written in self.arguments:
            at += len(tokenizer.decode(self.ids[last:first], skip_hidden=False))
            # A character between two tokens may have counted twice.
            begin, last = whole.find(written, max(at - MAX_OCCURRENCES, found[-1][1] if found else 0)), first
            if begin >= 0:
                found.append((begin, begin + len(written)))
        return found

    def _tagged_values(self, whole: str, at: int, row: ReplyFormat) -> list[tuple[int, int]]:
        """Returns the places of tagged values that are no texts."""
        values = [value for _, written in self.arguments for value in _members(written)]
        found: list[tuple[int, int]] = []
        for value in values:
            key = whole.find(row.key[0], at)
            begin = whole.find(row.key[1], key + len(row.key[0])) + len(row.key[1])
            begin = whole.find(row.value[0], begin) + len(row.value[0])
            end = whole.find(row.value[1], begin)
            if min(key, end) < 0 or begin < key:
                break
            at = end + len(row.value[1])
            if not isinstance(value, str):
                bare = whole[begin:end].strip()
                begin = whole.index(bare, begin)
                found.append((begin, begin + len(bare)))
        return found

    def _part(
        self, whole: str, equal: Sequence[tuple[int, int, int]], tokenizer: Tokenizer
    ) -> tuple[int, int, Int32Array] | None:
        """Returns the place of the reply's first whole tokens that the prompt contains."""
        for x, y, size in reversed(equal):
            low, high = 0, len(self.ids)
            while low < high:
                middle = (low + high + 1) // 2
                if len(tokenizer.decode(self.ids[:middle], skip_hidden=False)) <= x + size:
                    low = middle
                else:
                    high = middle - 1
            spelled = tokenizer.decode(self.ids[:low], skip_hidden=False)
            if low and whole.startswith(spelled) and len(spelled) >= x:
                return equal[0][1], y + len(spelled) - x, self.ids[:low]
        return None


def canonical(arguments: str) -> str:
    """Returns one spelling for all spellings of a JSON value; a text that is none as it is."""
    try:
        return json.dumps(_plain(json.loads(arguments)), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _plain(value: Any) -> Any:
    """Returns a value with whole numbers for those that are."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return {name: _plain(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def _num_equal(whole: str, begin: int, end: int, text: str, at: int) -> int:
    """Returns the number of characters of ``whole[begin:end]`` that a text has at a place."""
    if text.startswith(whole[begin:end], at):
        return end - begin
    pairs: Iterable[tuple[str, str]] = zip(whole[begin:end], text[at : at + end - begin], strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), min(end - begin, len(text) - at))


def _members(arguments: str) -> list[Any]:
    """Returns the values of arguments, in order; none if they are not well."""
    try:
        members = json.loads(arguments)
    except (ValueError, RecursionError):
        return []
    return list(members.values()) if isinstance(members, dict) else []


def _end_of_same(written: str, text: str, at: int, closing: str) -> int | None:
    """Returns the end of a value at a place of a text, in any spelling; None for another value.

    Args:
        written: The value as generated.
        text: The text.
        at: The place.
        closing: The mark after a tagged value; empty for JSON.
    """
    if text.startswith(written, at):
        return at + len(written)
    if closing:
        bare = text[at : max(at, text.find(closing, at))].rstrip()
        written, other, end = as_json(written, ANY), as_json(bare, ANY), at + len(bare)
        return end if bare and canonical(other) == canonical(written) else None
    value = JsonValue()
    end_of_value = value.end(text, at)
    if end_of_value is None or value.is_broken:
        return None
    return None if canonical(text[at:end_of_value]) != canonical(written) else end_of_value
