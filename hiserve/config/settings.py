"""Settings by their flat names: what each is and takes, and configurations made of them."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hiserve.config.description import Auto
from hiserve.config.sections import Config
from hiserve.errors import ConfigError

Kind = Literal["int", "float", "str", "bool", "list"]
Number = TypeVar("Number", int, float)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One field of one section, as the command line and the documentation need it.

    Attributes:
        section: Field name of the section in ``Config``.
        name: Field name; the flag is ``--name`` with dashes.
        kind: ``int``, ``float``, ``str``, ``bool``, or ``list`` of texts.
        choices: Allowed words; for a number, words allowed beside it.
        default: Default value.
        help: One sentence.
        unit: Unit of a number, or None.
        least: Smallest allowed number, or None.
        most: Largest allowed number, or None.
        is_secret: Its value must not be shown.
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


def settings() -> dict[str, Setting]:
    """Returns every setting by name, in the order of the sections."""
    found = {}
    for section in _sections():
        section_type = type(section.default)
        hints = get_type_hints(section_type, include_extras=True)
        for field in msgspec.structs.fields(section_type):
            kind, choices = _kind_and_choices(get_args(hints[field.name])[0])
            meta = next(part for part in get_args(hints[field.name])[1:] if isinstance(part, Meta))
            extra = meta.extra_json_schema or {}
            found[field.name] = Setting(
                section=section.name,
                name=field.name,
                kind=kind,
                choices=choices,
                default=field.default,
                help=meta.description or "",
                unit=extra.get("unit"),
                least=extra.get("least"),
                most=extra.get("most"),
                is_secret=bool(extra.get("is_secret")),
            )
    return found


def _sections() -> list[msgspec.structs.FieldInfo]:
    """Returns the fields of a configuration that hold settings."""
    return [field for field in msgspec.structs.fields(Config) if field.default is not None]


def _kind_and_choices(annotation: Any) -> tuple[Kind, tuple[str, ...]]:
    if get_origin(annotation) is tuple:
        return "list", ()
    members = get_args(annotation) or (annotation,)
    words = [word for member in members for word in (get_args(member) or (member,)) if isinstance(word, str)]
    plain: dict[type, Kind] = {bool: "bool", int: "int", float: "float"}
    return next((kind for form, kind in plain.items() if form in members), "str"), tuple(words)


def make_config(**values: Any) -> Config:
    """Builds a configuration from flat names, as flags and ``LLM(...)`` give them.

    Numbers may be given as text. Names with dashes are accepted.

    Raises:
        ConfigError: An unknown name (the nearest known one is suggested), or a value of the wrong type or out of range.
    """
    known = settings()
    sections: dict[str, dict[str, Any]] = {}
    for given, value in values.items():
        name = given.replace("-", "_")
        if name not in known:
            raise ConfigError(f"unknown setting {given!r}.{nearest(name, known)}", param=given)
        sections.setdefault(known[name].section, {})[name] = _checked(known[name], value)
    return Config(**{section.name: type(section.default)(**sections.get(section.name, {})) for section in _sections()})


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a sentence that suggests the nearest known setting, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {flag_of(close[0])}?" if close else ""


def flag_of(name: str) -> str:
    """Returns the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def _checked(setting: Setting, value: Any) -> Any:
    """Returns the value if the setting takes it; a number in text becomes a number."""
    is_optional = setting.default is None
    if (value is None and is_optional) or (isinstance(value, str) and value in setting.choices):
        return value
    if setting.kind in ("int", "float"):
        return _number(setting, value)
    if setting.kind == "list":
        return _texts(setting, value)
    is_right = isinstance(value, bool if setting.kind == "bool" else str) and not setting.choices
    if not is_right:
        wanted = f"one of {', '.join(setting.choices)}" if setting.choices else f"a {setting.kind}"
        raise ConfigError(f"{flag_of(setting.name)} is {value!r}; give {wanted}.", param=setting.name)
    return value


def _number(setting: Setting, value: Any) -> int | float:
    flag = flag_of(setting.name)
    is_whole = setting.kind == "int"
    number: int | float | None = None
    with suppress(TypeError, ValueError):
        if isinstance(value, str) or not is_whole:
            number = int(value) if is_whole else float(value)
        else:
            number = operator.index(value)
    if number is None or isinstance(value, bool) or math.isnan(number):
        words = f" or {', '.join(setting.choices)}" if setting.choices else ""
        raise ConfigError(f"{flag} is {value!r}; give a {'whole ' * is_whole}number{words}.", param=setting.name)
    if setting.least is not None and number < setting.least:
        raise ConfigError(f"{flag} is {number:.12g}; the least is {setting.least}.", param=setting.name)
    if setting.most is not None and number > setting.most:
        raise ConfigError(f"{flag} is {number:.12g}; the most is {setting.most}.", param=setting.name)
    return number


def _texts(setting: Setting, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    is_right = isinstance(texts, list | tuple) and all(isinstance(text, str) and text for text in texts)
    if not is_right:
        shown = "given" if setting.is_secret else repr(value)
        raise ConfigError(f"{flag_of(setting.name)} is {shown}; give texts that are not empty.", param=setting.name)
    return tuple(texts)


def flat(config: Config) -> dict[str, Any]:
    """Returns every setting by its flat name, as ``make_config`` takes them."""
    return {name: getattr(getattr(config, setting.section), name) for name, setting in settings().items()}


def without_secrets(config: Config) -> Config:
    """Returns the configuration as it may be shown, and as processes that need no secrets get it."""
    hidden: dict[str, dict[str, Any]] = {}
    for setting in settings().values():
        if setting.is_secret:
            hidden.setdefault(setting.section, {})[setting.name] = setting.default
    sections = {name: msgspec.structs.replace(getattr(config, name), **defaults) for name, defaults in hidden.items()}
    return msgspec.structs.replace(config, **sections)


def known(value: Number | Auto) -> Number:
    """Returns a resolved number; ``auto`` here means that ``resolve`` was not called."""
    assert not isinstance(value, str), "an 'auto' setting reached a consumer; call resolve() first"
    return value
