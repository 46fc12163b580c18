"""JSON in replies: the end of a value that arrives in pieces, and values of arguments that are spelled without quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hiserve.text.reply_marks import STAND_INS

_IN_STRING = re.compile(r'["\\]')
# A character that no JSON value has outside its strings, but marks begin with, is as good as an end.
_OUTSIDE = re.compile(rf'["{{}}\[\],\s<`{STAND_INS}]')
_WORDS = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "null": ("null", "null"),
    "none": ("null", "null"),
}
ANY = frozenset({"object", "array", "number", "integer", "boolean", "null", "string"})
STRING = frozenset({"string"})


class JsonValue:
    """Finds the end of one JSON value. Brackets and strings are followed; nothing else is checked.

    Attributes:
        is_broken: The end that was found is that of a malformed value.
    """

    __slots__ = ("_is_begun", "_is_escaped", "_is_string", "_open", "is_broken")

    def __init__(self) -> None:
        self._open: list[str] = []  # closing brackets that are due
        self._is_begun = False
        self._is_string = False
        self._is_escaped = False
        self.is_broken = False

    def end(self, text: str, at: int) -> int | None:
        """Returns where the value ends in ``text[at:]``, which follows the text of earlier calls; None if it goes on."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._is_string else _OUTSIDE).search(text, at)
            self._is_begun = self._is_begun or found is None or found.start() > at
            if found is None:
                return None
            at = found.end()
            if self._is_string:
                self._is_escaped, self._is_string = found[0] == "\\", found[0] == "\\"
                if not self._is_string and not self._open:
                    return at
            elif (end := self._mark(found[0])) is not None:
                return found.start() + end
        return None

    def _mark(self, char: str) -> int | None:
        """Returns the characters up to the value's end, if this one ends it: 1 if it is the last one, 0 if it follows."""
        if char == '"':
            self._is_string = self._is_begun = True
        elif char in "{[":
            self._open.append("}" if char == "{" else "]")
            self._is_begun = True
        elif char in "}]" and self._open:
            if self._open.pop() == char:
                return None if self._open else 1
            self.is_broken = True
            return 0
        elif char in "}]," and not self._open:
            self.is_broken = not self._is_begun
            return 0
        elif char.isspace():
            return 0 if self._is_begun and not self._open else None
        elif char != ",":
            self.is_broken = True
            return 0
        return None


def types_of(schema: Any) -> frozenset[str]:
    """Returns the types of JSON that a schema allows; all of them where it does not say."""
    if not isinstance(schema, dict):
        return ANY
    named = schema.get("type")
    if isinstance(named, str | list):
        return frozenset(name for name in ([named] if isinstance(named, str) else named) if isinstance(name, str))
    for word in ("anyOf", "oneOf"):
        if isinstance(inner := schema.get(word), list):
            return frozenset[str]().union(*map(types_of, inner))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    return ANY


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, frozenset[str]]]:
    """Returns the types of the declared parameters, by function."""
    found = {}
    for tool in tools:
        function = tool.get("function", {})
        properties = (function.get("parameters") or {}).get("properties")
        declared = properties if isinstance(properties, dict) else {}
        found[function.get("name", "")] = {name: types_of(schema) for name, schema in declared.items()}
    return found


def as_json(text: str, types: frozenset[str]) -> str:
    """Returns a value that was spelled without quotes as JSON: as it is where it is a value of such a type, else a string."""
    bare = text.strip()
    kind, word = _WORDS.get(bare.lower(), ("", ""))
    if kind in types:
        return word
    try:
        kind = _type_of(json.loads(bare, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return quoted(text)
    is_allowed = kind in types or (kind == "integer" and "number" in types)
    return bare if is_allowed and kind != "string" else quoted(text)


def quoted(text: str) -> str:
    """Returns a string of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds[type(value)]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
