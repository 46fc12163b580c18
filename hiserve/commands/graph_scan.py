"""Reads the source of the hot path for what would break a CUDA graph, or make its launch wait for the device.

It looks for host syncs, for tensors made of Python values and for shapes that depend on data. Types are not known: a value
counts as a tensor when an annotation, a torch call or an operation on a tensor in the same function makes it one. Code of
Triton kernels runs on the device and is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

HOT_ROOMS = ("runners", "models", "layers", "attention", "kernels", "sampling", "spec")

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
    "if tensor": "waits for the device, and a graph keeps one branch",
    "nonzero": "has a shape that depends on data: it waits for the device",
    "mask index": "has a shape that depends on data: it waits for the device",
    "bincount": "waits for the device",
    "tensor of values": "copies from memory that is not pinned: it waits for the device",
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
    "bincount": "bincount",
    "synchronize": "synchronize",
    "new_tensor": "tensor of values",
}
# Of torch itself, besides.
_CALLS = {
    "tensor": "tensor of values",
    "as_tensor": "tensor of values",
    "equal": "torch.equal",
    "allclose": "torch.equal",
}
_CASTS = {"int", "float", "bool"}
# Of a tensor, what the host knows without asking the device; and what of torch gives no tensor.
_HOST_METHODS = {
    *("size", "dim", "numel", "stride", "data_ptr", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "item", "tolist", "numpy"),
}
_HOST_CALLS = {"device", "Size", "Generator", "finfo", "iinfo", "dtype", "inference_mode", "no_grad", "is_tensor"}
_HOST_CALLS |= {"equal", "allclose"}
_HOST_MODULES = {"cuda", "backends", "version", "distributed"}
_TENSOR_FIELDS = {"T", "mT", "real", "imag"}
_MASK_CALLS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "isin", "bool"}
_MASK_CALLS |= {"logical_and", "logical_or", "logical_not", "logical_xor"}


class Finding(NamedTuple):
    """Something that must not be there, or whose entry in the list of exceptions says why it may.

    Attributes:
        file: Relative to the package.
        line: From 1.
        function: Qualified name; ``<module>`` outside of any.
        pattern: Of ``PATTERNS``.
        text: The line itself.
    """

    file: str
    line: int
    function: str
    pattern: str
    text: str


class Allowed(NamedTuple):
    """An exception.

    Attributes:
        file: Relative to the package.
        function: Qualified name, ``*`` stands for any characters.
        pattern: Of ``PATTERNS``; ``*`` for all of them.
        reason: Why it does no harm there.
    """

    file: str
    function: str
    pattern: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        """Whether it is about this finding."""
        return (
            finding.file == self.file
            and fnmatchcase(finding.function, self.function)
            and self.pattern in ("*", finding.pattern)
        )


class Scan(NamedTuple):
    """What a scan found.

    Attributes:
        violations: What no exception covers.
        excused: What one covers.
        idle: Exceptions that cover nothing any more.
    """

    violations: list[Finding]
    excused: list[Finding]
    idle: list[Allowed]


def scan(package: Path, allowed: Sequence[Allowed]) -> Scan:
    """Scans the hot rooms of a package."""
    files = sorted(path for room in HOT_ROOMS for path in (package / room).rglob("*.py"))
    found = [
        finding
        for path in files
        for finding in scan_source(path.read_text(encoding="utf-8"), path.relative_to(package).as_posix())
    ]
    excused = [finding for finding in found if any(each.covers(finding) for each in allowed)]
    idle = [each for each in allowed if not any(map(each.covers, excused))]
    return Scan([finding for finding in found if finding not in excused], excused, idle)


def scan_source(source: str, file: str) -> list[Finding]:
    """Returns the findings of one file, first to last."""
    lines = source.splitlines()
    found = {
        Finding(file, line, function, pattern, lines[line - 1].strip())
        for function, body in _functions(ast.parse(source), "")
        for line, pattern in _Reader(body).findings()
    }
    return sorted(found, key=lambda finding: finding[1:])


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = _Function | ast.ClassDef | ast.Module


def _functions(scope: _Scope, name: str) -> Iterator[tuple[str, _Scope]]:
    """Yields every function, class and the module itself with its qualified name; kernels left out."""
    yield name or "<module>", scope
    for node in _own(scope):
        if isinstance(node, _Function | ast.ClassDef) and not any(map(_is_jit, node.decorator_list)):
            yield from _functions(node, f"{name}.{node.name}" if name else node.name)


def _is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(target, ast.Attribute) and target.attr == "jit"


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields what is inside of a scope, other scopes but not their insides."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _Function | ast.ClassDef):
            yield from _own(child)


class _Reader:
    """Reads one function.

    Args:
        scope: Its node.
    """

    def __init__(self, scope: _Scope) -> None:
        self._nodes = list(_own(scope))
        self._tensors: set[str] = set()
        self._masks: set[str] = set()
        if isinstance(scope, _Function):
            each = scope.args
            named = [*each.posonlyargs, *each.args, *each.kwonlyargs]
            self._tensors = {argument.arg for argument in named if _names_tensor(argument.annotation)}
        for _ in range(2):  # a loop's end comes before its beginning
            for node in self._nodes:
                self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        """Takes in what an assignment says of a name."""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _names_tensor(node.annotation):
            self._tensors.add(node.target.id)
        if not isinstance(node, ast.Assign | ast.NamedExpr):
            return
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and self._is_tensor(node.value):
                self._tensors.add(target.id)
                if self._is_mask(node.value):
                    self._masks.add(target.id)

    def findings(self) -> Iterator[tuple[int, str]]:
        """Yields the line and the pattern of each finding."""
        for node in self._nodes:
            if isinstance(node, ast.Call):
                pattern = self._call(node)
                if pattern is not None:
                    yield node.func.end_lineno or node.lineno, pattern
            elif isinstance(node, ast.Subscript) and self._has_mask(node.slice):
                yield node.lineno, "mask index"
            yield from ((asked.lineno, "if tensor") for asked in _asked(node) if self._is_tensor(asked))

    def _call(self, call: ast.Call) -> str | None:
        """What is wrong about a call."""
        if isinstance(call.func, ast.Name):
            is_cast = call.func.id in _CASTS and any(map(self._is_tensor, call.args))
            return "int(tensor)" if is_cast else None
        if not isinstance(call.func, ast.Attribute):
            return None
        name = call.func.attr
        if name in _CALLS and _root(call.func) == "torch":
            return _CALLS[name]
        if name == "to":
            to = [*call.args, *(keyword.value for keyword in call.keywords)]
            return '.to("cpu")' if any(map(_is_cpu, to)) else None
        if name == "where" and _root(call.func) == "torch" and len(call.args) == 1:
            return "nonzero"
        return _METHODS.get(name)

    def _has_mask(self, index: ast.expr) -> bool:
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        return any(map(self._is_mask, parts))

    def _is_tensor(self, node: ast.expr) -> bool:
        match node:
            case ast.Name():
                return node.id in self._tensors
            case ast.Attribute():
                return node.attr in _TENSOR_FIELDS and self._is_tensor(node.value)
            case ast.Subscript() | ast.Starred():
                return self._is_tensor(node.value)
            case ast.BinOp():
                return self._is_tensor(node.left) or self._is_tensor(node.right)
            case ast.UnaryOp():
                return not isinstance(node.op, ast.Not) and self._is_tensor(node.operand)
            case ast.BoolOp():
                return any(map(self._is_tensor, node.values))
            case ast.IfExp():
                return self._is_tensor(node.body) or self._is_tensor(node.orelse)
            case ast.Compare():
                is_value = not any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
                return is_value and any(map(self._is_tensor, (node.left, *node.comparators)))
            case ast.Call(func=ast.Attribute() as function):
                return self._gives_tensor(function)
        return False

    def _gives_tensor(self, function: ast.Attribute) -> bool:
        if _root(function) == "torch":
            return function.attr not in _HOST_CALLS and not _HOST_MODULES & set(ast.unparse(function).split("."))
        return function.attr not in _HOST_METHODS and self._is_tensor(function.value)

    def _is_mask(self, node: ast.expr) -> bool:
        match node:
            case ast.Name():
                return node.id in self._masks
            case ast.Subscript():
                return self._is_mask(node.value)
            case ast.Compare():
                return self._is_tensor(node)
            case ast.UnaryOp():
                return isinstance(node.op, ast.Invert) and self._is_mask(node.operand)
            case ast.BinOp():
                is_logic = isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
                return is_logic and (self._is_mask(node.left) or self._is_mask(node.right))
            case ast.Call(func=ast.Attribute(attr=name)):
                return name in _MASK_CALLS and self._is_tensor(node)
        return False


def _asked(node: ast.AST) -> list[ast.expr]:
    """Returns what a node asks for the truth of; of ``a and b``, which is one of the two, that is the first."""
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


def _names_tensor(annotation: ast.expr | None) -> bool:
    """Whether an annotation is Tensor, torch.Tensor, or one of them or None."""
    if isinstance(annotation, ast.BinOp):
        return _names_tensor(annotation.left) or _names_tensor(annotation.right)
    return annotation is not None and ast.unparse(annotation) in ("Tensor", "torch.Tensor")


def _root(node: ast.expr) -> str:
    """Returns the name that an attribute of an attribute hangs on; empty if it is none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_cpu(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return any(map(_is_cpu, node.args))
    return isinstance(node, ast.Constant) and node.value == "cpu"
