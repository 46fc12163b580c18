"""Reads the catalogue: ``with`` statements that are parsed and never run. ``README.md`` shows one."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.mutants.mutant import Mutant, find_scope

ROOT = Path(__file__).parents[2]
CATALOGUE = Path(__file__).parent / "catalogue"


def load() -> list[Mutant]:
    """Returns the mutants of all rooms, each checked against the package and its tests."""
    found = [mutant for path in sorted(CATALOGUE.glob("*.py")) for mutant in read(path.read_text(), path.name)]
    titles = [mutant.title for mutant in found]
    assert len(set(titles)) == len(titles), f"titles occur twice: {sorted({t for t in titles if titles.count(t) > 1})}"
    problems = [f"{mutant.title}: {problem}" for mutant in found if (problem := problem_of(mutant))]
    assert not problems, "\n".join(["the catalogue no longer matches the source", *problems])
    return found


def problem_of(mutant: Mutant) -> str:
    """Returns why a mutant cannot be made or tested; empty if it can."""
    try:
        if mutant.apply(_text(mutant.path)) == _text(mutant.path):
            return "replaces its text by itself"
        for test in mutant.tests:
            path, *names = test.split("[")[0].split("::")
            find_scope(_tree(path), tuple(names))
    except ValueError as error:
        return f"{mutant.target}: {error}"
    return ""


def read(source: str, name: str) -> list[Mutant]:
    """Returns the mutants of one file of the catalogue.

    Raises:
        AssertionError: A statement is neither an import nor a mutant, or a name is not imported.
    """
    module = ast.parse(source, name)
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in module.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return [
        _entry(node, imported, f"{name}:{node.lineno}")
        for node in module.body
        if not isinstance(node, ast.ImportFrom) and not (node is module.body[0] and ast.get_docstring(module))
    ]


def _entry(node: ast.stmt, imported: dict[str, str], place: str) -> Mutant:
    assert isinstance(node, ast.With) and len(node.items) > 1, f"{place}: no `with TARGET, TEST:`"
    assert len(node.body) > 2, f"{place}: needs a title, what is replaced, and its replacement"
    title, before, *after = node.body
    assert isinstance(title, ast.Expr) and isinstance(title.value, ast.Constant), f"{place}: begins with its title"
    target, *tests = (item.context_expr for item in node.items)
    which = None
    if isinstance(target, ast.Subscript):
        target, which = target.value, ast.literal_eval(target.slice)
    path, scope = _resolve(target, imported, place)
    return Mutant(
        title=str(title.value.value),
        path=path,
        scope=scope,
        before=before,
        after=tuple(after),
        which=which,
        tests=tuple(_node_id(test, imported, place) for test in tests),
    )


def _node_id(test: ast.expr, imported: dict[str, str], place: str) -> str:
    """Returns the node id of ``module.test`` or ``module.test["parameters"]``."""
    parameters = ""
    if isinstance(test, ast.Subscript):
        test, parameters = test.value, f"[{ast.literal_eval(test.slice)}]"
    path, names = _resolve(test, imported, place)
    return "::".join((path, *names)) + parameters


def _resolve(name: ast.expr, imported: dict[str, str], place: str) -> tuple[str, tuple[str, ...]]:
    """Returns the file that defines a dotted name, and the names inside that file."""
    first, *rest = ast.unparse(name).split(".")
    assert first in imported, f"{place}: {first} is not imported"
    parts = [*imported[first].split("."), *rest]
    for length in range(len(parts), 0, -1):
        path = Path(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if (ROOT / file).is_file():
                return file.as_posix(), tuple(parts[length:])
    raise AssertionError(f"{place}: no file defines {'.'.join(parts)}")


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(_text(path))
