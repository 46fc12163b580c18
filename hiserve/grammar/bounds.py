"""Grammars from what callers write, within bounds that cost nothing to check."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from hiserve.core.request import Grammar
from hiserve.errors import RequestError
from hiserve.text.body.json import check_json, check_text

INVALID = "invalid_grammar"  # code of the refusal of a grammar that is none, or that nothing satisfies
MAX_SCHEMA_BYTES = 256 * 2**10
MAX_VALUES = 100_000
MAX_REGEX_BYTES = 8 * 2**10
MAX_RULES = 1_000
MAX_WHITESPACE_CHARS = 256
_OPTIONS = "x-guidance"  # the member of a schema that llguidance takes options from
_RULE = re.compile(r"^[ \t]*[\w?!.-]+[ \t]*:", re.MULTILINE)
_WHITESPACE = re.compile(r"( |\\[nrt]|[\n\r\t]|\[( |\\[nrt]|[\n\r\t])+\]|[?*+|()]|\{[0-9]{1,4}(,[0-9]{0,4})?\})*")


def json_schema(schema: Any, param: str) -> Grammar:
    """Returns the grammar of a JSON schema: an object, true, or either as a text.

    Raises:
        RequestError: It is another value, or exceeds a bound. So for the functions below.
    """
    if isinstance(schema, str):
        _check_size(schema, MAX_SCHEMA_BYTES, param)
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"{param} is not JSON: {error}.", param=param) from None
    if schema is not True and not isinstance(schema, dict):
        raise RequestError(f"{param} must be a JSON schema, which is an object.", param=param)
    check_json(schema, param, MAX_VALUES)
    if isinstance(schema, dict) and _OPTIONS in schema:  # to JSON Schema it is no keyword
        schema = {name: value for name, value in schema.items() if name != _OPTIONS}
    text = msgspec.json.encode(schema).decode()
    _check_size(text, MAX_SCHEMA_BYTES, param)
    return Grammar.of("json", text)


def any_object() -> Grammar:
    """Returns the grammar of all JSON objects."""
    return Grammar.of("json", '{"type":"object"}')


def with_whitespace(schema: Grammar, pattern: str, param: str) -> Grammar:
    """Returns the grammar of a JSON schema with other white space between two parts.

    Args:
        schema: The grammar.
        pattern: A regular expression of the white space of JSON; the empty one allows none.
        param: The field of the pattern.
    """
    is_regex = len(pattern) <= MAX_WHITESPACE_CHARS and _WHITESPACE.fullmatch(pattern)
    try:
        re.compile(pattern if is_regex else "[")
    except re.error:
        raise RequestError(
            f"{param} must be a regular expression of spaces, \\n, \\r and \\t, of at most {MAX_WHITESPACE_CHARS} characters, "
            'such as "[ \\n]{0,8}".',
            param=param,
        ) from None
    given = msgspec.json.decode(schema.text)
    spaced = {} if given is True else given  # llguidance takes options with objects alone
    return Grammar.of(schema.kind, msgspec.json.encode(spaced | {_OPTIONS: {"whitespace_pattern": pattern}}).decode())


def regex(pattern: str, param: str) -> Grammar:
    """Returns the grammar of a regular expression that matches the whole reply."""
    _check_size(pattern, MAX_REGEX_BYTES, param)
    return Grammar.of("regex", pattern)


def choice(texts: list[str], param: str) -> Grammar:
    """Returns the grammar of some texts, of which there must be one."""
    if not texts or not all(texts):
        raise RequestError(f"{param} must be a list of texts, none of them empty.", param=param)
    check_json(texts, param, MAX_VALUES)
    text = msgspec.json.encode(texts).decode()
    _check_size(text, MAX_SCHEMA_BYTES, param)
    return Grammar.of("choice", text)


def rules(text: str, param: str) -> Grammar:
    """Returns the grammar of rules in Lark's form or in GBNF."""
    _check_size(text, MAX_SCHEMA_BYTES, param)
    num_rules = sum(1 for _ in _RULE.finditer(text))
    if num_rules > MAX_RULES:
        raise RequestError(f"{param} has {num_rules} rules; the most is {MAX_RULES}.", param=param)
    return Grammar.of("ebnf", text)


def _check_size(text: str, most: int, param: str) -> None:
    check_text(text, param)
    size = len(text.encode())
    if size > most:
        raise RequestError(f"{param} has {size} bytes; the most is {most}.", param=param)
