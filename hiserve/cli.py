"""The ``hiserve`` command line: parses, then hands a configuration to one command."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hiserve import __version__
from hiserve.config.flags import nearest
from hiserve.config.options import Options, by_group, flags, make_options
from hiserve.errors import ConfigError, HiserveError

# The one table that turns a command's name into its module: module, summary, whether it has arguments of its own.
# Each module has ``run(config, **arguments)``; with arguments of its own, also ``add_arguments(parser, add_settings)``.
COMMANDS = {
    "serve": ("hiserve.commands.serve", "Serve a model over the APIs of OpenAI and Anthropic.", False),
    "chat": ("hiserve.commands.chat", "Talk to a model in the terminal.", True),
    "generate": ("hiserve.commands.generate", "Generate for a batch of prompts, JSON lines out.", True),
    "bench": ("hiserve.commands.bench", "Measure a server under load, or the offline API.", True),
    "top": ("hiserve.commands.top", "Watch a running server: its cache tier by tier, copies, requests.", True),
    "doctor": ("hiserve.commands.doctor", "Check this machine, one line for each thing that hiserve needs.", True),
    "cache": ("hiserve.commands.cache", "List or delete named host caches and stores that servers left.", True),
    "config": ("hiserve.commands.config", "Print the resolved configuration and its memory plan.", False),
    "completion": ("hiserve.commands.completion", "Print a script that completes commands in a shell.", True),
}


class _Parser(argparse.ArgumentParser):
    """Answers a wrong argument with our error, which ``main`` prints as one line, and suggests a flag of the same command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but refuses unknown arguments."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            own = re.findall(r"--([a-z][a-z-]*)", self.format_usage())
            raise ConfigError(f"unknown argument {unknown[0]!r}.{_advice(unknown[0], own)}")
        return arguments, []

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}. See hiserve --help.")


def make_parser(*named: str) -> argparse.ArgumentParser:
    """Builds the parser; flags, defaults and help of settings come from the fields of ``Options``.

    Args:
        named: The commands whose arguments are wanted; only their modules are imported.
    """
    parser = _Parser(prog="hiserve", description="An LLM serving engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"hiserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, (module, summary, has_arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if not has_arguments:
            _add_settings(command)
        elif name in named:
            importlib.import_module(module).add_arguments(command, _add_settings)
    return parser


def _add_settings(command: argparse.ArgumentParser, *, is_http: bool = True) -> None:
    """Adds the model, ``--config`` and a flag for every other setting; ``is_http`` says whether the command runs a server."""
    command.add_argument("model", nargs="?", default=None, metavar="MODEL", help=flags()["model"].help)
    command.add_argument("--config", metavar="FILE", help="YAML file of settings by name; flags win over it.")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in by_group():
        if flag.name != "model" and (is_http or not flag.is_http):
            group = groups.get(flag.group) or command.add_argument_group(flag.group)
            groups[flag.group] = group
            flag.add_to(group)


def parse(argv: Sequence[str]) -> tuple[str | None, Options, dict[str, Any]]:
    """Returns the command, its configuration, and arguments that are no settings.

    Raises:
        ConfigError: An unknown or ill-formed argument; the nearest flag is suggested.
    """
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        raise ConfigError(f"{argv[0]} stands before the command. Put it after: hiserve serve {argv[0]} ...")
    arguments = make_parser(*argv[:1]).parse_args(argv)
    given = {name: value for name, value in vars(arguments).items() if name != "command"}
    file = given.pop("config", None)
    extra = {name: given.pop(name) for name in tuple(given) if name not in flags()}
    chosen = {name: value for name, value in given.items() if value is not None}
    return arguments.command, make_options(**_read_settings(file) | chosen), extra


def _read_settings(file: str | None) -> dict[str, Any]:
    """Reads a YAML file of settings; names as in flags, with dashes or underscores.

    Raises:
        ConfigError: The file cannot be read, or is not such a file.
    """
    if file is None:
        return {}
    try:
        found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read --config {file}: {' '.join(str(error).split())}.", param="config") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"--config {file} must hold names and values, like 'page_size: 16'.", param="config")
    return {name.replace("-", "_"): value for name, value in found.items()}


def _advice(argument: str, own: list[str]) -> str:
    """Returns a sentence of advice after an unknown argument; ``own`` are the names of the command's flags."""
    name = argument.lstrip("-").split("=")[0].replace("-", "_")
    if name == "model":
        return " Give the model without a flag: hiserve serve MODEL."
    if name in flags():
        return " It is a setting of servers: hiserve serve."
    return nearest(name, [flag.replace("-", "_") for flag in own])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (1 after a clear error)."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        command, config, extra = parse(argv)
        if command is None:
            make_parser().print_help()
            return 1
        if command == "completion":
            extra["parser"] = make_parser(*COMMANDS)
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
