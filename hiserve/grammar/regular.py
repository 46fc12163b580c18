"""Rules in Lark's form as one regular expression, where no rule leads back to itself: such a text can be held within a text of JSON."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from hiserve.grammar.bounds import MAX_REGEX_BYTES
from hiserve.grammar.lark import escaped

MAX_CHARS = 16 * 2**10  # of the rules
MAX_DEPTH = 64  # of rules and groups in one another
COMMON = {
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|(?://|\#)[^\n]*)
    |(?P<line>\s*\n\s*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imsux]*)
    |(?P<name>[_a-zA-Z]\w*)
    |(?P<number>\d+)
    |(?P<sign>->|\.\.|[:|()\[\]?!*+~{},%.])""",
    re.VERBOSE,
)
_REPEATS = ("?", "*", "+")
# Of a regular expression: an escaped character, the start of a class, in which a bracket that comes first is a character, or another one.
_PART = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
_HAS_COMMENTS = re.compile(r"\(\?[a-zA-Z]*x")


class Token(NamedTuple):
    """A token of rules: its kind, by the groups of ``_TOKEN``, and its text."""

    kind: str
    text: str


END = Token("end", "")


def regular(rules: str) -> str | None:
    """Returns the regular expression of all texts of some rules.

    Args:
        rules: In Lark's form, with a rule ``start``.

    Returns:
        None if a rule leads back to itself, if the rules have other parts than names, texts, regular expressions, their
        repetitions and imports from ``common``, or if the expression is too long.
    """
    try:
        return _Rules(rules).expression("start")
    except ValueError:
        return None


def is_whole(expression: str) -> bool:
    """Whether a regular expression closes the groups that it opens, and no others: so it stays one part within another one.

    One with comments, which may have any bracket, is taken as none.
    """
    if "#" in expression and _HAS_COMMENTS.search(expression):
        return False
    num_groups = num_classes = 0
    for part in _PART.findall(expression):
        if part[0] == "[":
            num_classes += 1
        elif part == "]":
            num_classes = max(0, num_classes - 1)
        elif part in ("(", ")") and not num_classes:
            num_groups += 1 if part == "(" else -1
            if num_groups < 0:
                return False
    return num_groups == num_classes == 0


