"""Flags of the command line: described beside the fields that they fill, checked, and added to a parser."""

from __future__ import annotations

import argparse
import difflib
import math
import operator
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hiserve.errors import ConfigError

Kind = Literal["int", "float", "str", "bool", "path"]
_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float", Path: "path"}


def about(
    text: str,
    *,
    unit: str | None = None,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    repeats: bool = False,
    is_secret: bool = False,
    is_debug: bool = False,
    is_http: bool = False,
) -> Meta:
    """Describes an option; ``Flag`` says what the arguments mean."""
    limits = {"unit": unit, "least": least, "most": most, "above": above}
    shown = {"repeats": repeats, "is_secret": is_secret, "is_debug": is_debug, "is_http": is_http}
    return Meta(description=text, extra_json_schema=limits | shown)


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One option, as the command line and the documentation need it."""

    section: str  # field name of its section
    name: str  # field name; the flag is ``--name`` with dashes
    kind: Kind  # type of the value, or of each value of a list
    is_list: bool  # it takes several values
    choices: tuple[str, ...]  # allowed words, of a number beside numbers
    default: Any  # a number below the range is chosen later
    help: str
    unit: str | None  # of a number
    least: float | None  # smallest allowed number
    most: float | None  # largest allowed number
    above: float | None  # bound that is not allowed itself
    repeats: bool  # a list is given by several flags of one value each
    is_secret: bool  # its value must not be shown
    is_debug: bool  # for measurements and tests; ``--help`` leaves it out
    is_http: bool  # for a server that listens; commands without one do not take it

    @property
    def group(self) -> str:
        """The heading that it stands under: its section, or ``debug``."""
        return "debug" if self.is_debug else self.section

    @property
    def has_default(self) -> bool:
        """Whether its default is a value, and not the absence of one."""
        is_open = type(self.default) is int and self.least is not None and self.default < self.least
        return not (is_open or self.default is False or self.default in (None, ()))

    def check(self, value: Any) -> Any:
        """Returns the value if the option takes it; a number or a path in text becomes one.

        Raises:
            ConfigError: It has the wrong type or is out of range.
        """
        if value is None and self.default is None:
            return value
        if not self.is_list:
            return self._check_one(value)
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, list | tuple):
            self._refuse_text(value)
        return tuple(self._check_one(each) for each in values)

    def _check_one(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.choices:
            return value
        if self.kind in ("int", "float"):
            return _number(self, value)
        if self.kind == "path" and isinstance(value, str | Path):
            return Path(value)
        is_right = isinstance(value, bool if self.kind == "bool" else str) and not self.choices
        if self.is_list and not self.choices and not (is_right and value):
            self._refuse_text(value)
        if not is_right:
            wanted = f"one of {', '.join(self.choices)}" if self.choices else f"a {self.kind}"
            raise ConfigError(f"{flag_of(self.name)} is {value!r}; give {wanted}.", param=self.name)
        return value

    def _refuse_text(self, value: Any) -> NoReturn:
        shown = "empty or no text" if self.is_secret else repr(value)
        raise ConfigError(f"{flag_of(self.name)} is {shown}; give texts that are not empty.", param=self.name)

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Adds the flag to a group of a parser; its value is checked, and None unless given."""
        default = " ".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        notes = (f" [{self.unit}]" if self.unit else "") + (f" (default: {default})" if self.has_default else "")
        given: dict[str, Any] = {"default": None, "help": f"{self.help}{notes}".replace("%", "%%")}
        words = (["N"] if self.kind in ("int", "float") else []) + list(self.choices)
        if self.is_debug:
            given["help"] = argparse.SUPPRESS
        if self.kind == "bool":
            given["action"] = "store_true" if self.default is False else argparse.BooleanOptionalAction
        else:
            given |= {
                "type": self._check_one,
                "metavar": "|".join(words) or ("PATH" if self.kind == "path" else "TEXT"),
            }
        if self.is_list:
            given |= {"action": "append"} if self.repeats else {"nargs": "+"}
        group.add_argument(flag_of(self.name), **given)


def flags_of(section: str, kind: type[msgspec.Struct]) -> dict[str, Flag]:
    """Returns the flags of a section by name; ``about`` describes each of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(kind):
        annotation, *notes = get_args(hints[field.name])
        is_list = get_origin(annotation) is tuple
        form, choices = _kind_and_choices(get_args(annotation)[0] if is_list else annotation)
        meta = next(note for note in notes if isinstance(note, Meta))
        found[field.name] = Flag(
            section=section,
            name=field.name,
            kind=form,
            is_list=is_list,
            choices=choices,
            default=field.default,
            help=meta.description or "",
            **(meta.extra_json_schema or {}),
        )
    return found


def flag_of(name: str) -> str:
    """Returns the flag of an option."""
    return f"--{name.replace('_', '-')}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a sentence that suggests the nearest known option, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {flag_of(close[0])}?" if close else ""


def _kind_and_choices(annotation: Any) -> tuple[Kind, tuple[str, ...]]:
    members = get_args(annotation) or (annotation,)
    words = [word for member in members for word in (get_args(member) or (member,)) if isinstance(word, str)]
    return next((kind for form, kind in _KINDS.items() if form in members), "str"), tuple(words)


def _number(flag: Flag, value: Any) -> int | float:
    shown = flag_of(flag.name)
    is_whole = flag.kind == "int"
    number: int | float | None = None
    with suppress(TypeError, ValueError):
        if isinstance(value, str) or not is_whole:
            number = int(value) if is_whole else float(value)
        else:
            number = operator.index(value)
    if number is None or isinstance(value, bool) or math.isnan(number):
        words = f" or {', '.join(flag.choices)}" if flag.choices else ""
        raise ConfigError(f"{shown} is {value!r}; give a {'whole ' * is_whole}number{words}.", param=flag.name)
    bound = ""
    if flag.least is not None and number < flag.least:
        bound = f"the least is {flag.least}"
    elif flag.most is not None and number > flag.most:
        bound = f"the most is {flag.most}"
    elif flag.above is not None and number <= flag.above:
        bound = f"it must be above {flag.above}"
    if bound:
        raise ConfigError(f"{shown} is {number:.12g}; {bound}.", param=flag.name)
    return number
