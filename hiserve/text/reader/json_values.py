"""JSON in replies: the end of a value that arrives in pieces, and values of arguments that are spelled without quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from hiserve.text.reader.marks import STAND_INS

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
MAX_REFERENCES = 16  # that lead from one to the next
MAX_KEYWORDS = 64  # of a schema that is referred to


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
        """Returns the end of the value in ``text[at:]``, which follows the text of earlier calls; None before it."""
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

    @property
    def is_in_string(self) -> bool:
        """Whether the text so far ends within a string."""
        return self._is_string

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


class OpenString:
    """Whether a growing text is an array or object of JSON that ends within a string."""

    __slots__ = ("_is_over", "_size", "_value")

    def __init__(self) -> None:
        self._value, self._size, self._is_over = JsonValue(), 0, False

    def is_open(self, text: str) -> bool:
        """Whether the text, which begins with that of earlier calls, ends within a string."""
        if not self._is_over:
            self._is_over = not text.lstrip().startswith(("[", "{")) or self._value.end(text, self._size) is not None
            self._size = len(text)
        return not self._is_over and self._value.is_in_string


class Types(NamedTuple):
    """The types of the parameters of one function.

    Attributes:
        declared: By name.
        others: Of those that are not declared.
    """

    declared: Mapping[str, frozenset[str]] = {}
    others: frozenset[str] = ANY

    def of(self, name: str) -> frozenset[str]:
        """Returns the types of a parameter."""
        return self.declared.get(name, self.others)


class SchemaReader:
    """Reads the parts of one schema, each alternative once.

    Args:
        root: The schema that references are into; any value.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._types: dict[int, frozenset[str]] = {}  # by the id of the list of alternatives

    def resolved(self, schema: Any) -> Any:
        """Returns a part with the local references at its top, and ``allOf`` of one schema, put in their place."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict):
                return schema
            if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#/"):
                key, target = "$ref", self._root
                for step in ref[2:].split("/"):
                    name = step.replace("~1", "/").replace("~0", "~")
                    target = target.get(name) if isinstance(target, dict) else None
            elif isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
                key, target = "allOf", parts[0]
            else:
                return schema
            if not isinstance(target, dict) or len(target) > MAX_KEYWORDS:
                return schema
            schema = {**target, **{name: value for name, value in schema.items() if name != key}}
        return schema

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Returns the JSON types that a schema allows, all of them where it names none; ``depth`` counts alternatives around it."""
        schema = self.resolved(schema)
        if not isinstance(schema, dict) or depth > MAX_REFERENCES:
            return ANY
        named = schema.get("type")
        if isinstance(named, str | list):
            return frozenset(name for name in ([named] if isinstance(named, str) else named) if isinstance(name, str))
        for word in ("anyOf", "oneOf"):
            if isinstance(inner := schema.get(word), list):
                if id(inner) not in self._types:
                    self._types[id(inner)] = frozenset()  # of the alternatives that lead back here
                    self._types[id(inner)] = frozenset[str]().union(*(self.types(each, depth + 1) for each in inner))
                return self._types[id(inner)]
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return frozenset(_type_of(value) for value in values)
        return ANY


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, Types]:
    """Returns the types of the parameters, by function."""
    found = {}
    for tool in tools:
        function = tool.get("function", {})
        reader = SchemaReader(function.get("parameters"))
        schema = reader.resolved(function.get("parameters"))
        schema = schema if isinstance(schema, dict) else {}
        properties = schema.get("properties")
        declared = properties if isinstance(properties, dict) else {}
        types = {name: reader.types(each) for name, each in declared.items()}
        found[function.get("name", "")] = Types(types, reader.types(schema.get("additionalProperties")))
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
