"""What every result file says about the run behind it."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import hiserve
from benchmarks.measured import measured
from hiserve.bench.record import about as about_run

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("numpy", "torch", "msgspec", "xxhash", "pyzmq", "transformers", "triton")


class Record(dict[str, Any]):
    """A result file: what ``about`` says of the run, then the figures that a suite adds."""

    def __init__(self, path: Path, command: str, *paths: str, at_commit: str | None = None, num_gpus: int = 0) -> None:
        super().__init__(about(command, *paths, at_commit=at_commit, num_gpus=num_gpus))
        self._path = path

    @classmethod
    def of(cls, given: argparse.Namespace, command: str, *paths: str) -> Record:
        """Returns the record of a run with the arguments of ``gpu_parser``; a ``--tiny`` run uses no GPU."""
        return cls(given.out, command, *paths, at_commit=given.commit, num_gpus=int(not given.tiny))

    def save(self) -> None:
        """Writes the file; suites call it after each part, so that a run that is cut short keeps its figures."""
        self._path.write_text(json.dumps(self, indent=1) + "\n")


def gpu_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of ``OUT.json COMMIT [--tiny]``, which every suite of a GPU takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--tiny", action="store_true")
    return parser


def commit(*paths: str) -> str:
    """Returns the checkout's commit, marked when tracked files under ``paths`` differ from it."""
    dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *paths], cwd=ROOT, check=False).returncode
    return _run("git", "rev-parse", "--short", "HEAD") + ("+changes" if dirty else "")


def about(command: str, *paths: str, at_commit: str | None = None, num_gpus: int = 0) -> dict[str, Any]:
    """Returns what ``hiserve bench`` says of a run, the commit, and the digest of the code in ``paths``."""
    said = about_run(command, f"hiserve {hiserve.__version__}", num_gpus, PACKAGES)
    return said | {"commit": at_commit or commit(*paths)} | ({"measured": measured(*paths)} if paths else {})


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
