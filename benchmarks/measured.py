"""The code that a figure measures, by content, and whether it is still the same; no history of git is needed.

A result file holds the paths that its benchmark measures and a digest of what they contained. Comments, docstrings and blank
lines do not count.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

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
