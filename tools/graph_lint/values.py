"""Infers from source which values are tensors, masks, or the host's own.

Annotations of arguments, fields and functions name types; docstrings name the tensors that are masks (``x: bool``); other
types follow from torch calls and from operations on known values. A name has the type that any of its assignments gives it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class ValueKind(Enum):
    """The kind of a value. A value of a known class has the class's name instead, an unknown value None."""

    TENSOR = "tensor"
    MASK = "tensor of bool"
    MANY = "several tensors"
    HOST = "number or array of the host"
    CPU = "the device of the host"


Type = ValueKind | str | None
Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.ClassDef | ast.Module
TENSORS = (ValueKind.TENSOR, ValueKind.MASK)

_HOST_TYPES = {"int", "float", "bool", "str", "bytes", "ndarray", "Path", "range"}
_MANY_TYPES = {"tuple", "list", "set", "dict", "Sequence", "Iterable", "Iterator", "Collection", "Mapping"}
_MASK_NAME = re.compile(r"(is|has|are|may|was)_\w+|\w*mask\w*|legal|keep|valid")
_BOOL_LINE = re.compile(r"^\s*(\w+): bool\b", re.MULTILINE)
# Attributes of a tensor that the host has without a sync; and members of torch that give no tensor.
_HOST_METHODS = {
    *("size", "dim", "numel", "stride", "data_ptr", "element_size", "storage_offset", "get_device", "nelement"),
    *("is_contiguous", "is_floating_point", "item", "tolist", "numpy", "equal", "allclose", "is_pinned", "is_cuda"),
}
_HOST_CALLS = {"device", "Size", "Generator", "finfo", "iinfo", "dtype", "inference_mode", "no_grad", "is_tensor"}
_HOST_CALLS |= {"equal", "allclose", "is_nonzero", "is_floating_point", "get_num_threads", "set_num_threads"}
_HOST_MODULES = {"cuda", "backends", "version", "distributed", "utils"}
_TENSOR_FIELDS = {"T", "mT", "real", "imag", "data"}
_MASK_CALLS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "isin", "bool", "any", "all"}
_MASK_CALLS |= {"logical_and", "logical_or", "logical_not", "logical_xor"}
_MANY_CALLS = {
    "split",
    "split_with_sizes",
    "unbind",
    "chunk",
    "sort",
    "topk",
    "tensor_split",
    "broadcast_tensors",
    "aminmax",
}


@dataclass
class Facts:
    """The annotated types of the classes and functions of some files."""

    # Of each class its attributes; methods with ``()`` after their name.
    classes: dict[str, dict[str, Type]] = field(default_factory=dict)
    # Return types of functions, by name; of several of one name only the type that all return.
    returns: dict[str, Type] = field(default_factory=dict)


def collect(trees: Iterable[ast.Module]) -> Facts:
    """Reads the annotations of modules, then the assignments to ``self`` of their classes."""
    facts, trees = Facts(), list(trees)
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    facts.classes.update((node.name, {}) for node in classes)
    for each in classes:
        facts.classes[each.name].update(_fields(each, facts))
    unlike: set[str] = set()
    for node in nodes:
        if isinstance(node, Function) and not (node.args.args and node.args.args[0].arg == "self"):
            made = annotated(node.returns, facts)
            if facts.returns.setdefault(node.name, made) != made:
                unlike.add(node.name)
    for name in unlike:
        del facts.returns[name]
    for each in classes:
        attributes = facts.classes[each.name]
        for method in (node for node in each.body if isinstance(node, Function)):
            for name, kind in Names(method, facts, {"self": each.name}).of_self():
                if attributes.get(name) is None:
                    attributes[name] = kind
    return facts


def _fields(node: ast.ClassDef, facts: Facts) -> Iterator[tuple[str, Type]]:
    masks = _said_masks(node)
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign):
            target = each.target
            name = (
                target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
            )
            yield name, _masked(name, annotated(each.annotation, facts), masks)
    for method in (each for each in node.body if isinstance(each, Function)):
        is_property = any(ast.unparse(decorator).endswith("property") for decorator in method.decorator_list)
        yield method.name + ("" if is_property else "()"), annotated(method.returns, facts)


def _said_masks(node: Scope) -> set[str]:
    return set(_BOOL_LINE.findall(ast.get_docstring(node) or ""))


def _masked(name: str, kind: Type, masks: set[str]) -> Type:
    return ValueKind.MASK if kind is ValueKind.TENSOR and (name in masks or _MASK_NAME.fullmatch(name)) else kind


