"""Calls in a reply: the part of the reader after an opening mark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hiserve.text.reader.buffer import SPACE, Kind, Reading, ReplyBuffer
from hiserve.text.reader.json_values import ANY, STRING, JsonValue, OpenString, Types, as_json, parameter_types, quoted
from hiserve.text.reader.marks import ReplySyntax

# Characters before the name of a call; a text with more of them is no call.
MAX_HEAD = 2**16
NAME = re.compile(r"[^\s<>{}\"]{1,256}")
ARGUMENT_FIELDS = ("arguments", "parameters")


class CallReader:
    """Reads the calls of one reply.

    Nothing is taken from the text before the name of a call is complete; a call is emitted then, and its arguments follow
    as they arrive.

    Args:
        syntax: How calls are spelled.
        buffer: The text.
        tools: OpenAI function tools; their schemas type tagged arguments.
        before_call: Called before a call is emitted.
        call_id: Returns an id for a call to which the model gave none.
        is_single: The first call ends the reply.
    """

    def __init__(
        self,
        syntax: ReplySyntax,
        buffer: ReplyBuffer,
        tools: Sequence[Mapping[str, Any]],
        before_call: Callable[[], None],
        call_id: Callable[[], str],
        *,
        is_single: bool = False,
    ) -> None:
        self._syntax = syntax
        self._row = syntax.row
        self._buffer = buffer
        self._types = parameter_types(tools)
        self._before_call = before_call
        self._call_id = call_id
        self._is_single = is_single
        self._has_arguments = False

    def read(self, mark: str, at: int) -> Reading[bool]:
        """Reads calls after an opening mark; returns False, and leaves the text as it is, if there are none.

        Args:
            mark: The mark; empty for a call without one.
            at: Where it ends.
        """
        buffer, syntax = self._buffer, self._syntax
        if mark and mark == syntax.section[0]:
            at = yield from buffer.past(at)
            first = yield from buffer.starts(at, syntax.call[0])
            if not first:
                return False
            at += len(first)
        is_list = False
        if self._row.is_list:
            at = yield from buffer.past(at)
            is_list = bool((yield from buffer.starts(at, "[")))
            at += is_list
        has_call = False
        while at >= 0 and (yield from self._call(at, is_bare=not mark)):
            has_call = True
            at = yield from self._next(is_list=is_list)
        return has_call

    def _next(self, *, is_list: bool) -> Reading[int]:
        """Returns where another call of the section or list begins, after its mark; -1 if there is none."""
        buffer, syntax = self._buffer, self._syntax
        if is_list or self._row.is_bare:
            at = yield from buffer.past(0, SPACE + ",;")
            found = yield from buffer.starts(at, "{", "]" if is_list else syntax.call[0])
            if found == "]" or buffer.is_cut_short:
                buffer.drop(self._past_mark(at, found))
            return -1 if found in ("", "]") else at + len(found) * (found != "{")
        if not syntax.section[0]:
            return -1
        at = yield from buffer.past(0)
        found = yield from buffer.starts(at, syntax.section[1], syntax.call[0])
        if found == syntax.section[1] or buffer.is_cut_short:
            buffer.drop(self._past_mark(at, found))
            return -1
        return at + len(found) if found else -1

    def _call(self, at: int, *, is_bare: bool) -> Reading[bool]:
        """Reads one call that begins at a place; returns False, and leaves the text as it is, if there is none."""
        self._has_arguments = False
        if not self._row.name_ends:
            return (yield from self._object(at, is_bare=is_bare))
        name = yield from self._head(at)
        if not name:
            return False
        if self._row.arguments == "tagged":
            yield from self._tagged(self._types.get(name, Types()))
            return True
        fence = self._row.fence[0].strip()
        at = yield from self._buffer.past(0)
        at += len((yield from self._buffer.starts(at, fence)))
        if self._buffer.is_cut_short:
            at = len(self._buffer.text)
        self._buffer.drop((yield from self._buffer.past(at)))
        if (yield from self._json()):
            yield from self._end(0)
        else:
            yield from self._rest()
        return True

    def _object(self, at: int, *, is_bare: bool) -> Reading[bool]:
        """Reads a call that is one JSON object."""
        name, early, at = yield from self._object_head(at, is_bare=is_bare)
        if not name:
            return False
        self._emit_call(name, at, early)
        is_well = self._has_arguments or not is_bare or (yield from self._json())
        at = 0
        while is_well:
            at = yield from self._buffer.past(at, SPACE + ",")
            if (yield from self._buffer.starts(at, "}")):
                yield from self._end(at + 1)
                return True
            key, at = yield from self._key(at)
            if key in ARGUMENT_FIELDS and not self._has_arguments:
                self._buffer.drop(at)
                is_well, at = (yield from self._json()), 0
            else:
                end = (yield from self._value_end(at)) if key else -1
                if end < 0 and self._has_arguments:  # what follows is no part of the call, or the call is cut
                    yield from self._end(len(self._buffer.text) * self._buffer.is_cut_short)
                    return True
                if end < 0 and self._buffer.is_cut_short:  # the call is cut before its arguments
                    self._buffer.drop(len(self._buffer.text))
                    return True
                is_well, at = end >= 0, end
        yield from self._rest()
        return True

    def _object_head(self, at: int, *, is_bare: bool) -> Reading[tuple[str, str, int]]:
        """Returns the name of the function, arguments before it, and where both end; an empty name if it is no call.

        A call without a mark needs arguments too: any object may have a name.
        """
        buffer = self._buffer
        at = yield from buffer.past(at)
        if not (yield from buffer.starts(at, "{")):
            return "", "", at
        at += 1
        name = early = ""
        while len(buffer.text) <= MAX_HEAD:
            at = yield from buffer.past(at, SPACE + ",")
            key, at = yield from self._key(at)
            if name and key in ARGUMENT_FIELDS and (yield from buffer.starts(at, "{")):
                return name, "", at
            end = (yield from self._value_end(at)) if key else -1
            if end < 0:
                break
            if key == "name":
                name = _string(buffer.text[at:end])
                if not name:
                    break
            elif key in ARGUMENT_FIELDS:
                early = buffer.text[at:end]
            at = end
            if name and (early or not is_bare):
                return name, early, at
        return "", "", at

    def _head(self, at: int) -> Reading[str]:
        """Reads a name before its arguments and emits the call; returns an empty text if there is none."""
        buffer, syntax = self._buffer, self._syntax
        found = yield from buffer.find(at, syntax.in_header, MAX_HEAD)
        if found is None or found[1] not in syntax.name_ends:
            return ""
        head = buffer.text[at : found.start()].strip()
        prefix = next((each for each in syntax.name_prefixes if head.startswith(each)), "")
        name, mark, call_id = head.removeprefix(prefix).partition(syntax.id_mark or "\0")
        call_id = syntax.shown(head) if mark == ":" else syntax.shown(call_id)
        if not NAME.fullmatch(name) or any(stand_in in name for stand_in in syntax.stand_ins.values()):
            return ""
        keeps_mark = found[1] in (syntax.key[0], *syntax.closings)
        self._emit_call(name, found.start() if keeps_mark else found.end(), "", call_id)
        return name

    def _tagged(self, types: Types) -> Reading[None]:
        """Reads arguments between marks."""
        buffer, syntax = self._buffer, self._syntax
        self._show_text("{")
        num_read = 0
        while True:
            at = yield from buffer.past(0)
            mark = yield from buffer.starts(at, syntax.key[0], syntax.end, *syntax.closings)
            if mark != syntax.key[0]:
                break
            found = yield from buffer.find(at + len(mark), syntax.in_key)
            if found is None or found[1] != syntax.key[1]:
                mark = ""
                break
            key = syntax.shown(buffer.text[at + len(mark) : found.start()].strip())
            key, _, is_text = key.partition(self._row.key_type) if self._row.key_type else (key, "", "")
            at = found.end()
            if syntax.value[0]:
                at = yield from buffer.past(at)
                at += len((yield from buffer.starts(at, syntax.value[0])))
            at = yield from buffer.past(at, "\n", self._row.value_lines)
            buffer.emit(Kind.ARGUMENTS, at, f"{', ' if num_read else ''}{quoted(key)}: ")
            num_read += 1
            yield from self._value({"true": STRING, "false": ANY}.get(is_text, types.of(key)))
        is_own = mark == syntax.end or mark == syntax.call[1]
        if not mark and buffer.is_cut_short:
            buffer.drop(len(buffer.text))
        else:
            buffer.emit(Kind.ARGUMENTS, (at + len(mark)) * (is_own and bool(mark)), "}")
            yield from self._end(0, has_closed=mark == syntax.call[1])

    def _value(self, types: frozenset[str]) -> Reading[None]:
        """Reads one tagged value: a string as it arrives, another one when it is complete."""
        buffer, syntax = self._buffer, self._syntax
        is_string, at = types == STRING, 0
        strings, first = OpenString(), None
        if is_string:
            self._show_text('"')
        while True:
            if is_string:
                found = yield from buffer.show_until(Kind.ARGUMENTS, syntax.in_value, self._escaped)
            else:
                found = yield from buffer.find(at, syntax.in_value)
            if found is None:
                break
            at = found.end()
            if found[1] != syntax.value[1]:
                break
            if (yield from self._is_end_of_value(at)):
                if is_string or syntax.is_token(found[1]) or not strings.is_open(buffer.text[: found.start()]):
                    break
                first = first or found
            elif is_string:  # a mark within the value
                buffer.emit(Kind.ARGUMENTS, at, self._escaped(buffer.text[:at]))
        if first and not (found is None and buffer.is_cut) and not _is_json(buffer.text[: found and found.start()]):
            found = first  # no string, but a quotation mark too many
        if found is None and buffer.is_cut:
            self._show(len(buffer.text))
            return
        end = len(buffer.text) if found is None else found.start()
        size = end if found is None or found[1] != syntax.value[1] else found.end()
        buffer.emit(Kind.ARGUMENTS, size, '"' if is_string else as_json(syntax.shown(buffer.text[:end]), types))

    def _is_end_of_value(self, at: int) -> Reading[bool]:
        """Whether a closing mark is followed by another argument or the end, so that it is no part of the value."""
        buffer, syntax = self._buffer, self._syntax
        at = yield from buffer.past(at)
        marks = (syntax.key[0], syntax.end, *syntax.closings)
        has_mark = yield from buffer.starts(at, *marks)
        return bool(has_mark) or buffer.is_cut_short or at == len(buffer.text)

    def _key(self, at: int) -> Reading[tuple[str, int]]:
        """Returns the name of a member and where its value begins; an empty name if there is none."""
        buffer = self._buffer
        if not (yield from buffer.starts(at, '"')):
            return "", at
        end = yield from self._value_end(at)
        if end < 0:
            return "", at
        key = _string(buffer.text[at:end])
        at = yield from buffer.past(end)
        if not (yield from buffer.starts(at, ":")):
            return "", at
        return key, (yield from buffer.past(at + 1))

    def _value_end(self, at: int) -> Reading[int]:
        """Returns where a JSON value ends; -1 if it does not, or is malformed."""
        buffer, value = self._buffer, JsonValue()
        while True:
            end = value.end(buffer.text, at)
            buffer.is_cut_short = buffer.is_cut and end is None
            if end is not None:
                return -1 if value.is_broken else end
            at = len(buffer.text)
            if buffer.is_over or at > MAX_HEAD:
                return -1
            yield

    def _json(self) -> Reading[bool]:
        """Emits a JSON value as it arrives; returns whether it was complete."""
        buffer, value = self._buffer, JsonValue()
        while True:
            end = value.end(buffer.text, 0)
            self._show(len(buffer.text) if end is None else end)
            if end is not None or buffer.is_over:
                return end is not None and not value.is_broken
            yield

    def _rest(self) -> Reading[None]:
        """Emits malformed arguments as they are, up to the mark that ends the call."""
        if not self._has_arguments:
            self._buffer.drop((yield from self._buffer.past(0, SPACE + ",")))
        found = yield from self._buffer.show_until(Kind.ARGUMENTS, self._syntax.in_arguments, self._begun)
        if found or not self._buffer.is_cut:
            yield from self._end(found.start(1) if found else 0)

    def _end(self, at: int, *, has_closed: bool = False) -> Reading[None]:
        """Emits the end of a call, of which text up to a place and the closing mark are left."""
        buffer, mark = self._buffer, self._syntax.call[1]
        if not self._has_arguments:
            self._show_text("{}")
        after = yield from buffer.past(at)
        for closing in (self._row.fence[1].strip(), "" if has_closed else mark):
            found = yield from buffer.starts(after, closing)
            if found or (closing and buffer.is_cut_short):
                at = self._past_mark(after, found)
                after = yield from buffer.past(at)
        buffer.emit(Kind.CALL_END, at, "")
        buffer.is_stopped = self._is_single
        yield from buffer.pause()

    def _past_mark(self, at: int, found: str) -> int:
        """Returns where the mark found at a place ends: with the reply where this cut the mark."""
        return len(self._buffer.text) if self._buffer.is_cut_short else at + len(found)

    def _emit_call(self, name: str, num_chars: int, early: str, call_id: str = "") -> None:
        self._before_call()
        self._buffer.emit(Kind.CALL, num_chars, name, call_id or self._call_id())
        if early:
            self._show_text(self._syntax.shown(early))

    def _show(self, num_chars: int) -> None:
        if num_chars:
            self._buffer.emit(Kind.ARGUMENTS, num_chars, self._syntax.shown(self._buffer.text[:num_chars]))
            self._has_arguments = True

    def _begun(self, text: str) -> str:
        self._has_arguments = True
        return self._syntax.shown(text)

    def _show_text(self, text: str) -> None:
        self._buffer.emit(Kind.ARGUMENTS, 0, text)
        self._has_arguments = True

    def _escaped(self, text: str) -> str:
        return quoted(self._syntax.shown(text))[1:-1]


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def _string(text: str) -> str:
    """Returns a string of JSON; an empty one if the text is something else."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
