"""Custom tools, whose calls have one text: to chat templates and models, functions with one string."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

INPUT = "input"  # the one argument of the function
Syntax = Literal["lark", "regex"]
_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = "[dD][89abAB]", "[dD][c-fC-F]"  # of a pair of surrogates, the first half of each
# The part of a string of JSON that more text does not change: a high surrogate may be the first of a pair.
_DECIDED = re.compile(
    rf'(?:[^"\\]|\\["\\/bfnrt]|\\u(?!{_HIGH}){_HEX}{{4}}'
    rf"|\\u{_HIGH}{_HEX}{{2}}(?:\\u{_LOW}{_HEX}{{2}}|(?=[^\\]|\\[^u]|\\u(?!{_LOW}){_HEX}{{4}})))*"
)


class CustomTool(NamedTuple):
    """A custom tool of a request.

    Attributes:
        name: By which the model calls it.
        description: None without one.
        syntax: Of its definition.
        definition: The grammar of its input; none for any text.
        param: The field with the definition.
    """

    name: str
    description: str | None
    syntax: Syntax | None
    definition: str | None
    param: str


# Returns the regular expression that the input of a tool is held to; None where it is held to none.
Pattern = Callable[[CustomTool], str | None]


def no_pattern(_: CustomTool) -> None:
    """Holds no input to anything."""


def custom_function(tool: CustomTool, pattern: str | None) -> dict[str, Any]:
    """Returns the function that represents a tool; its description shows the definition.

    Args:
        tool: The tool.
        pattern: As of ``Pattern``.
    """
    shown = [tool.description, tool.definition and f"The input is a text of this grammar:\n{tool.definition}"]
    text = {"type": "string"} | ({"pattern": f"^(?:{pattern})$"} if pattern else {})
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"name": tool.name, "description": "\n\n".join(filter(None, shown)) or None, "parameters": parameters}


def input_arguments(text: str) -> str:
    """Returns the arguments of the function for an input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Returns the input in the arguments of a call; arguments of another form as they are."""
    reader = InputReader()
    return reader.push(arguments) + reader.end()


class InputReader:
    """Reads the input of a call from its arguments, as they come. Any partition of the arguments gives the same input."""

    def __init__(self) -> None:
        self._rest = ""  # not decided yet
        self._is_open = self._is_closed = False  # within the string of the input; after it

    def push(self, fragment: str) -> str:
        """Returns the input that a part of the arguments adds."""
        self._rest += fragment
        if not self._is_open:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._is_open, self._rest = True, self._rest[opening.end() :]
        decided = _DECIDED.match(self._rest)
        assert decided is not None, "an empty part is decided"
        self._rest = self._rest[decided.end() :]
        self._is_closed = self._rest.startswith('"')
        return _without_halves(json.loads(f'"{decided[0]}"', strict=False))

    def end(self) -> str:
        """Returns the rest of the input, at the end of the arguments: one of another form, or that was cut, as it is."""
        if self._is_closed:
            return ""
        rest, self._rest, self._is_closed = self._rest, "", True
        return rest if self._is_open else _found(rest)


def _found(arguments: str) -> str:
    """Returns the input among other arguments, else all of them as they are."""
    try:
        given = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    text = given.get(INPUT) if isinstance(given, dict) else None
    return _without_halves(text) if isinstance(text, str) else arguments


def _without_halves(text: str) -> str:
    """Returns a text in which U+FFFD stands for each lone surrogate: JSON can spell them, and UTF-8 cannot."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
