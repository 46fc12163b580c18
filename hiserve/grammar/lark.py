"""Rules in Lark's form, as the library of grammars reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hiserve.grammar.matcher import WHITESPACE
from hiserve.text.reader.marks import STAND_INS

_MARKS = re.compile(f"([{STAND_INS}])")
_SPECIAL = re.compile(r"[\\/.+*?()|\[\]{}^$#&~\-]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Rules:
    """A grammar that is being written.

    Args:
        stand_ins: Of marks that are tokens, by their id; in texts they stand for these tokens.

    Attributes:
        num_alternatives: Alternatives in the schemas that became rules.
        num_chars: Characters of the values in them.
    """

    def __init__(self, stand_ins: Mapping[int, str]) -> None:
        self._ids = {stand_in: index for index, stand_in in stand_ins.items()}
        self._names: dict[str, str] = {}  # by expression
        self.num_alternatives = 0
        self.num_chars = 0

    def literal(self, text: str) -> str:
        """Returns the expression of one text; empty for the empty one."""
        parts = [part for part in _MARKS.split(text) if part]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else _quoted(part) for part in parts)

    def rule(self, expression: str, *, is_lazy: bool = False) -> str:
        """Adds a rule and returns its name; a lazy one, of one terminal, ends where it first can."""
        return self._add("r", expression, "[lazy]" * is_lazy)

    def terminal(self, expression: str) -> str:
        """Adds a terminal and returns its name."""
        return self._add("T", expression)

    def text(self, start: str) -> str:
        """Returns the whole grammar. Between marks there may be a line break, as templates have it.

        Readers take any white space; but a reply with other than the template's is encoded afresh in the next prompt.

        Args:
            start: Expression of the replies.
        """
        lines = [name + expression for expression, name in self._names.items()]
        return "\n".join([f"start: {start}", *lines, r"SPACE: /\n/"])

    def _add(self, prefix: str, expression: str, option: str = "") -> str:
        return self._names.setdefault(f"{option}: {expression}", f"{prefix}{len(self._names)}")


def as_json(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Returns the expression of a JSON value of a schema; one that is not strict may have parts that no mask can hold."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": not is_strict, "coerce_one_of": not is_strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def escaped(text: str) -> str:
    """Returns the regular expression of one text, for use between slashes."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", _SPECIAL.sub(r"\\\g<0>", text))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
