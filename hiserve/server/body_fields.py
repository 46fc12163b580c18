"""Reads request bodies field by field; every complaint names its field."""

from __future__ import annotations

import re
from typing import Any

from hiserve.config.serving import MAX_INT32
from hiserve.errors import NotFoundError, RequestError
from hiserve.text.chat_request import check_text

MAX_NAME_CHARS = 1024
_MAX_INT64 = 2**63 - 1
_TOKEN_ID = re.compile("[0-9]{1,10}")


class Fields:
    """The fields of one JSON object. Null counts as absent.

    Every reader raises ``RequestError``, with the field in ``param``, when the value has another type.

    Args:
        values: The object.
        prefix: What stands before a field's name in complaints, for an object inside another.
    """

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = values
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Says whether the field has a value."""
        return self.values.get(name) is not None

    def number(self, name: str, default: float) -> float:
        """Reads a number; NaN and what no field allows are refused here."""
        value = self.values.get(name)
        if value is None:
            return default
        if not _is_number(value):
            raise self.wrong(name, "a number")
        return float(value)

    def integer(self, name: str, *, least: int | None = None, most: int = MAX_INT32) -> int | None:
        """Reads a whole number.

        Args:
            name: The field.
            least: Smallest value; None leaves the range to the caller, up to 64 bits.
            most: Largest value, if ``least`` is given.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is not int or not -_MAX_INT64 <= value <= _MAX_INT64:
            raise self.wrong(name, "a whole number of at most 64 bits")
        if least is not None and not least <= value <= most:
            raise self.wrong(name, f"between {least} and {most}")
        return value

    def count(self, name: str, default: int) -> int:
        """Reads a whole number that has a default; its range is left to the caller."""
        value = self.integer(name)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        """Reads true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, *, most: int | None = None) -> str | None:
        """Reads a string of valid Unicode.

        Args:
            name: The field.
            most: Characters at most; None leaves the length to the caller.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        if most is not None and len(value) > most:
            raise self.wrong(name, f"at most {most} characters long")
        check_text(value, self._prefix + name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Reads a string, or a list of strings."""
        value = self.values.get(name)
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.wrong(name, "a string or a list of strings")
        for text in texts:
            check_text(text, self._prefix + name)
        return tuple(texts)

    def integers(self, name: str) -> tuple[int, ...]:
        """Reads a list of whole numbers."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise self.wrong(name, "a list of whole numbers")
        return tuple(value)

    def numbers_by_token(self, name: str) -> dict[int, float] | None:
        """Reads an object from token ids, spelled as strings, to numbers; None when it is empty."""
        value = self.values.get(name)
        if value is None or value == {}:
            return None
        is_right = isinstance(value, dict) and all(_TOKEN_ID.fullmatch(token) for token in value)
        if not is_right or not all(_is_number(number) for number in value.values()):
            raise self.wrong(name, "an object from token ids to numbers")
        return {int(token): float(number) for token, number in value.items()}

    def nested(self, name: str) -> Fields:
        """Reads an object; absent is empty."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self._prefix}{name}.")

    def wrong(self, name: str, wanted: str) -> RequestError:
        """Returns the complaint that a field is not what it must be."""
        return RequestError(f"{self._prefix}{name} must be {wanted}.", param=self._prefix + name)


def check_model(body: dict[str, Any], served: str) -> None:
    """Checks that the body names the served model, or none.

    Raises:
        NotFoundError: It names another one.
        RequestError: The name is not a string.
    """
    name = Fields(body).text("model")
    if name is not None and name != served:
        raise NotFoundError(f"there is no model {name[:100]!r} here; this server serves {served!r}.", param="model")


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -MAX_INT32 <= value <= MAX_INT32  # false for NaN
