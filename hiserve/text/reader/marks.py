"""A reply format in the tokens of one model: the marks known by their token, and the search for marks in text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from hiserve.text.reader.formats import NOTHING, Marks, ReplyFormat
from hiserve.text.tokens.tokenizer import Tokenizer

# A lone surrogate, which no decoded text contains, represents a mark that is a token of its own.
_FIRST_STAND_IN = 0xD800
STAND_INS = r"\ud800-\udfff"


class MarkSearch:
    """Searches several texts in a growing text.

    Args:
        marks: The texts.
        num_lines: Line breaks before a mark that belong to it, at most.

    Attributes:
        begin: Finds where a mark may begin in a text.
    """

    def __init__(self, marks: Iterable[str], num_lines: int = 0) -> None:
        named = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._pattern = re.compile(f"\n{{0,{num_lines}}}({'|'.join(map(re.escape, named)) or '(?!)'})")
        whole = ["\n" * num + mark for mark in named for num in range(num_lines + 1)]
        self._prefixes = {text[:length] for text in whole for length in range(1, len(text))}
        firsts = "".join(map(re.escape, {text[0] for text in self._prefixes}))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        begins = "".join(map(re.escape, {text[0] for text in whole}))
        self.begin = re.compile(f"[{begins}]" if begins else "(?!)").search
        self._longest = max(map(len, whole), default=1)

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """Returns the first mark, group 1, with the line breaks before it that belong to it."""
        return self._pattern.search(text, at)

    def num_held(self, text: str) -> int:
        """Returns how many of the last characters may begin a mark."""
        at = max(0, len(text) - self._longest + 1)
        while self._first and (found := self._first.search(text, at)):
            if text[found.start() :] in self._prefixes:
                return len(text) - found.start()
            at = found.start() + 1
        return 0


class TextSearches(NamedTuple):
    """The marks that end a text: in the content of a reply, in a thought."""

    in_content: MarkSearch
    in_thought: MarkSearch


class ReplySyntax:
    """A reply format in the tokens of one model. Marks are spelled as in the reader's text.

    Args:
        row: The format.
        tokenizer: Of the model.
        template: Source of the chat template; thoughts are read where it contains their marks or these are tokens.
        is_named: The format was named by the operator: thoughts are read anyway.

    Attributes:
        row: The format.
        stand_ins: Stand-ins of the marks that are tokens, by id.
        call: Marks around a call.
        section: Marks around all calls.
        thought: Marks around a thought; empty where the model has none.
        opening: The mark with which calls begin.
        with_calls: The marks that end a text of a reply that may call tools.
        without_calls: The same where calls are text.
    """

    def __init__(self, row: ReplyFormat, tokenizer: Tokenizer, template: str = "", *, is_named: bool = False) -> None:
        self.row = row
        added = {token.content for token in tokenizer.added_tokens}
        parts = {part for part in added if len(part) > 1 and part in row.marks}
        parts |= {part for text in row.name_prefixes for part in added if len(part) > 1 and part in text}
        spelled = sorted(parts)
        self._stand_ins = {text: chr(_FIRST_STAND_IN + at) for at, text in enumerate(spelled)}
        self._texts = {stand_in: text for text, stand_in in self._stand_ins.items()}
        self.stand_ins = {
            index: self._stand_ins[token] for index, token in tokenizer.vocab.items() if token in self._stand_ins
        }
        self.call, self.section = self.pair(row.call), self.pair(row.section)
        has_thoughts = is_named or all(mark in template or mark in self._stand_ins for mark in row.thought)
        self.thought = self.pair(row.thought) if has_thoughts else NOTHING
        self.opening = self.section[0] or self.call[0]
        self.name_ends = tuple(map(self.spell, row.name_ends))
        self.name_prefixes = tuple(map(self.spell, row.name_prefixes))
        self.id_mark = self.spell(row.id_mark)
        self.key, self.value, self.end = self.pair(row.key), self.pair(row.value), self.spell(row.end)
        self.closings = tuple(mark for mark in (self.call[1], self.section[1]) if mark)
        self.with_calls, self.without_calls = self._searches(has_calls=row.has_calls), self._searches(has_calls=False)
        self.in_header = MarkSearch([*self.name_ends, *self.closings])
        self.in_arguments = MarkSearch(self.closings, 1)
        self.in_key = MarkSearch([self.key[1], *self.closings])
        by_token = [mark for mark in self.closings if self.is_token(mark)]
        self.in_value = MarkSearch([self.value[1], *by_token], row.value_lines)

    def _searches(self, *, has_calls: bool) -> TextSearches:
        calls = [self.opening, self.call[0]] if self.is_token(self.call[0]) else [self.opening]
        calls = calls if has_calls else []
        by_token = [mark for mark in calls if self.is_token(mark)]
        thoughts = [self.thought[0]] if self.is_token(self.thought[0]) else []
        return TextSearches(
            MarkSearch([*calls, *thoughts], self.row.call_lines),
            MarkSearch([self.thought[1], *by_token], self.row.thought_lines[1]),
        )

    def pair(self, marks: Marks) -> Marks:
        """Returns two marks as in the reader's text."""
        return self.spell(marks[0]), self.spell(marks[1])

    def spell(self, text: str) -> str:
        """Returns a text with stand-ins for the marks that are tokens."""
        for part, stand_in in self._stand_ins.items():
            text = text.replace(part, stand_in)
        return text

    def shown(self, text: str) -> str:
        """Returns a text of the reader with all marks spelled out."""
        for stand_in, part in self._texts.items():
            if stand_in in text:
                text = text.replace(stand_in, part)
        return text

    def is_token(self, mark: str) -> bool:
        """Whether a mark is known by its token."""
        return mark in self._texts
