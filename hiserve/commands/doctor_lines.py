"""A line of ``hiserve doctor``: how serious it is, what was looked at, what was found."""

from __future__ import annotations

from typing import Literal

from rich.text import Text

Level = Literal["ok", "note", "fail"]
STYLES: dict[Level, str] = {"ok": "green", "note": "yellow", "fail": "bold red"}


def line(level: Level, name: str, text: str) -> Text:
    """Returns a line; whatever is longer than its column is shown nevertheless."""
    return Text.assemble(mark(level), f"{name:<13} ", text)


def mark(level: Level) -> Text:
    """Returns the level in its column and colour."""
    return Text(f"{level:<5}", STYLES[level])
