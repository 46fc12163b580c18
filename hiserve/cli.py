"""The ``hiserve`` command line: parses, then hands a configuration to one command."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence

from hiserve import __version__
from hiserve.config import Config, Setting, flag_of, make_config, nearest, settings
from hiserve.errors import ConfigError, HiserveError

# The one table that turns a command's name into its module; each has ``run``.
COMMANDS = {
    "serve": ("hiserve.commands.serve", "Serve a model over the OpenAI API."),
    "chat": ("hiserve.commands.chat", "Talk to a model in the terminal."),
    "config": ("hiserve.commands.config", "Print the resolved configuration and its memory plan."),
}


class _Parser(argparse.ArgumentParser):
    """Answers a wrong argument with our error, which ``main`` prints as one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}. See hiserve --help.")


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser; flags, defaults and help come from the fields of ``Config``."""
    parser = _Parser(prog="hiserve", description="An LLM serving engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"hiserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, (_, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_argument("model", nargs="?", default=None, metavar="MODEL", help=settings()["model"].help)
        if name == "chat":
            command.add_argument("--url", metavar="URL", help="Talk to this server instead of starting one.")
        groups: dict[str, argparse._ArgumentGroup] = {}
        for setting in settings().values():
            if setting.name == "model":
                continue
            group = groups.get(setting.section) or command.add_argument_group(setting.section)
            groups[setting.section] = group
            _add_flag(group, setting)
    return parser


def _add_flag(group: argparse._ArgumentGroup, setting: Setting) -> None:
    flag = flag_of(setting.name)
    words = (["N"] if setting.kind == "int" else []) + list(setting.choices)
    unit = f" [{setting.unit}]" if setting.unit else ""
    default = "" if setting.default is None else f" (default: {setting.default})"
    text = f"{setting.help}{unit}{default}".replace("%", "%%")
    if setting.kind == "bool":
        group.add_argument(flag, action="store_true", default=None, help=text)
    else:
        group.add_argument(flag, metavar="|".join(words) or "TEXT", default=None, help=text)


def parse(argv: Sequence[str]) -> tuple[str | None, Config, dict[str, str | None]]:
    """Returns the command, its configuration, and arguments that are no settings.

    Raises:
        ConfigError: An unknown or ill-formed argument; the nearest flag is suggested.
    """
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        raise ConfigError(f"{argv[0]} stands before the command. Put it behind: hiserve serve {argv[0]} ...")
    arguments, unknown = make_parser().parse_known_args(argv)
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0]!r}.{_advice(unknown[0])}")
    given = {name: value for name, value in vars(arguments).items() if name != "command"}
    extra = {name: given.pop(name) for name in tuple(given) if name not in settings()}
    chosen = {name: value for name, value in given.items() if value is not None}
    return arguments.command, make_config(**chosen), extra


def _advice(argument: str) -> str:
    name = argument.lstrip("-").split("=")[0].replace("-", "_")
    if name == "model":
        return " Give the model without a flag: hiserve serve MODEL."
    return nearest(name, [setting for setting in settings() if setting != "model"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (1 after a clear error)."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        command, config, extra = parse(argv)
        if command is None:
            make_parser().print_help()
            return 1
        module = importlib.import_module(COMMANDS[command][0])
        return int(module.run(config, **extra))
    except HiserveError as error:
        if "--debug" in argv:
            traceback.print_exc()
        sys.stderr.write(f"hiserve: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
