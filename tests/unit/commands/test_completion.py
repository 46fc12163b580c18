"""``hiserve completion``: each shell completes commands, flags, words and files; shells that are not installed are left out."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hiserve import cli
from hiserve.commands.completion import SHELLS
from hiserve.config.flags import flag_of
from hiserve.config.options import flags

CASES = {
    "": ["serve", "generate", "completion"],
    "serve --kv-ev": ["--kv-events", "--kv-events-replay"],
    "serve --graphs ": ["auto", "off", "decode", "all"],
    "generate --bat": ["--batch"],
    "bench ": ["serve", "soak"],
    "bench spec --prop": ["--proposers"],
    "completion ": list(SHELLS),
    "serve --config /etc/passw": ["/etc/passwd"],
}
BASH = """
source $0
words=(hiserve "$@")
COMP_WORDS=("${words[@]}")
COMP_CWORD=$((${#words[@]} - 1))
_shtab_hiserve hiserve "${words[-1]}" "${words[-2]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script for a shell."""
    assert cli.main(["completion", request.param]) == 0
    path = tmp_path / f"hiserve.{request.param}"
    path.write_text(capsys.readouterr().out)
    return path


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def run(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split("\n")


@pytest.mark.parametrize("script", SHELLS, indirect=True)
def test_each_script_has_every_flag_that_help_shows(script: Path) -> None:
    words = set(re.findall(r"[\w-]+", script.read_text()))
    words |= {word.removeprefix("--") for word in words}
    for name, flag in flags().items():
        if name == "model" or (flag.is_debug and script.suffix != ".bash"):  # the others have help, which may name it
            continue
        assert (flag_of(name).removeprefix("--") in words) == (not flag.is_debug), name


@pytest.mark.parametrize("script", [pytest.param("bash", marks=needs("bash"))], indirect=True)
@pytest.mark.parametrize("typed", CASES)
def test_bash(script: Path, typed: str) -> None:
    assert set(CASES[typed]) <= set(run("bash", "-c", BASH, str(script), *typed.split(" ")))


@pytest.mark.parametrize("script", [pytest.param("fish", marks=needs("fish"))], indirect=True)
def test_fish(script: Path) -> None:
    for typed, wanted in CASES.items():
        found = run("fish", "--no-config", "-c", f"source {script}; complete -C 'hiserve {typed}'")
        assert set(wanted) <= {each.partition("\t")[0] for each in found}, typed


@pytest.mark.parametrize("script", [pytest.param("zsh", marks=needs("zsh"))], indirect=True)
def test_zsh(script: Path) -> None:
    """Zsh completes only at a terminal: it is given one, and completes a flag whose end is then read there."""
    master, slave = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "dumb"}
    )
    os.close(slave)

    def until(awaited: bytes) -> None:
        seen = b""
        while awaited not in seen:
            seen += os.read(master, 4096)

    try:
        os.write(master, f"autoload -U compinit; compinit -D -u; eval \"$(cat {script})\"; print rea''dy\n".encode())
        until(b"ready\r\n")
        for typed, rest in (("serve --kv-pa", b"ges"), ("serve --graphs dec", b"ode"), ("gene", b"rate")):
            os.write(master, f"hiserve {typed}\t".encode())
            until(typed.encode() + rest)
            os.write(master, b"\x15")  # take the line back
    finally:
        shell.kill()
        shell.wait()
        os.close(master)


def test_a_shell_that_is_not_known_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "ksh"]) == 1
    told = capsys.readouterr().err
    assert "'ksh' (choose from 'bash', 'zsh', 'fish')" in told and told.count("\n") == 1
