"""A mutant: one place of the package replaced on its syntax tree, and the tests that must fail under it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
BLOCK = "if True:\n"
STATEMENTS = "body", "orelse", "finalbody", "handlers", "cases"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One replacement inside a function, class or module.

    Attributes:
        title: The rule that is broken; unique.
        path: File, relative to the repository.
        scope: Names of the class and function inside the file; none of them for the whole module.
        before: Statement to find; a lone expression is found wherever it is evaluated.
        after: Its replacement: one expression in the place of an expression, otherwise statements.
        which: The match to replace, from 1, where there are several; None where exactly one is expected.
        tests: Node ids of pytest; at least one of them must fail.
    """

    title: str
    path: str
    scope: tuple[str, ...]
    before: ast.stmt
    after: tuple[ast.stmt, ...]
    which: int | None
    tests: tuple[str, ...]

    @property
    def target(self) -> str:
        """Dotted name of what is broken."""
        return ".".join((*Path(self.path).with_suffix("").parts, *self.scope))

    def apply(self, source: str) -> str:
        """Returns the source with the match replaced and every other character kept.

        Raises:
            ValueError: The scope is not there, or the number of matches is another one.
        """
        start, text, end = _cut(source, find_scope(_parsed(source), self.scope))
        tree = find_scope(ast.parse(text), self.scope[-1:])
        node = self._match(tree)
        changed = _splice(text, node, self.after)
        made = find_scope(ast.parse(changed), self.scope[-1:])
        expected = _Replace(node, self.after).visit(tree)
        if ast.dump(made) != ast.dump(expected):
            raise ValueError("its replacement is another one in the text than on the tree: match a larger part")
        return start + changed.removeprefix(BLOCK) + end

    def _match(self, tree: ast.AST) -> ast.AST:
        before: ast.AST = self.before
        if isinstance(before, ast.Expr) and len(self.after) == 1 and isinstance(self.after[0], ast.Expr):
            before = before.value
        wanted = ast.dump(before)
        found = [node for node in _walk(tree) if type(node) is type(before) and ast.dump(node) == wanted]
        if len(found) != 1 if self.which is None else not 1 <= self.which <= len(found) > 1:
            place = "one" if self.which is None else f"number {self.which} of several"
            raise ValueError(f"matches {len(found)} times, not {place}: {ast.unparse(self.before)}")
        return found[(self.which or 1) - 1]


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _cut(source: str, scope: ast.AST) -> tuple[str, str, str]:
    """Returns the text before a scope, that of the scope, and the one behind it: to parse a file takes ten times as long.

    An indented definition has ``BLOCK`` before it.
    """
    if not isinstance(scope, Definition):
        return "", source, ""
    first = min(node.lineno for node in (scope, *scope.decorator_list)) - 1
    lines = source.encode().splitlines(keepends=True)
    parts = lines[:first], lines[first : scope.end_lineno], lines[scope.end_lineno :]
    start, text, end = (b"".join(part).decode() for part in parts)
    return start, BLOCK * (scope.col_offset > 0) + text, end


def find_scope(tree: ast.Module, names: tuple[str, ...]) -> ast.AST:
    """Returns the class or function of these nested names, wherever an ``if`` puts it; the module for none.

    Raises:
        ValueError: There is not exactly one.
    """
    scope: ast.AST = tree
    for name in names:
        found = [node for node in _definitions(scope) if node.name == name]
        if len(found) != 1:
            raise ValueError(f"{len(found)} definitions of {'.'.join(names)}, not one")
        scope = found[0]
    return scope


def _definitions(scope: ast.AST) -> Iterator[Definition]:
    """Yields the definitions right inside a scope, those under conditions too."""
    for field in STATEMENTS:
        for node in getattr(scope, field, ()):
            if isinstance(node, Definition):
                yield node
            else:
                yield from _definitions(node)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and what is below it in the order of the text, as far as the grammar gives it."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


class _Replace(ast.NodeTransformer):
    """Replaces one node, known by identity."""

    def __init__(self, node: ast.AST, after: tuple[ast.stmt, ...]) -> None:
        self._node, self._after = node, after

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        if node is not self._node:
            return self.generic_visit(node)
        return _expression(self._after) if isinstance(node, ast.expr) else list(self._after)


def _expression(after: tuple[ast.stmt, ...]) -> ast.expr:
    assert len(after) == 1 and isinstance(after[0], ast.Expr)
    return after[0].value


def _splice(source: str, node: ast.AST, after: tuple[ast.stmt, ...]) -> str:
    """Replaces the text of a node; columns of the tree count bytes."""
    assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + (node.end_col_offset or 0)
    if isinstance(node, ast.expr):
        text = f"({ast.unparse(_expression(after))})"
    else:
        indent = "\n" + " " * node.col_offset
        text = indent.join(line for statement in after for line in ast.unparse(statement).splitlines())
    raw = source.encode()
    return (raw[:start] + text.encode() + raw[end:]).decode()
