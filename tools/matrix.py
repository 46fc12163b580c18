"""Runs the suite on each Python with each torch: ``python -m tools.matrix [--python 3.12] [--torch 2.13] [-- PYTEST ARGUMENTS]``.

Each pair gets a virtual environment in ``.venv-matrix``, with the Triton that torch's CUDA build requires, which pip brings
most people. ``PIP_ARGS`` are passed with ``--pip-args``. The suite of `make test` itself runs with the newest of all.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.pytest_run import ROOT, Run, run_pytest, verdict
from tools.suite import TESTS

PYTHONS = ("3.11", "3.12", "3.13")
TRITON_OF_TORCH = {"2.11": "3.6.0", "2.12": "3.7.1", "2.13": "3.7.1"}
FOLDER = ROOT / ".venv-matrix"


@dataclass(frozen=True, slots=True)
class Cell:
    """One environment."""

    python: str  # version, ``3.12``
    interpreter: str  # its executable
    torch: str  # version, ``2.13``

    @property
    def name(self) -> str:
        """What is said of it."""
        return f"Python {self.python}, torch {self.torch}, triton {TRITON_OF_TORCH[self.torch]}"


def find_interpreters(versions: Sequence[str], folder: Path | None = None) -> dict[str, str | None]:
    """Returns an executable of each version that runs, from PATH or from those that pyenv has installed; None without one.

    Args:
        versions: ``3.12`` and the like.
        folder: Of pyenv's versions, if not where it usually is.
    """
    folder = folder or Path.home() / ".pyenv" / "versions"
    found: dict[str, str | None] = {}
    for version in versions:
        paths = [shutil.which(f"python{version}"), *map(str, sorted(folder.glob(f"{version}.*/bin/python{version}")))]
        if sys.version_info[:2] == tuple(map(int, version.split("."))):
            paths.insert(0, sys.executable)
        found[version] = next((path for path in paths if path and _version(path) == version), None)
    return found


def _version(path: str) -> str:
    """Returns the version of an interpreter; empty if it does not run, as a shim of pyenv that leads nowhere."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([path, "-c", program], capture_output=True, text=True, check=False).stdout.strip()


def install(cell: Cell, pip_args: Sequence[str]) -> str:
    """Makes the environment; returns its interpreter.

    Raises:
        CalledProcessError: It cannot be installed.
    """
    folder = FOLDER / f"python{cell.python}-torch{cell.torch}"
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([cell.interpreter, "-m", "venv", str(folder)], check=True)
    wanted = (f"torch=={cell.torch}.*", f"triton=={TRITON_OF_TORCH[cell.torch]}", "-e", ".[dev]")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, *pip_args, *wanted], cwd=ROOT, check=True)
    return python


def run_cells(
    interpreters: dict[str, str | None],
    torches: Sequence[str],
    prepare: Callable[[Cell], str],
    test: Callable[[str], Run],
) -> int:
    """Tests every pair and prints a line for each, then the verdict; returns 0 if nothing failed and something passed.

    Args:
        interpreters: As of ``find_interpreters``.
        torches: Versions.
        prepare: Installs a pair; returns its interpreter.
        test: Runs the suite with it.
    """
    lines, total = [], Counter[str]()
    for version, interpreter in interpreters.items():
        if interpreter is None:
            lines.append(f"Python {version}: not tested, no python{version} was found")
            continue
        for torch in torches:
            cell = Cell(version, interpreter, torch)
            print(f"--- {cell.name}", flush=True)
            try:
                counts = test(prepare(cell)).counts
            except subprocess.CalledProcessError as failure:
                total["failed"] += 1
                lines.append(f"{cell.name}: cannot be installed, {failure}")
                continue
            total += counts
            lines.append(f"{cell.name}: {verdict(counts)}")
    print()
    print("\n".join(lines))
    if not any(interpreters.values()):
        print(f"none of Python {', '.join(interpreters)} was found: install one, or pass --python VERSION")
    print(verdict(total))
    return int(bool(total["failed"]) or not total["passed"])


def main() -> int:
    """Runs the matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="a version, 3.12; may be repeated; default: all")
    parser.add_argument("--torch", action="append", choices=TRITON_OF_TORCH, help="may be repeated; default: all")
    parser.add_argument("--pip-args", default="", help="further arguments of pip install, in one string")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest")
    given = parser.parse_args()
    return run_cells(
        find_interpreters(given.python or PYTHONS),
        given.torch or list(TRITON_OF_TORCH),
        lambda cell: install(cell, shlex.split(given.pip_args)),
        lambda python: run_pytest([*TESTS, *given.pytest], python),
    )


if __name__ == "__main__":
    sys.exit(main())
