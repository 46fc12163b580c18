"""``hiserve.__main__``: Ctrl-C is quiet from the first moment, whichever import it falls into. No test here depends on time."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hiserve

ROOT = Path(__file__).parents[2]
ENTRY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["hiserve"]
MODULE, FUNCTION = ENTRY.split(":")
# What pip writes for a script, with Ctrl-C in the import of one module.
INTERRUPTED = f"""
import sys
module, sys.argv = sys.argv[1], ["hiserve", "serve", "--port", "0"]
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from {MODULE} import {FUNCTION}
sys.exit({FUNCTION}())
"""
IMPORTED = f"""
import importlib, sys
before = set(sys.modules)
import {MODULE}
print(*sorted(set(sys.modules) - before))
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "module", ["hiserve.cli", "argparse", "msgspec", "yaml", "hiserve.errors", "hiserve.commands.serve", "uvicorn"]
)
def test_ctrl_c_in_an_import_ends_the_command_without_a_word(module: str) -> None:
    done = run(INTERRUPTED, module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_nothing_else_is_imported_before_ctrl_c_is_heard() -> None:
    """Until then Python itself answers it, with a traceback."""
    assert set(run(IMPORTED).stdout.split()) - {"__future__", "importlib"} == {"hiserve", "hiserve.__main__"}


def test_python_m_hiserve_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hiserve", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"hiserve {hiserve.__version__}\n"


def test_every_public_name_is_there() -> None:
    for name in set(hiserve.__all__) - {"__version__"}:
        assert getattr(hiserve, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        importlib.import_module("hiserve").LMM  # noqa: B018
