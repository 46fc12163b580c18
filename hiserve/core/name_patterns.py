"""Regular expressions over names, in time that grows with the product of both lengths, with lookaheads once more with the name's.

Checkpoints bring them.

Python's own try ways one after the other, of which there may be exponentially many. Here all states that a pattern can be in are
followed at once (Thompson 1968), so that it has no references to groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

MAX_STATES = 2000  # of a pattern; repetitions with a number are spelled out
MAX_DEPTH = 20  # of groups

_Test: TypeAlias = Callable[[str, int], bool]  # of a name, and a place in it
_Build: TypeAlias = Callable[[int], int]  # adds states before one, and returns the first

_ATOM = re.compile(
    r"\\(?:[dDwWsS]|[^a-zA-Z0-9])|\[\^?\]?(?:\\.|[^\]\\])*\]|(?!\{(?:\d+(?:,\d*)?|,\d*)\})[^\\()\[|*+?^$]", re.DOTALL
)  # a number of repetitions is no character
_COUNT = re.compile(r"(?:([*+?])|\{(?!\})(\d{0,9})(?:(,)(\d{0,9}))?\})\??")
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_GROUP = re.compile(r"\((?:\?(?:(:|P<\w+>)|([=!])))?(?!\?)")
_END = 0  # the state of a pattern that has matched


class PatternError(ValueError):
    """A pattern is none, or has what is not supported."""


@dataclass(slots=True)
class _State:
    test: _Test | None  # None is always true
    takes_character: bool
    targets: list[int]


class NamePattern:
    """A regular expression.

    Supported are characters, their classes, groups, alternatives, repetitions, lookaheads that are not nested, and both ends.

    Args:
        text: In Python's spelling.

    Raises:
        PatternError: It has anything else, or too much of it.
    """

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth, self._is_ahead = text, 0, 0, False
        self._states = [_State(None, False, [])]
        self._start = self._choices()(_END)
        if self._at < len(text):
            raise self._error("a parenthesis that closes nothing")

    def matches_start(self, name: str) -> bool:
        """Whether a name begins with a match, as ``re.match`` finds one."""
        return self._reaches_end(self._start, name, 0)

    def _reaches_end(self, start: int, name: str, at: int) -> bool:
        current = self._enter((start,), name, at)
        while current and _END not in current and at < len(name):
            states = (self._states[each] for each in current if self._states[each].takes_character)
            targets = [state.targets[0] for state in states if state.test is None or state.test(name, at)]
            at += 1
            current = self._enter(targets, name, at)
        return _END in current

    def _enter(self, starts: Iterable[int], name: str, at: int) -> set[int]:
        """Returns the states that are reached without a character."""
        found, left = set(starts), list(starts)
        while left:
            state = self._states[left.pop()]
            if not state.takes_character and (state.test is None or state.test(name, at)):
                left += set(state.targets) - found
                found.update(state.targets)
        return found

    def _add(self, targets: list[int], test: _Test | None = None, *, takes_character: bool = False) -> int:
        if len(self._states) == MAX_STATES:
            raise self._error(f"more than {MAX_STATES} states")
        self._states.append(_State(test, takes_character, targets))
        return len(self._states) - 1

    def _choices(self) -> _Build:
        builds = [self._sequence()]
        while self._take("|"):
            builds.append(self._sequence())
        return builds[0] if len(builds) == 1 else lambda after: self._add([build(after) for build in builds])

    def _sequence(self) -> _Build:
        builds = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            builds.append(self._repeated(self._item()))

        def build(after: int) -> int:
            for each in reversed(builds):
                after = each(after)
            return after

        return build

    def _item(self) -> _Build:
        if self._take("^"):
            return lambda after: self._add([after], lambda name, at: at == 0)
        if self._take("$"):
            return lambda after: self._add([after], lambda name, at: at == len(name))
        if self._text[self._at] == "(":
            return self._group()
        atom = _ATOM.match(self._text, self._at)
        if atom is None:
            raise self._error("no such character, class or group")
        self._at = atom.end()
        try:
            test = re.compile(atom.group()).fullmatch
        except re.error as error:
            raise self._error(str(error)) from None
        return lambda after: self._add([after], lambda name, at: test(name[at]) is not None, takes_character=True)

    def _group(self) -> _Build:
        opened = _GROUP.match(self._text, self._at)
        ahead = None if opened is None else opened.group(2)
        if opened is None or self._depth == MAX_DEPTH or (ahead and self._is_ahead):
            raise self._error("no such group, or groups that are nested too deeply")
        self._at, self._depth, self._is_ahead = opened.end(), self._depth + 1, self._is_ahead or ahead is not None
        inner = self._choices()
        if not self._take(")"):
            raise self._error("a group without an end")
        self._depth -= 1
        if ahead is None:
            return inner
        self._is_ahead, start, wanted = False, inner(_END), ahead == "="
        return lambda after: self._add([after], lambda name, at: self._reaches_end(start, name, at) == wanted)

    def _repeated(self, build: _Build) -> _Build:
        found = _COUNT.match(self._text, self._at)
        if found is None:
            return build
        self._at = found.end()
        sign, fewest, comma, largest = found.groups()
        least, most = _COUNTS[sign] if sign else (int(fewest or 0), int(largest) if largest else None)
        if not sign and not comma:
            most = least
        if most is not None and most < least:
            raise self._error("a repetition of less than nothing")

        def repeat(after: int) -> int:
            if most is None:
                start = self._add([after])
                self._states[start].targets.append(build(start))
            else:
                start = after
                for _ in range(most - least):
                    start = self._add([build(start), after])
            for _ in range(least):
                before, start = start, build(start)
                if before == start:  # of nothing
                    break
            return start

        return repeat

    def _take(self, sign: str) -> bool:
        is_there = self._text.startswith(sign, self._at)
        self._at += len(sign) * is_there
        return is_there

    def _error(self, fact: str) -> PatternError:
        return PatternError(f"{fact}, at character {self._at}")


@cache
def name_pattern(text: str) -> NamePattern:
    """Returns a pattern, which is read once."""
    return NamePattern(text)