def annotated(node: ast.expr | None, facts: Facts) -> Type:
    """Returns the type that an annotation names."""
    match node:
        case ast.Constant(value=str(text)):
            return annotated(ast.parse(text, mode="eval").body, facts)
        case ast.BinOp(op=ast.BitOr()):
            return annotated(node.left, facts) or annotated(node.right, facts)
        case ast.Subscript():
            return _of_many(node, facts)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            if name in ("Tensor", "BoolTensor"):
                return ValueKind.TENSOR if name == "Tensor" else ValueKind.MASK
            if name in _HOST_TYPES or name.endswith("Array"):
                return ValueKind.HOST
            return name if name in facts.classes else None
    return None


def _of_many(node: ast.Subscript, facts: Facts) -> Type:
    base = ast.unparse(node.value).split(".")[-1]
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    kinds = [annotated(part, facts) for part in parts]
    if base == "NDArray":
        return ValueKind.HOST
    if base in ("Optional", "Annotated", "Final", "ClassVar"):
        return kinds[0]
    if base in _MANY_TYPES:
        if any(kind in (*TENSORS, ValueKind.MANY) for kind in kinds):
            return ValueKind.MANY
        return (
            ValueKind.HOST
            if ValueKind.HOST in kinds and all(kind in (ValueKind.HOST, None) for kind in kinds)
            else None
        )
    return None