class _Rules:
    """The rules of one grammar.

    Args:
        text: In Lark's form.

    Raises:
        ValueError: They have a part that is not known, or are too long. So for the methods.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARS:
            raise ValueError("too long")
        self._bodies: dict[str, list[Token]] = {}
        self._found = dict[str, str]()
        self.depth = 0  # of the rules and groups that are being read
        for line in _lines(text):
            if line[0].text == "%":
                self._import(line)
                continue
            while line and line[0].text in ("?", "!"):  # for trees alone
                line = line[1:]
            name, colon, *body = line
            if name.kind != "name" or colon.text != ":" or name.text in self._bodies:
                raise ValueError(f"{name.text} is no rule")
            self._bodies[name.text] = body

    def expression(self, name: str) -> str:
        """Returns the regular expression of a rule."""
        if name not in self._found:
            if name not in self._bodies:
                raise ValueError(f"{name} is not known, or leads back to itself")
            body = _Body(self._bodies.pop(name), self)
            self._found[name] = body.alternatives()
            if body.following != END:
                raise ValueError(f"{body.following.text} is not expected")
        return self._found[name]

    def _import(self, line: list[Token]) -> None:
        words = [token.text for token in line if token.text not in ("%", ".", ",", "(", ")")]
        names, alias = words[2:], ""
        if names[1:2] == ["->"]:
            names, alias = names[:1], names[-1]
        if words[:2] != ["import", "common"] or not all(name in COMMON for name in names):
            raise ValueError(f"{' '.join(words)} is not known")
        self._found |= {alias or name: COMMON[name] for name in names}


class _Body:
    """The right side of one rule, read from left to right."""

    def __init__(self, tokens: list[Token], rules: _Rules) -> None:
        self._tokens = [*tokens, END]
        self._rules = rules
        self._at = 0

    @property
    def following(self) -> Token:
        """The next token."""
        return self._tokens[self._at]

    def alternatives(self) -> str:
        """Reads alternatives up to a bracket or the end."""
        self._rules.depth += 1
        if self._rules.depth > MAX_DEPTH:
            raise ValueError("too many rules and groups are in one another")
        found = self._sequence()
        while self._skip("|"):
            found = _bounded(f"{found}|{self._sequence()}")
        self._rules.depth -= 1
        return f"(?:{found})"

    def _sequence(self) -> str:
        found = ""
        while self.following != END and self.following.text not in ("|", ")", "]", "->"):
            found = _bounded(found + self._repeated(self._atom()))
        if self._skip("->"):
            self._take("name")
        return found

    def _repeated(self, atom: str) -> str:
        if self.following.text in _REPEATS:
            return f"{atom}{self._take('sign')}"
        if self._skip("~"):
            least = self._take("number")
            return f"{atom}{{{least},{self._take('number')}}}" if self._skip("..") else f"{atom}{{{least}}}"
        if self._skip("{"):
            least, most = self._take("number"), ""
            if self._skip(","):
                most = f",{self._take('number') if self.following.kind == 'number' else ''}"
            self._expect("}")
            return f"{atom}{{{least}{most}}}"
        return atom

    def _atom(self) -> str:
        if self._skip("("):
            found = self.alternatives()
            self._expect(")")
            return found
        if self._skip("["):
            found = self.alternatives()
            self._expect("]")
            return f"{found}?"
        kind = self.following.kind
        if kind == "name":
            return self._rules.expression(self._take("name"))
        if kind == "regex":
            body, _, flags = self._take("regex")[1:].rpartition("/")
            part = f"(?{''.join(sorted(set(flags)))}:{body})"
            if not (is_whole(body) and is_whole(part)):
                raise ValueError(f"{part} is not one part")
            return part
        text, has_case = _unquoted(self._take("text"))
        if self._skip(".."):
            last, _ = _unquoted(self._take("text"))
            if len(text) != 1 or len(last) != 1:
                raise ValueError(f"{text}..{last} is no range of characters")
            return f"[{escaped(text)}-{escaped(last)}]"
        return f"(?:{escaped(text)})" if has_case else f"(?i:{escaped(text)})"

    def _skip(self, sign: str) -> bool:
        is_next = self.following == Token("sign", sign)
        self._at += is_next
        return is_next

    def _take(self, kind: str) -> str:
        token = self.following
        if token.kind != kind:
            raise ValueError(f"{token.text} is no {kind}")
        self._at += 1
        return token.text

    def _expect(self, sign: str) -> None:
        if not self._skip(sign):
            raise ValueError(f"{self.following.text} is not {sign}")


def _bounded(expression: str) -> str:
    """Returns an expression, which is checked at each part: a rule of many parts could fill memory before its end."""
    if len(expression) > MAX_REGEX_BYTES:
        raise ValueError("too long")
    return expression


def _unquoted(text: str) -> tuple[str, bool]:
    """Returns a text without its quotes, and whether its case matters; raises ValueError for a lone surrogate too."""
    found: str = json.loads(text.removesuffix("i"), strict=False)
    found.encode()
    return found, text.endswith('"')


def _lines(text: str) -> list[list[Token]]:
    """Returns the tokens of each rule or import; a line that begins with a bar continues the one before."""
    lines: list[list[Token]] = [[]]
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"{text[at]!r} is not expected")
        at, kind = found.end(), str(found.lastgroup)
        if kind == "line":
            lines.append([])
        elif kind != "space":
            if found[0] == "|" and not lines[-1] and len(lines) > 1:
                lines.pop()
                while len(lines) > 1 and not lines[-1]:  # comments stood between
                    lines.pop()
            lines[-1].append(Token(kind, found[0]))
    return [line for line in lines if line]
