"""``hiserve completion``: a script that lets a shell complete commands, flags, words and files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import shtab

from hiserve.config.options import Options, flags

SHELLS = ("bash", "zsh", "fish")
FILES = {"FILE": shtab.FILE, "PATH": shtab.FILE, "MODEL": shtab.DIRECTORY}


def add_arguments(parser: argparse.ArgumentParser, _: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds the name of the shell."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"One of {', '.join(SHELLS)}.")


def run(_: Options, shell: str, parser: argparse.ArgumentParser) -> int:
    """Prints the script.

    Args:
        shell: One of ``SHELLS``.
        parser: Of all commands with their arguments. It parses no more after this.
    """
    words = {name: flag.choices for name, flag in flags().items() if flag.choices}
    for action in _actions(parser):
        action.choices = words.get(action.dest, action.choices)
        if isinstance(action.metavar, str) and action.metavar in FILES:
            action.complete = FILES[action.metavar]  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
