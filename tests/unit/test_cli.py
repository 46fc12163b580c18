"""The command line: every setting is a flag, what is wrong is one line, and help costs nothing."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hiserve import __version__, cli
from hiserve.config.flags import flag_of
from hiserve.config.options import Options, flags, make_options
from hiserve.errors import ConfigError, ModelError

FLAGS = {name: setting for name, setting in flags().items() if name != "model"}


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as left:
        cli.main([*argv, "--help"])
    assert left.value.code == 0
    return " ".join(capsys.readouterr().out.split())


# --- parsing ----------------------------------------------------------------------------------


def test_nothing_given_is_the_default_configuration() -> None:
    assert cli.parse(["serve"]) == ("serve", make_options(), {})


@pytest.mark.parametrize("name", FLAGS)
def test_every_setting_is_a_flag(name: str) -> None:
    setting = FLAGS[name]
    if setting.kind == "bool":
        argv, value = [flag_of(name)], True
    elif setting.kind in ("int", "float"):
        argv, value = [flag_of(name), str(setting.least)], setting.least
    elif setting.is_list:
        argv, value = [flag_of(name), "a", flag_of(name), "b"], ["a", "b"]
    else:
        value = setting.choices[-1] if setting.choices else "words with spaces"
        argv = [flag_of(name), value]
    assert cli.parse(["serve", "folder", *argv]) == ("serve", make_options(model="folder", **{name: value}), {})


def test_a_flag_may_be_joined_to_its_value() -> None:
    assert cli.parse(["config", "--page-size=4"])[1] == make_options(page_size=4)


def test_a_file_of_settings_is_read_and_flags_win_over_it(tmp_path: Path) -> None:
    file = tmp_path / "hiserve.yaml"
    file.write_text("model: m\npage-size: 4\nkv_pages: 9\napi_key: [a, b]\ndebug: true\nqueue_timeout_s: 1.5\n")
    config = cli.parse(["serve", "--config", str(file), "--kv-pages", "7"])[1]
    wanted = {"page_size": 4, "kv_pages": 7, "api_key": ["a", "b"], "debug": True, "queue_timeout_s": 1.5}
    assert config == make_options(model="m", **wanted)
    file.write_text("")
    assert cli.parse(["serve", "--config", str(file)])[1] == make_options()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("pag_size: 4", "unknown setting 'pag_size'. Did you mean --page-size?"),
        ("[1, 2]", "must hold names and values"),
        ("1: 2", "must hold names and values"),
        ("page_size: [", "cannot read --config"),
        ("page_size: many", "--page-size is 'many'; give a whole number"),
        ("page_size: \xff", "cannot read --config"),
        (None, "cannot read --config"),
    ],
)
def test_a_wrong_file_of_settings_is_one_line(text: str | None, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "hiserve.yaml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=re.escape(complaint)) as refused:
        cli.parse(["serve", "--config", str(file)])
    assert "\n" not in refused.value.message


def test_only_chat_takes_an_address() -> None:
    assert cli.parse(["chat", "--url", "http://x"])[2] == {"url": "http://x"}
    with pytest.raises(ConfigError, match="unknown argument '--url'"):
        cli.parse(["serve", "--url", "http://x"])


@pytest.mark.parametrize(
    "command", [*(name for name in cli.COMMANDS if name not in ("bench", "cache", "completion")), "bench offline"]
)
def test_flags_are_not_abbreviated(command: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown argument '--max-model'\."):
        cli.parse([*command.split(), "--max-model", "9"])


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("serve --prt", " Did you mean --port?"),
        ("generate --prompt", ""),
        ("generate --max-token", " Did you mean --max-tokens?"),
        ("generate --port", " It is a setting of servers: hiserve serve."),
        ("top --api-key-fil", " Did you mean --api-key-file?"),
        ("top --kv-page", ""),
    ],
)
def test_advice_names_flags_of_the_same_command_alone(argument: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.parse([*argument.split(), "9"])
    assert caught.value.message == f"unknown argument {argument.split()[1]!r}.{advice}"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--kv-page", "5"], ["'--kv-page'", "--kv-pages"]),
        (["serve", "--pagesize=4"], ["'--pagesize=4'", "--page-size"]),
        (["serve", "--model", "x"], ["'--model'", "hiserve serve MODEL"]),
        (["serve", "--zzzzz"], ["'--zzzzz'"]),
        (["serve", "a", "b"], ["'b'"]),
        (["serve", "--kv-pages"], ["--kv-pages", "expected one argument"]),
        (["serve", "--kv-pages", "many"], ["--kv-pages", "'many'", "auto"]),
        (["serve", "--port", "99999"], ["--port", "65535"]),
        (["serve", "--dtype", "int3"], ["--dtype", "'int3'", "float32"]),
        (["generate", "--port", "1"], ["--port", "hiserve serve"]),
        (["srve"], ["srve", "serve", "chat", "config"]),
        (["--port", "1", "serve"], ["--port", "before the command"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in ("serve", "srve", "--port") else "",
)
def test_a_wrong_argument_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    assert cli.main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hiserve: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


# --- help -------------------------------------------------------------------------------------


def test_help_shows_sentence_unit_and_default_of_every_flag_that_is_not_for_debugging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys, "serve")
    for name, setting in FLAGS.items():
        if setting.is_debug:
            assert flag_of(name) not in re.findall(r"--[a-z-]+", text)
            continue
        words = [setting.help]
        words += [f"[{setting.unit}]"] if setting.unit else []
        words += [f"(default: {setting.default})"] if setting.has_default else []
        assert re.sub(r"\s|-", "", f"{' '.join(words)}") in re.sub(r"\s|-", "", text), name
        assert flag_of(name) in text


def test_a_command_without_a_server_takes_and_shows_no_settings_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "generate")
    shown = set(re.findall(r"--[a-z-]+", text))
    assert not shown & {"--host", "--port", "--api-key", "--share-prefixes", "--log-level", "--responses-store"}
    assert shown >= {"--kv-pages", "--store", "--spec", "--replicas", "--max-request-bytes", "--drain-timeout-s"}
    assert all(
        (flag_of(name) in shown) is not (flag.is_http or flag.is_debug)
        for name, flag in FLAGS.items()
        if name != "model"
    )


def test_help_of_the_whole_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    for name, (_, summary, _) in cli.COMMANDS.items():
        assert f"{name} {summary}" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"hiserve {__version__}\n"


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 1
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["serve", "--kv-page", "1"]])
def test_help_and_refusals_need_few_modules_and_no_torch(argv: list[str]) -> None:
    program = (
        "import sys\nfrom hiserve.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'triton', 'transformers', 'starlette', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert len(sys.modules) < 250, len(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- running ----------------------------------------------------------------------------------


class Command:
    """Stands for a command's module."""

    def __init__(self, outcome: BaseException | int) -> None:
        self.outcome = outcome
        self.seen: list[tuple[Options, dict[str, Any]]] = []

    def add_arguments(
        self, parser: argparse.ArgumentParser, add_settings: Callable[[argparse.ArgumentParser], None]
    ) -> None:
        parser.add_argument("--url")
        add_settings(parser)

    def run(self, config: Options, **extra: Any) -> int:
        self.seen.append((config, extra))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def install(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int) -> Command:
    command = Command(outcome)
    monkeypatch.setattr(importlib, "import_module", lambda name: command)
    return command


def test_a_command_gets_its_configuration_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    command = install(monkeypatch, 3)
    assert cli.main(["chat", "m", "--url", "u", "--page-size", "4"]) == 3
    assert command.seen == [(make_options(model="m", page_size=4), {"url": "u"})]


def test_every_command_of_the_table_is_there() -> None:
    for module, _, _ in cli.COMMANDS.values():
        assert callable(importlib.import_module(module).run)


@pytest.mark.parametrize("flags", [[], ["--debug"]])
def test_a_typed_error_is_one_line_and_a_traceback_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    error = ModelError("there is no such model.")
    error.add_note("what the worker said")
    install(monkeypatch, error)
    assert cli.main(["serve", *flags]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "hiserve: there is no such model."
    assert (len(lines) == 1) == (not flags)
    assert ("what the worker said" in lines) == bool(flags)


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, KeyboardInterrupt())
    assert cli.main(["serve"]) == 130


def test_our_own_fault_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["serve"])
