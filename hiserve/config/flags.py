"""Flags of the command line: described beside the fields that they fill, checked, and added to a parser."""

from __future__ import annotations

import argparse
import difflib
import math
import operator
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hiserve.errors import ConfigError

Kind = Literal["int", "float", "str", "bool", "list"]


def about(
    text: str,
    *,
    unit: str | None = None,
    least: int | None = None,
    most: int | None = None,
    is_secret: bool = False,
    is_debug: bool = False,
) -> Meta:
    """Describes an option: its help sentence, its unit and range, whether its value and its flag are shown."""
    extra = {"unit": unit, "least": least, "most": most, "is_secret": is_secret, "is_debug": is_debug}
    return Meta(description=text, extra_json_schema=extra)


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One option, as the command line and the documentation need it.

    Attributes:
        section: Field name of the section in ``Options``.
        name: Field name; the flag is ``--name`` with dashes.
        kind: ``int``, ``float``, ``str``, ``bool``, or ``list`` of texts.
        choices: Allowed words; for a number, words allowed beside it.
        default: Default value.
        help: One sentence.
        unit: Unit of a number, or None.
        least: Smallest allowed number, or None.
        most: Largest allowed number, or None.
        is_secret: Its value must not be shown.
        is_debug: For measurements and tests; ``--help`` leaves it out.
    """

    section: str
    name: str
    kind: Kind
    choices: tuple[str, ...]
    default: Any
    help: str
    unit: str | None
    least: int | None
    most: int | None
    is_secret: bool
    is_debug: bool

    @property
    def group(self) -> str:
        """The heading that it stands under: its section, or ``debug``."""
        return "debug" if self.is_debug else self.section

    @property
    def has_default(self) -> bool:
        """Whether its default is a value, and not the absence of one."""
        return not (self.default is False or self.default in (None, ()))

    def check(self, value: Any) -> Any:
        """Returns the value if the option takes it; a number in text becomes a number.

        Raises:
            ConfigError: It has the wrong type or is out of range.
        """
        is_optional = self.default is None
        if (value is None and is_optional) or (isinstance(value, str) and value in self.choices):
            return value
        if self.kind in ("int", "float"):
            return _number(self, value)
        if self.kind == "list":
            return _texts(self, value)
        is_right = isinstance(value, bool if self.kind == "bool" else str) and not self.choices
        if not is_right:
            wanted = f"one of {', '.join(self.choices)}" if self.choices else f"a {self.kind}"
            raise ConfigError(f"{flag_of(self.name)} is {value!r}; give {wanted}.", param=self.name)
        return value

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Adds the flag to a group of a parser; its value is None unless given, and unchecked."""
        words = (["N"] if self.kind in ("int", "float") else []) + list(self.choices)
        unit = f" [{self.unit}]" if self.unit else ""
        default = f" (default: {self.default})" if self.has_default else ""
        text = argparse.SUPPRESS if self.is_debug else f"{self.help}{unit}{default}".replace("%", "%%")
        if self.kind == "bool":
            group.add_argument(flag_of(self.name), action="store_true", default=None, help=text)
        else:
            action = "append" if self.kind == "list" else "store"
            metavar = "|".join(words) or "TEXT"
            group.add_argument(flag_of(self.name), action=action, metavar=metavar, default=None, help=text)


def flags_of(section: str, kind: type[msgspec.Struct]) -> dict[str, Flag]:
    """Returns the flags of a section by name; ``about`` describes each of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(kind):
        annotation, *notes = get_args(hints[field.name])
        form, choices = _kind_and_choices(annotation)
        meta = next(note for note in notes if isinstance(note, Meta))
        found[field.name] = Flag(
            section=section,
            name=field.name,
            kind=form,
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
    if get_origin(annotation) is tuple:
        return "list", ()
    members = get_args(annotation) or (annotation,)
    words = [word for member in members for word in (get_args(member) or (member,)) if isinstance(word, str)]
    plain: dict[type, Kind] = {bool: "bool", int: "int", float: "float"}
    return next((kind for form, kind in plain.items() if form in members), "str"), tuple(words)


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
    if flag.least is not None and number < flag.least:
        raise ConfigError(f"{shown} is {number:.12g}; the least is {flag.least}.", param=flag.name)
    if flag.most is not None and number > flag.most:
        raise ConfigError(f"{shown} is {number:.12g}; the most is {flag.most}.", param=flag.name)
    return number


def _texts(flag: Flag, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    is_right = isinstance(texts, list | tuple) and all(isinstance(text, str) and text for text in texts)
    if not is_right:
        shown = "given" if flag.is_secret else repr(value)
        raise ConfigError(f"{flag_of(flag.name)} is {shown}; give texts that are not empty.", param=flag.name)
    return tuple(texts)
