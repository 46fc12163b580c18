"""Budgets of thoughts: the tokens that a reply's thoughts have had, and the token that must follow where they may have no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

SPECIAL = b"\xff"  # begins the spelling of a special token; no text has this byte


_MAX_CHAR_BYTES = 4


class ThoughtPlace(NamedTuple):
    """A place in a reply.

    Attributes:
        is_inside: Whether it is within a thought.
        num_tokens: Tokens of thoughts before it.
        tail: The last bytes before it, which may begin a mark.
    """

    is_inside: bool
    num_tokens: int
    tail: bytes


class ThoughtBudget:
    """Ends the thoughts of a reply after so many tokens. A thought whose mark is a special token may begin anywhere.

    Args:
        opening: The mark that opens a thought, spelled; empty where the reply begins within one, and has no other.
        mark: The mark that ends it, spelled.
        budget: Most tokens of all thoughts, those of a mark that they have begun to spell included, those that complete a character
            not.
        spell: Returns the bytes of a token; those of a special one begin with ``SPECIAL``.
        first_token: Returns the first token of such bytes.
    """

    def __init__(
        self,
        opening: bytes,
        mark: bytes,
        budget: int,
        spell: Callable[[int], bytes],
        first_token: Callable[[bytes], int],
    ) -> None:
        self._opening = opening
        self._mark = mark
        self._budget = budget
        self._spell = spell
        self._first_token = first_token
        self._is_anywhere = opening.startswith(SPECIAL)
        self._num_kept = max(len(opening), len(mark), _MAX_CHAR_BYTES) - 1

    @property
    def start(self) -> ThoughtPlace:
        """The place before the reply."""
        return ThoughtPlace(not self._opening, 0, b"")

    def after(self, place: ThoughtPlace | None, token: int) -> ThoughtPlace | None:
        """Returns the place after a token; None where no thought can follow."""
        if place is None:
            return None
        text = place.tail + self._spell(token)
        if not place.is_inside:
            return self._outside(text, place.num_tokens)
        _, found, rest = text.partition(self._mark)
        if found:
            return self._outside(rest, place.num_tokens) if self._is_anywhere else None
        return ThoughtPlace(True, place.num_tokens + 1, text[-self._num_kept :])

    def forced(self, place: ThoughtPlace | None) -> int | None:
        """Returns the token that must follow a place: the next one of the mark, as far as it is not spelled yet; None for any."""
        if place is None or not place.is_inside or place.num_tokens < self._budget or _is_cut(place.tail):
            return None
        spelled = next(size for size in range(len(self._mark) - 1, -1, -1) if place.tail.endswith(self._mark[:size]))
        return self._first_token(self._mark[spelled:])

    def _outside(self, text: bytes, num_tokens: int) -> ThoughtPlace | None:
        opening = self._opening
        if self._is_anywhere:
            _, found, rest = text.partition(opening)
            return (
                ThoughtPlace(True, num_tokens, rest)
                if found
                else ThoughtPlace(False, num_tokens, text[-self._num_kept :])
            )
        text = text.lstrip()
        if text.startswith(opening):
            return ThoughtPlace(True, 0, text[len(opening) :])
        return ThoughtPlace(False, 0, text) if opening.startswith(text) else None


def _is_cut(text: bytes) -> bool:
    """Whether a text in UTF-8 ends within a character."""
    for length, byte in enumerate(reversed(text[1 - _MAX_CHAR_BYTES :]), 1):
        if byte >= 0xC0:
            return length < 2 + (byte >= 0xE0) + (byte >= 0xF0)
        if byte < 0x80:
            return False
    return False