class Names:
    """The types of the names of one scope, and of its expressions."""

    def __init__(self, scope: Scope, facts: Facts, outer: Mapping[str, Type]) -> None:
        self.nodes = list(own_nodes(scope))
        self._facts = facts
        self.known: dict[str, Type] = dict(outer)
        if isinstance(scope, Function):
            masks, each = _said_masks(scope), scope.args
            for argument in (*each.posonlyargs, *each.args, *each.kwonlyargs):
                kind = _masked(argument.arg, annotated(argument.annotation, facts), masks)
                if argument.arg != "self":
                    self.known[argument.arg] = kind
        for _ in range(2):  # a loop's end comes before its beginning
            for node in self.nodes:
                self._learn(node)

    def of_self(self) -> Iterator[tuple[str, Type]]:
        """Yields the attributes that a method assigns to ``self``."""
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == "self"
                    ):
                        yield target.attr, _masked(target.attr, self.kind(node.value), set())

    def is_tensor(self, node: ast.expr) -> bool:
        """Returns whether an expression is known to be a tensor."""
        return self.kind(node) in TENSORS

    def _learn(self, node: ast.AST) -> None:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                self._note(name, annotated(node.annotation, self._facts))
            case ast.NamedExpr(target=ast.Name(id=name)):
                self._note(name, self.kind(node.value))
            case ast.Assign():
                for target in node.targets:
                    self._assign(target, node.value)
            case ast.For() | ast.comprehension():
                self._iterate(node.target, node.iter)

    def _note(self, name: str, kind: Type) -> None:
        if kind is not None and self.known.get(name) not in TENSORS:
            self.known[name] = _masked(name, kind, set())

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._note(target.id, self.kind(value))
        elif isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                for each, part in zip(target.elts, value.elts, strict=True):
                    self._assign(each, part)
            else:
                self._note_each(target, element(self.kind(value)))

    def _note_each(self, target: ast.expr, kind: Type) -> None:
        if isinstance(target, ast.Name):
            self._note(target.id, kind)
        elif isinstance(target, ast.Starred):
            self._note_each(target.value, ValueKind.MANY if kind in TENSORS else kind)
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._note_each(each, kind)

    def _iterate(self, target: ast.expr, iterated: ast.expr) -> None:
        match iterated:
            case ast.Call(func=ast.Name(id="zip")) if isinstance(target, ast.Tuple):
                for each, part in zip(target.elts, iterated.args, strict=False):
                    self._note_each(each, element(self.kind(part)))
            case ast.Call(func=ast.Name(id="enumerate")) if isinstance(target, ast.Tuple):
                self._note_each(target.elts[-1], element(self.kind(iterated.args[0])))
            case ast.Call(func=ast.Attribute(attr="items", value=many)) if isinstance(target, ast.Tuple):
                self._note_each(target.elts[-1], element(self.kind(many)))
            case _:
                self._note_each(target, element(self.kind(iterated)))

    def kind(self, node: ast.expr) -> Type:
        """Returns the type of an expression."""
        match node:
            case ast.Name():
                return self.known.get(node.id)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript():
                base = self.kind(node.value)
                if base is ValueKind.MANY and not isinstance(node.slice, ast.Slice):
                    return ValueKind.TENSOR
                return base if isinstance(base, ValueKind) else None
            case ast.Starred() | ast.NamedExpr():
                return self.kind(node.value)
            case ast.UnaryOp():
                return ValueKind.HOST if isinstance(node.op, ast.Not) else self.kind(node.operand)
            case ast.BinOp() | ast.BoolOp() | ast.IfExp() | ast.Compare():
                return self._joined(node)
            case ast.Constant(value=int() | float() | str() | bytes()):
                return ValueKind.HOST
            case ast.Tuple() | ast.List() | ast.Set():
                return self._several(node.elts)
            case ast.ListComp() | ast.GeneratorExp():
                return self._several([node.elt])
            case ast.Call():
                return self._call(node)
        return None

    def _several(self, parts: list[ast.expr]) -> Type:
        kinds = [self.kind(part) for part in parts]
        if any(kind in (*TENSORS, ValueKind.MANY) for kind in kinds):
            return ValueKind.MANY
        return ValueKind.HOST if kinds and all(kind is ValueKind.HOST for kind in kinds) else None

    def _joined(self, node: ast.BinOp | ast.BoolOp | ast.IfExp | ast.Compare) -> Type:
        match node:
            case ast.BinOp():
                parts = [node.left, node.right]
            case ast.BoolOp():
                parts = node.values
            case ast.IfExp():
                parts = [node.body, node.orelse]
            case ast.Compare():
                if any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
                    return ValueKind.HOST
                return ValueKind.MASK if any(map(self.is_tensor, (node.left, *node.comparators))) else None
        kinds = [self.kind(part) for part in parts]
        if any(kind in TENSORS for kind in kinds):
            is_arithmetic = isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
            return ValueKind.MASK if ValueKind.MASK in kinds and not is_arithmetic else ValueKind.TENSOR
        return next((kind for kind in kinds if kind is not None), None) if len(set(kinds)) == 1 else None

    def _attribute(self, node: ast.Attribute) -> Type:
        base = self.kind(node.value)
        if base in TENSORS:
            return base if node.attr in _TENSOR_FIELDS else ValueKind.HOST
        return self._facts.classes[base].get(node.attr) if isinstance(base, str) else None

    def _call(self, call: ast.Call) -> Type:
        function = call.func
        if isinstance(function, ast.Name):
            name = function.id
            if name in ("int", "float", "bool", "len", "range", "str"):
                return ValueKind.HOST
            if name in ("list", "tuple", "sorted", "reversed", "replace", "iter") and call.args:
                return self.kind(call.args[0])
            return name if name in self._facts.classes else self._facts.returns.get(name)
        if not isinstance(function, ast.Attribute):
            return None
        name, root = function.attr, root_of(function)
        if root == "torch":
            return self._torch(call, function)
        if root == "np":
            return ValueKind.HOST
        base = self.kind(function.value)
        if base in TENSORS:
            return ValueKind.HOST if name in _HOST_METHODS else _made(call, name)
        if base is ValueKind.MANY and name in ("values", "pop", "get"):
            return ValueKind.MANY if name == "values" else ValueKind.TENSOR
        return (
            self._facts.classes[base].get(name + "()")
            if isinstance(base, str)
            else ValueKind.HOST
            if base is ValueKind.HOST
            else None
        )

    def _torch(self, call: ast.Call, function: ast.Attribute) -> Type:
        if function.attr == "device" and any(isinstance(arg, ast.Constant) and arg.value == "cpu" for arg in call.args):
            return ValueKind.CPU
        if function.attr in _HOST_CALLS or _HOST_MODULES & set(ast.unparse(function).split(".")):
            return None
        return _made(call, function.attr)


def _made(call: ast.Call, name: str) -> ValueKind:
    """Returns the type that an operation of torch makes of tensors."""
    words = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in _MASK_CALLS or "torch.bool" in (words.get("dtype"), *map(ast.unparse, call.args)):
        return ValueKind.MASK
    if name in _MANY_CALLS or (
        name in ("max", "min", "median", "mode", "cummax", "cummin") and ("dim" in words or call.args)
    ):
        return ValueKind.MANY
    return ValueKind.TENSOR


def element(kind: Type) -> Type:
    """Returns the type of the elements of a value."""
    return (
        ValueKind.TENSOR
        if kind in (ValueKind.MANY, ValueKind.TENSOR)
        else kind
        if isinstance(kind, ValueKind)
        else None
    )


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a scope; of nested scopes, the definitions but not the bodies."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            yield from own_nodes(child)


def root_of(node: ast.expr) -> str:
    """Returns the name at the start of a chain of attributes; empty if there is none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
