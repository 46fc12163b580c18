"""Arguments between marks: their values are not quoted, so that a schema of JSON becomes rules of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hiserve.grammar.bounds import MAX_SCHEMA_BYTES
from hiserve.grammar.lark import Rules, as_json, escaped
from hiserve.text.reader.json_values import MAX_REFERENCES, SchemaReader
from hiserve.text.reader.marks import ReplySyntax

Schema = Mapping[str, Any]
SCALARS = frozenset({"integer", "number", "boolean", "null"})
# A text that the reader takes for a value of the type, and all such values.
_READ_AS = {
    "integer": r"-?\d+",
    "number": r"-?\d+(\.\d+)?([eE][-+]?\d+)?",
    "boolean": "(?i:true|false)",
    "null": "(?i:null|none)",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
_SPELLED = {
    "integer": "-?(0|[1-9][0-9]{0,17})",
    "number": r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?",
    "boolean": "true|false",
    "null": "null",
}
MAX_ALTERNATIVES = 10_000  # of all values that may be texts
# Of all values, before equal rules are one: each reference puts what it refers to in its place.
MAX_CHARS = 16 * MAX_SCHEMA_BYTES
_SHAPES: dict[str, type] = {
    "properties": dict, "required": list, "enum": list, "pattern": str, "minLength": int, "maxLength": int
}  # fmt: skip
_SPACE = r"[\s\x1c-\x1f]*"
_ANY = "(?s:.*)"
_OF_SCALARS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const"})
_ALWAYS_LIMITS = frozenset({"not", "if", "then", "else", "allOf", "anyOf", "oneOf", "$ref"})
_LIMITS = {
    "object": _ALWAYS_LIMITS | {"minProperties", "maxProperties", "patternProperties", "propertyNames"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"},
    "string": _ALWAYS_LIMITS | {"format", "contentEncoding", "contentMediaType", "contentSchema"},
}  # fmt: skip


class TaggedArguments:
    """The rules of the arguments of one function: those that it declares, in their order.

    Args:
        syntax: How arguments are spelled.
        rules: Gets the rules.
        schema: Of all arguments.
        is_strict: JSON values are held to the letter.

    Attributes:
        not_held: Parts of the schema that the rules do not hold.
    """

    def __init__(self, syntax: ReplySyntax, rules: Rules, schema: Schema, *, is_strict: bool) -> None:
        self._syntax = syntax
        self._is_strict = is_strict
        self._rules = rules
        self._root = schema
        self._reader = SchemaReader(schema)
        self._close = "\n" * syntax.row.value_lines + syntax.value[1]
        self.not_held: list[str] = []

    def expression(self) -> str:
        """Returns the expression of all arguments, and of the mark that ends them.

        Raises:
            ValueError: A keyword has a value of another type than it takes, or the rules are too many or too long.
        """
        schema = self._reader.resolved(self._root)
        _check_shapes(schema)
        required = dict.fromkeys(schema.get("required") or ())
        self._note("the arguments", schema, "object")
        declared = dict(schema.get("properties") or {})
        others = schema.get("additionalProperties", not declared)
        for name in required:
            declared.setdefault(name, {} if others is True else others)
        parts = []
        for name, each in declared.items():
            if each is False:
                continue
            if each is not True and not isinstance(each, dict):
                raise ValueError(f"{name} is of the type {type(each).__name__}; it takes a schema, which is an object")
            is_required = name in required
            if not self._can_name(name):
                if is_required:
                    self.not_held.append(f"an argument of the name {name[:100]!r}")
                continue
            pair = self._argument(name, {} if each is True else each, name)
            parts.append(pair if is_required else f"({pair})?")
        if others is True or isinstance(others, dict):
            parts.append(self._others({} if others is True else others, declared))
        end = self._rules.literal(self._syntax.end)
        return " ".join([*parts, f"SPACE? {end}" if end else ""])

    def _can_name(self, name: str) -> bool:
        marks = (
            self._syntax.key[1],
            *self._syntax.closings,
            *self._syntax.stand_ins.values(),
            self._syntax.row.key_type,
        )
        spelled = self._syntax.spell(name)
        return name == name.strip() != "" and not any(mark and mark in spelled for mark in marks)

    def _argument(self, name: str, schema: Schema, shown: str, terminal: str = "") -> str:
        """Returns the expression of an argument: the name between its marks, and its value.

        Args:
            name: Of the argument, if it has one.
            schema: Of the value.
            shown: What the argument is called in ``not_held``.
            terminal: Of its name, if it may have others.
        """
        syntax, literal, key_type = self._syntax, self._rules.literal, self._syntax.row.key_type
        lines = "\n" * syntax.row.value_lines
        after = f"SPACE? {literal(syntax.value[0] + lines)}" if syntax.value[0] else ""
        ends = syntax.key[1] if after else syntax.key[1] + lines

        def key(end: str) -> str:
            if terminal:
                return f"SPACE? {literal(syntax.key[0])} {terminal} {literal(end + ends)} {after}"
            return f"SPACE? {literal(syntax.key[0] + name + end + ends)} {after}"

        if not key_type:
            return f"{key('')} {self._value(schema, shown)}"
        text, other = self._parts(schema, shown)
        parts = [f"{key(f'{key_type}{kind}')} {each}" for kind, each in (("true", text), ("false", other)) if each]
        return f"({' | '.join(parts)})"

    def _others(self, schema: Schema, declared: Iterable[str]) -> str:
        """Returns the expression of any number of arguments that are not declared."""
        named = "|".join(map(escaped, declared))
        name = self._rules.terminal(r"/[^\s<>\"={}\[\]]{1,64}/" + (f" & ~/{named}/" if named else ""))
        return f"({self._argument('', schema, 'others', name)})*"

    def _value(self, schema: Schema, name: str) -> str:
        """Returns the expression of one value and the mark after it."""
        types = self._reader.types(schema)
        if "string" not in types:
            return f"{self._json(schema, name)} {self._rules.literal(self._close)}"
        each = self._alternatives(schema)
        texts = [part for part in each if "string" in self._reader.types(part)]
        is_finite = all("enum" in part or "const" in part for part in texts)
        spelled = [self._counted(self._body(part, name)) for part in texts]
        scalars, rest = list[str](), list[Schema]()
        for part in each:
            kinds = self._reader.types(part) - {"string"}
            if not is_finite:
                scalars += map(self._counted, self._scalars(part, kinds & SCALARS))
                kinds -= SCALARS
            if kinds:
                rest.append({**_without_texts(part), "type": sorted(kinds)})
        readings = "|".join(_READ_AS[kind] for kind in sorted(types) if kind in _READ_AS)
        text = self._rules.terminal(
            f"/{'|'.join(f'({body})' for body in spelled)}/"
            + (f" & ~/{_SPACE}({readings}){_SPACE}/" if readings else "")
        )
        value = self._closed(f"({text}{''.join(f' | /{scalar}/' for scalar in scalars)})")
        if not rest:
            return value
        quoted = self._json(rest[0] if len(rest) == 1 else {"anyOf": rest}, name)
        return f"({value} | {quoted} {self._rules.literal(self._close)})"

    def _parts(self, schema: Schema, name: str) -> tuple[str, str]:
        """Returns the expressions of a text, and of another value, each with the mark after it; empty where there is none."""
        if "string" not in self._reader.types(schema):
            return "", self._value(schema, name)
        each = self._alternatives(schema)
        texts = [self._counted(self._body(part, name)) for part in each if "string" in self._reader.types(part)]
        rest = [
            {**_without_texts(part), "type": sorted(kinds)}
            for part in each
            if (kinds := self._reader.types(part) - {"string"})
        ]
        other = self._json(rest[0] if len(rest) == 1 else {"anyOf": rest}, name) if rest else ""
        text = self._closed(self._rules.terminal(f"/{'|'.join(f'({body})' for body in texts)}/")) if texts else ""
        return text, f"{other} {self._rules.literal(self._close)}" if other else ""

    def _closed(self, expression: str) -> str:
        """Returns the expression of a text and the first closing mark after it."""
        rules, mark = self._rules, self._syntax.value[1]
        if not self._syntax.is_token(mark):
            whole, spelled = rules.terminal(f"{expression} /{escaped(self._close)}/"), escaped(mark)
            return rules.terminal(f"{whole} & ~/{_ANY}{spelled}(?s:.+)/")
        lines = escaped(self._close.removesuffix(mark))
        if lines:
            return f"{rules.terminal(f'{expression} /{lines}/')} {rules.literal(mark)}"
        return f"{rules.terminal(expression)} {rules.literal(mark)}"

    def _body(self, part: Schema, name: str) -> str:
        """Returns the regular expression of the texts of a schema."""
        self._note(name, part, "string")
        values = part.get("enum", [part["const"]] if "const" in part else None)
        if values is not None:
            return "|".join(escaped(value) for value in values if isinstance(value, str))
        least, most = part.get("minLength", 0), part.get("maxLength")
        if "pattern" in part:
            found = _whole(part["pattern"])
            if found is None or least or most is not None:
                self.not_held.append(f"{name}: pattern")
            if found is not None:
                return found
        return _ANY if not least and most is None else f"(?s:.){{{least},{'' if most is None else most}}}"

    def _scalars(self, part: Schema, kinds: frozenset[str]) -> list[str]:
        """Returns the regular expressions of values beside texts: of a type without limits, or of those that are listed."""
        values = part.get("enum", [part["const"]] if "const" in part else None)
        if values is not None:
            plain = (value for value in values if value is None or isinstance(value, bool | int | float))
            return [escaped(json.dumps(value)) for value in plain]
        return [_SPELLED[kind] for kind in sorted(kinds)] if not _OF_SCALARS & part.keys() else []

    def _alternatives(self, schema: Any, depth: int = 0) -> list[dict[str, Any]]:
        """Returns the schemas of which a value has one, references resolved.

        Raises:
            ValueError: There are too many.
        """
        self._rules.num_alternatives += 1
        if self._rules.num_alternatives > MAX_ALTERNATIVES or depth > MAX_REFERENCES:
            raise ValueError(f"more than {MAX_ALTERNATIVES} alternatives, or {MAX_REFERENCES} in one another")
        found = {} if schema is True else self._reader.resolved(schema)
        if not isinstance(found, dict):
            return []
        _check_shapes(found)
        for word in ("anyOf", "oneOf"):
            if isinstance(found.get(word), list):
                rest = {key: value for key, value in found.items() if key != word}
                each = [{} if one is True else one for one in found[word] if isinstance(one, dict) or one is True]
                return [part for one in each for part in self._alternatives({**one, **rest}, depth + 1)]
        return [found]

    def _json(self, schema: Schema, name: str) -> str:
        """Returns the expression of a value as JSON."""
        text = self._counted(json.dumps(schema))
        refs = re.findall(r'"\$ref": "([^"]*)"', text)
        if any(not ref.startswith(("#/$defs/", "#/definitions/")) for ref in refs):
            self.not_held.append(f"{name}: $ref")
            return as_json({"type": sorted(self._reader.types(schema) - {"string"})}, is_strict=False)
        defs = {key: self._root[key] for key in ("$defs", "definitions") if refs and key in self._root}
        return self._counted(as_json({**defs, **schema}, is_strict=self._is_strict))

    def _counted(self, text: str) -> str:
        """Returns a part of the rules.

        Raises:
            ValueError: They are too long.
        """
        self._rules.num_chars += len(text)
        if self._rules.num_chars > MAX_CHARS:
            raise ValueError(
                f"its values have more than {MAX_CHARS} characters where references stand for what they name"
            )
        return text

    def _note(self, name: str, schema: Schema, kind: str) -> None:
        self.not_held += [f"{name}: {word}" for word in schema if word in _LIMITS[kind]]


def _check_shapes(schema: Schema) -> None:
    for word, kind in _SHAPES.items():
        given = schema.get(word)
        is_missing = word not in schema or (given is None and kind in (dict, list) and word != "enum")
        if not is_missing and (not isinstance(given, kind) or isinstance(given, bool)):
            raise ValueError(f"{word} is of the type {type(given).__name__}; it takes {kind.__name__}")
    if not all(isinstance(name, str) for name in schema.get("required") or ()):
        raise ValueError("required is a list of names, which are texts")


def _without_texts(part: Schema) -> dict[str, Any]:
    """Returns a schema without the texts that it lists."""
    kept = {key: value for key, value in part.items() if key != "const" or not isinstance(value, str)}
    if "enum" in kept:
        kept["enum"] = [value for value in kept["enum"] if not isinstance(value, str)]
    return kept


def _whole(pattern: str) -> str | None:
    """Returns the regular expression of the texts in which a pattern is found; None if it cannot be determined."""
    depth, at, is_class, bars = 0, 0, False, 0
    plain = ""
    while at < len(pattern):
        char = pattern[at]
        size = 2 if char == "\\" else 1
        if size == 1:
            is_class = (is_class or char == "[") and char != "]"
            depth += 0 if is_class else (char == "(") - (char == ")")
            bars += char == "|" and not depth and not is_class
        plain += pattern[at : at + size] if char not in "/\n\r" else escaped(char)
        at += size
    begins, ends = plain.startswith("^"), plain.endswith("$") and not plain.endswith("\\$")
    if bars and (begins or ends):
        return None
    body = plain[begins : len(plain) - ends]
    return f"{'' if begins else _ANY}({body}){'' if ends else _ANY}"
