"""Reads data sets: one JSON object a line, gzipped or not."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from hiserve.errors import ConfigError

_T = TypeVar("_T")


def read_lines(path: Path, row: type[_T], what: str) -> Iterator[_T]:
    """Yields the rows of a file.

    Args:
        path: Ends with ``.gz`` when it is gzipped.
        row: What each line holds.
        what: The data set, for error messages.

    Raises:
        ConfigError: The file cannot be read, or a line holds something else.
    """
    decoder = msgspec.json.Decoder(row)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _decode(decoder, line, f"--path {path}, line {number}: not a row of {what}")
    except (OSError, EOFError) as error:
        raise ConfigError(f"cannot read --path {path}: {error}.", param="path") from None


def required(path: Path | None, choice: str) -> Path:
    """Returns the file of a data set that needs one.

    Args:
        path: As given.
        choice: The flag that chose the data set, for the message.

    Raises:
        ConfigError: It was not given.
    """
    if path is None:
        raise ConfigError(f"{choice} reads a file; give --path.", param="path")
    return path


def _decode(decoder: msgspec.json.Decoder[_T], line: bytes, complaint: str) -> _T:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{complaint}: {error}.", param="path") from None
