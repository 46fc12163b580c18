"""The result file of a suite: its head with a digest of the code that it measures, spreads, and figures beside their bars."""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import statistics
import subprocess
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import hiserve
from hiserve.bench.record import about as about_run

ROOT = Path(__file__).parent.parent
ENGINE = (
    *("hiserve/engine", "hiserve/core", "hiserve/cache", "hiserve/runners", "hiserve/spec", "hiserve/sampling"),
    *("hiserve/models", "hiserve/layers.py", "hiserve/attention", "hiserve/kernels"),
)
SERVER = (*ENGINE, "hiserve/text", "hiserve/ipc", "hiserve/scheduler", "hiserve/server")


def measured(*paths: str, root: Path = ROOT) -> dict[str, Any]:
    """Returns what a result file says of the code that it measures; each path exists, relative to ``root``."""
    return {"paths": sorted(paths), "digest": digest(tuple(sorted(paths)), root)}


def is_current(found: dict[str, Any], root: Path = ROOT) -> bool:
    """Says whether a result file was made with the code that is here; false where it does not say with which code."""
    said = found.get("measured")
    if said is None or not all((root / path).exists() for path in said["paths"]):
        return False
    return bool(said["digest"] == digest(tuple(said["paths"]), root))


@cache
def digest(paths: tuple[str, ...], root: Path) -> str:
    """Returns 16 hexadecimal digits of the names and contents of files and folders, relative to ``root``."""
    total = hashlib.sha256()
    for path in sorted({file for each in paths for file in _files(root / each)}):
        content = _code(path.read_text(encoding="utf-8")).encode() if path.suffix == ".py" else path.read_bytes()
        for part in (path.relative_to(root).as_posix().encode(), content):
            total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    assert path.exists(), f"{path} is measured and does not exist"
    for each in path.rglob("*") if path.is_dir() else (path,):
        if each.is_file() and "__pycache__" not in each.parts:
            yield each


@cache
def _code(source: str) -> str:
    """Returns Python without comments, docstrings, blank lines and trailing blanks, alike in every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            assert text.end_lineno is not None
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return "\n".join(kept for line in lines if (kept := line.rstrip()))


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


def medians(samples: Mapping[str, Sequence[float]], digits: int = 3) -> dict[str, float]:
    return {name: round(statistics.median(values), digits) for name, values in samples.items()}


def judge(found: Mapping[str, float], *, least: Mapping[str, float] = {}, most: Mapping[str, float] = {}) -> list[str]:
    """Prints figures beside their bars; returns the names of those that miss theirs."""
    missed = [name for name in least if found[name] < least[name]] + [name for name in most if found[name] > most[name]]
    for name, figure in found.items():
        bar = f"≥ {least[name]:g}" if name in least else f"≤ {most[name]:g}" if name in most else ""
        print(f"{name:<28} {figure:>10.4g} {bar:<10} {'MISSED' if name in missed else ''}".rstrip(), flush=True)
    return missed


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, the 10th and the 90th percentile."""
    low, median, high = np.percentile(np.asarray(samples, dtype=float), (10, 50, 90))
    return float(median), float(low), float(high)


def spread_text(samples: Sequence[float], form: str, unit: str = "") -> str:
    """Returns ``26 ms [24 – 31]``: median and spread in a format, as ``.2f``; one sample is said to be one."""
    median, low, high = spread(samples)
    apart = f"{low:{form}} – {high:{form}}" if len(samples) > 1 else "one sample"
    return f"{median:{form}}{unit} [{apart}]"
