"""Finds code of the hot path that breaks a CUDA graph, or makes its launch wait for the device.

It looks for host syncs, for tensors made of Python values, for shapes that depend on data, and, where steps are launched,
for memory that each of them allocates. ``values`` infers which values are tensors. Code of Triton kernels runs on the device
and is left out; so are files of the last three rooms that do not import torch: they have no tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from tools.graph_lint.values import (
    TENSORS,
    Facts,
    Function,
    Names,
    Scope,
    Type,
    ValueKind,
    collect,
    own_nodes,
    root_of,
)

HOT_ROOMS = (
    "runners/",
    "models/",
    "layers.py",
    "attention/",
    "kernels/",
    "sampling/",
    "spec/",
    "engine/",
    "core/",
    "cache/storage/",
)
_LAUNCH_ROOMS = (
    "runners/",
    "engine/",
    "core/",
    "cache/storage/",
)  # of these only files with tensors, but for the first
_MIXED_ROOMS = _LAUNCH_ROOMS[1:]

# What a finding is called -> why it must not be there.
PATTERNS = {
    ".item()": "waits for the device",
    ".tolist()": "waits for the device",
    ".cpu()": "waits for the device",
    ".numpy()": "waits for the device",
    '.to("cpu")': "waits for the device",
    "synchronize": "waits for the device",
    "torch.equal": "waits for the device",
    "int(tensor)": "waits for the device",
    "text of tensor": "waits for the device",
    "slice by tensor": "waits for the device",
    "iteration": "makes as many tensors as there are rows, or waits for the device",
    "if tensor": "waits for the device, and a graph keeps one branch",
    "nonzero": "has a shape that depends on data: it waits for the device",
    "mask index": "has a shape that depends on data: it waits for the device",
    "repeat_interleave": "has a shape that depends on data: it waits for the device",
    "bincount": "waits for the device",
    "tensor of values": "copies from memory that is not pinned: it waits for the device",
    "value into tensor": "is a launch for one number, and a graph keeps the number",
    "allocation": "takes memory in every step",
}
_METHODS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "cpu": ".cpu()",
    "numpy": ".numpy()",
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "masked_select": "nonzero",
    "unique": "nonzero",
    "unique_consecutive": "nonzero",
    "bincount": "bincount",
    "synchronize": "synchronize",
    "empty_cache": "synchronize",
    "new_tensor": "tensor of values",
    "cuda": "tensor of values",
    "is_nonzero": "if tensor",
    "__bool__": "if tensor",
    "__int__": "int(tensor)",
    "__index__": "int(tensor)",
    "__float__": "int(tensor)",
}
# Of torch itself, besides.
_CALLS = {
    "tensor": "tensor of values",
    "as_tensor": "tensor of values",
    "from_numpy": "tensor of values",
    "asarray": "tensor of values",
    "equal": "torch.equal",
    "allclose": "torch.equal",
}
# Of a tensor alone: others have methods of these names.
_TENSOR_METHODS = {"equal": "torch.equal", "allclose": "torch.equal"}
_CASTS = {"int", "float", "bool", "range", "round", "hex", "complex"}
_TEXTS = {"str", "repr", "print", "format"}
_ITERATIONS = {"list", "tuple", "sorted", "max", "min", "sum", "any", "all", "set", "zip", "enumerate", "map", "iter"}
_ALLOCATIONS = {"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like"}
_NEW = {"new_empty", "new_zeros", "new_ones", "new_full", "clone", "pin_memory"}


class GraphHazard(NamedTuple):
    """A line that needs an exception."""

    file: str  # relative to the package
    line: int  # from 1
    function: str  # qualified name; ``<module>`` outside of any
    pattern: str  # of ``PATTERNS``
    text: str


class Allowed(NamedTuple):
    """An exception."""

    file: str  # relative to the package
    function: str  # qualified name, ``*`` stands for any characters
    pattern: str  # of ``PATTERNS``; ``*`` for all of them
    reason: str  # why it does no harm there

    def covers(self, finding: GraphHazard) -> bool:
        """Returns whether the exception is for this finding."""
        return (
            finding.file == self.file
            and fnmatchcase(finding.function, self.function)
            and self.pattern in ("*", finding.pattern)
        )


class Scan(NamedTuple):
    """The result of a scan."""

    violations: list[GraphHazard]  # lines without an exception
    excused: list[GraphHazard]  # lines with one
    idle: list[Allowed]  # exceptions that cover nothing any more


def scan(package: Path, allowed: Sequence[Allowed]) -> Scan:
    """Scans the hot rooms of a package."""
    names = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    sources = {name: (package / name).read_text(encoding="utf-8") for name in names if name.startswith(HOT_ROOMS)}
    facts = collect(map(ast.parse, sources.values()))
    found = [finding for file, source in sources.items() for finding in scan_source(source, file, facts)]
    excused = [finding for finding in found if any(each.covers(finding) for each in allowed)]
    idle = [each for each in allowed if not any(map(each.covers, excused))]
    return Scan([finding for finding in found if finding not in excused], excused, idle)


def scan_source(source: str, file: str, facts: Facts | None = None) -> list[GraphHazard]:
    """Returns the findings of one file, first to last.

    Args:
        source: Its text.
        file: Relative to the package.
        facts: Of the files around it; its own if None.
    """
    tree, lines = ast.parse(source), source.splitlines()
    if file.startswith(_MIXED_ROOMS) and not _imports_torch(tree):
        return []
    launches = file.startswith(_LAUNCH_ROOMS)
    found = {
        GraphHazard(file, line, function, pattern, lines[line - 1].strip())
        for function, reader in _functions(tree, "", facts or collect([tree]), {})
        for line, pattern in reader.findings()
        if launches or pattern not in ("allocation", "value into tensor")
    }
    return sorted(found, key=lambda finding: finding[1:])


def _imports_torch(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] == "torch" for name in names):
            return True
    return False


def _functions(scope: Scope, name: str, facts: Facts, outer: Mapping[str, Type]) -> Iterator[tuple[str, _Reader]]:
    """Yields a reader of every function, class and the module itself, by qualified name; kernels left out."""
    reader = _Reader(scope, facts, outer)
    yield name or "<module>", reader
    for node in own_nodes(scope):
        if isinstance(node, Function | ast.ClassDef) and not any(map(_is_jit, node.decorator_list)):
            known = dict(reader.known)
            if isinstance(node, ast.ClassDef):
                known["self"] = node.name
            yield from _functions(node, f"{name}.{node.name}" if name else node.name, facts, known)


def _is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(target, ast.Attribute) and target.attr == "jit"


class _Reader(Names):
    """Reads one function; as ``Names``."""

    def __init__(self, scope: Scope, facts: Facts, outer: Mapping[str, Type]) -> None:
        super().__init__(scope, facts, outer)
        self._is_at_start = isinstance(scope, Function) and scope.name in ("__init__", "__post_init__")

    def findings(self) -> Iterator[tuple[int, str]]:
        """Yields the line and the pattern of each finding."""
        for node in self.nodes:
            match node:
                case ast.Call():
                    pattern = self._called(node)
                    if pattern is not None:
                        yield node.func.end_lineno or node.lineno, pattern
                case ast.Subscript():
                    yield from ((node.lineno, pattern) for pattern in self._indexed(node))
                case ast.For() | ast.comprehension() if self.is_tensor(node.iter):
                    yield node.iter.lineno, "iteration"
                case ast.Starred(value=value) if isinstance(node.ctx, ast.Load) and self.is_tensor(value):
                    yield node.lineno, "iteration"
                case ast.FormattedValue() if self.kind(node.value) in (*TENSORS, ValueKind.MANY):
                    yield node.lineno, "text of tensor"
                case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[right]) if self.is_tensor(right):
                    yield node.lineno, "if tensor"
                case ast.Assign() if self._stores_value(node):
                    yield node.lineno, "value into tensor"
                case ast.Match() if self.is_tensor(node.subject):
                    yield node.lineno, "if tensor"
            yield from ((asked.lineno, "if tensor") for asked in _asked(node) if self.is_tensor(asked))

    def _called(self, call: ast.Call) -> str | None:
        """Returns the pattern that a call matches."""
        if isinstance(call.func, ast.Name):
            return self._builtin(call, call.func.id)
        if not isinstance(call.func, ast.Attribute):
            return None
        name, root = call.func.attr, root_of(call.func)
        if root == "torch" and name in _CALLS:
            return _CALLS[name]
        if root in ("np", "numpy", "math", "operator") and any(map(self.is_tensor, call.args)):
            return ".numpy()" if root.startswith("n") else "int(tensor)"
        if root in ("np", "numpy", "math"):
            return None
        if root == "torch" or self.kind(call.func.value) is not ValueKind.HOST:
            return self._method(call, name, root, self.kind(call.func.value))
        return None

    def _builtin(self, call: ast.Call, name: str) -> str | None:
        for names, pattern in ((_CASTS, "int(tensor)"), (_TEXTS, "text of tensor"), (_ITERATIONS, "iteration")):
            if name in names and any(map(self.is_tensor, call.args)):
                return pattern
        return None

    def _method(self, call: ast.Call, name: str, root: str, base: Type) -> str | None:
        words = {keyword.arg for keyword in call.keywords}
        if name in ("to", "copy_to") and any(map(self._is_cpu, [*call.args, *(word.value for word in call.keywords)])):
            return '.to("cpu")'
        if name == "where" and root == "torch" and len(call.args) == 1:
            return "nonzero"
        if name == "repeat_interleave" and "output_size" not in words:
            by = call.args[1 if root == "torch" and len(call.args) > 1 else 0] if call.args else None
            return "repeat_interleave" if by is None or self.is_tensor(by) else None
        if name in _TENSOR_METHODS and base in TENSORS:
            return _TENSOR_METHODS[name]
        if name == "arange" and root == "torch" and any(map(self.is_tensor, call.args)):
            return "int(tensor)"
        if not self._is_at_start:
            is_made = (
                (name in _ALLOCATIONS and root == "torch") or name in _NEW or (name == "arange" and root == "torch")
            )
            if is_made and "out" not in words:
                return "allocation"
        if name == "cuda" and root == "torch":
            return None
        return _METHODS.get(name)

    def _is_cpu(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return any(map(self._is_cpu, node.args))
        return self.kind(node) is ValueKind.CPU or (isinstance(node, ast.Constant) and node.value == "cpu")

    def _indexed(self, node: ast.Subscript) -> Iterator[str]:
        if self.kind(node.value) is ValueKind.HOST and not self._has_tensor(node.slice):
            return
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(self.kind(part) is ValueKind.MASK for part in parts):
            yield "mask index"
        for part in parts:
            if isinstance(part, ast.Slice) and any(
                bound is not None and self.is_tensor(bound) for bound in (part.lower, part.upper, part.step)
            ):
                yield "slice by tensor"
        if self.kind(node.value) is ValueKind.HOST or isinstance(node.value, ast.List | ast.Tuple | ast.Dict):
            yield "int(tensor)"

    def _has_tensor(self, node: ast.expr) -> bool:
        return any(isinstance(each, ast.expr) and self.is_tensor(each) for each in ast.walk(node))

    def _stores_value(self, node: ast.Assign) -> bool:
        """Returns whether a number of the host, constants excluded, is written into part of a tensor."""
        if isinstance(node.value, ast.Constant) or self.kind(node.value) is not ValueKind.HOST:
            return False
        return any(isinstance(target, ast.Subscript) and self.is_tensor(target.value) for target in node.targets)


def _asked(node: ast.AST) -> list[ast.expr]:
    """Returns the expressions of which a node tests the truth; of ``a and b``, which yields one of them, the first."""
    match node:
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            return [node.test]
        case ast.comprehension():
            return node.ifs
        case ast.BoolOp():
            return node.values[:-1]
        case ast.UnaryOp(op=ast.Not()):
            return [node.operand]
    return []
