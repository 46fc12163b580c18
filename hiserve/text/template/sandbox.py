"""A Jinja environment that bounds the time and memory of every rendering.

A chat template comes with a model, and its data comes with a request; neither may stop the server.
Jinja's sandbox denies a template access to Python, but bounds neither time nor memory. A thread cannot be
ended from outside, and a trace function would slow every line, so the checks are compiled into the template:
each rendering has a *budget* and pays from it

- at the start of every block (a loop's body, a branch, a macro), for the block's own text;
- for every text or list that an expression makes: by ``~``, ``+``, ``*``, ``%``, a slice, a filter, a call.

Operations that can make a large result from small input (``*``, ``**``, ``replace``, ``join``, padding ...) pay in
advance; filters that cannot are removed. Each payment also checks the clock, and the work between two payments is
proportional to the amount paid. ``template.comparisons`` pays for comparing, sorting and looking up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import FILTERS as JINJA
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from hiserve.text.template.budget import BUDGET, ENTRY_CHARS, RenderBudget, budget_of, check_bits, check_width, text_of
from hiserve.text.template.comparisons import FILTERS as COMPARING
from hiserve.text.template.comparisons import TESTS, check_key, compared, pay_call

# The result is no larger than the input.
_BOUNDED = (
    "abs attr count d default first float int items last length list map reject rejectattr reverse select selectattr"
)
# These convert their input to text first; the input may be a list of lists of one long text.
_OF_TEXT = "capitalize e escape forceescape lower safe title trim upper urlencode wordcount"
BLOCK_CHARS = 8  # cost of a block in addition to its text
_PADDING = {"center", "ljust", "rjust", "zfill"}
_UNBOUNDED = {"expandtabs", "translate", "to_bytes"}
_WIDE_FIELD = re.compile(r"%[^%a-zA-Z]*(\*|\d{4})")
_WIDE_SPEC = re.compile(r"\d{4}")


def _of_text(inner: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_context
    def paid(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget_of(context).pay_text(value)
        return inner(value, *args, **kwargs)

    return paid


@jinja2.pass_context
def _string(context: Context, value: Any) -> str:
    return value if isinstance(value, str) else text_of(context, value)


@jinja2.pass_context
def _join(context: Context, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = context.environment.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    texts = [text_of(context, part) for part in value]
    between = text_of(context, d)
    budget_of(context).pay(len(between) * len(texts))
    return between.join(texts)


@jinja2.pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, before, after = (text_of(context, part) for part in (value, old, new))
    budget_of(context).pay(len(after) * text.count(before))
    return text.replace(before, after, -1 if count is None else count)


@jinja2.pass_context
def _indent(context: Context, value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_width(width)
    num_lines = len(text_of(context, value).splitlines())
    budget_of(context).pay(num_lines * (len(width) if isinstance(width, str) else width))
    indented: str = JINJA["indent"](value, width, first, blank)
    return indented


@jinja2.pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
    # The sandbox's operator bounds the size of its result.
    binop: Callable[..., Any] = context.environment.call_binop  # type: ignore[attr-defined]
    return binop(context, "%", text_of(context, value), kwargs or args)


@jinja2.pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like transformers' filter: Jinja's own ``tojson`` escapes HTML, prompts need the plain form."""
    check_width(indent)
    budget_of(context).pay_text(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_context
def _sum(context: Context, value: Iterable[Any], attribute: Any = None, start: float = 0) -> Any:
    if not isinstance(start, int | float):
        raise TypeError("sum adds numbers")
    numbers = value
    if attribute is not None:
        numbers = context.environment.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    budget_of(context).pay(ENTRY_CHARS)
    return sum(numbers, start)


FILTERS: dict[str, Callable[..., Any]] = {
    **COMPARING,
    **{name: JINJA[name] for name in _BOUNDED.split()},
    **{name: _of_text(JINJA[name]) for name in _OF_TEXT.split()},
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "string": _string,
    "sum": _sum,
    "tojson": _to_json,
}


class _Generator(CodeGenerator):
    """Compiles the payments into a template."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Writes a block; first it pays for its own text, without that of inner blocks."""
        block = list(nodes)
        self.writeline(f"context.parent[{BUDGET!r}].pay({BLOCK_CHARS + _num_chars(block)})")
        super().blockvisit(block, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Writes ``a ~ b``."""
        self.write("environment.joined(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Filter(self, node: nodes.Filter, frame: Frame) -> None:  # noqa: N802
        """Writes ``a | filter``."""
        self.write("environment.paid(context, ")
        super().visit_Filter(node, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """Writes ``a < b <= c``; operands after the first false comparison are not computed."""
        self.write("environment.compared(context, ")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f", {operand.op!r}, lambda: ")
            self.visit(operand.expr, frame)
        self.write(")")

    def visit_Pair(self, node: nodes.Pair, frame: Frame) -> None:  # noqa: N802
        """Writes an entry of a dict."""
        self.write("environment.check_key(")
        self.visit(node.key, frame)
        self.write("): ")
        self.visit(node.value, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Writes ``{a: b}``."""
        self.write("{")
        for pair in node.items:
            self.visit(pair, frame)
            self.write(", ")
        self.write("}")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Writes ``a[b]``; a slice is a copy."""
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.paid(context, " if is_slice else "(")
        super().visit_Getitem(node, frame)
        self.write(")")


def _num_chars(block: Iterable[nodes.Node]) -> int:
    parts = (part for node in block if isinstance(node, nodes.Output) for part in node.nodes)
    return sum(len(part.data) for part in parts if isinstance(part, nodes.TemplateData))


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, with which templates mark the assistant's words for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the nodes inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Form:
    """``text.format`` in templates: only the environment's ``call`` applies it."""

    __slots__ = ("is_map", "text")

    def __init__(self, text: str, *, is_map: bool) -> None:
        self.text = text
        self.is_map = is_map


class _Formatter(SandboxedFormatter):
    """Fills in a format string."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _WIDE_SPEC.search(format_spec):
            raise ValueError(f"the field {format_spec[:20]!r} is too wide")
        return super().format_field(value, format_spec)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Pays for the value of ``{{ value }}``."""
    context.parent[BUDGET].pay_text(value)
    return value


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with budgets; other settings are those of Hugging Face transformers."""

    code_generator_class = _Generator
    compared = staticmethod(compared)
    check_key = staticmethod(check_key)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
            finalize=_finalize,
        )
        self.filters = dict(FILTERS)
        self.tests = dict(TESTS)
        del self.globals["lipsum"]

    def stream(self, template: jinja2.Template, variables: Mapping[str, Any], budget: RenderBudget) -> Iterator[str]:
        """Yields the parts of a rendering.

        Raises:
            RenderBudgetError: The budget is used up. Other errors are the template's.
        """
        return template.generate({**variables, BUDGET: budget})

    def paid(self, context: Context, value: Any) -> Any:
        """Pays for a new value and returns it."""
        if isinstance(value, str):
            budget_of(context).pay(len(value))
        elif isinstance(value, list | tuple | dict):
            budget_of(context).pay(ENTRY_CHARS * len(value))
        elif isinstance(value, GeneratorType):
            return _paid_each(context, value)
        return value

    def joined(self, context: Context, parts: Iterable[Any]) -> str:
        return "".join([text_of(context, part) for part in parts])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes ``left operator right``."""
        if operator == "*":
            _pay_product(context, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            if _WIDE_FIELD.search(left):
                raise ValueError("a field of a format is too wide")
            _pay_fields(context, left, left.count("%"), right)
        return self.paid(context, super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls a function, a macro or a method."""
        if isinstance(__obj, _Form):
            return __self.paid(__context, __self._filled(__context, __obj, args, kwargs))
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        pay_call(budget_of(__context), __obj, [*args, *kwargs.values()])
        if isinstance(owner, str) and name == "replace":
            return __self.call_filter("replace", owner, args, kwargs, __context)
        if isinstance(owner, str) and name == "join":
            return __self.call_filter("join", args[0], (owner,), None, __context)
        if isinstance(owner, str) and name in _PADDING:
            for width in args:
                check_width(width)
        return __self.paid(__context, super().call(__context, __obj, *args, **kwargs))

    def _filled(self, context: Context, form: _Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if form.is_map:
            args, kwargs = (), dict(*args, **kwargs)
        _pay_fields(context, form.text, form.text.count("{"), [*args, *kwargs.values()])
        return _Formatter(self).vformat(form.text, args, kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the replacement of ``text.format`` and ``text.format_map``; None for any other value."""
        owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        if not isinstance(owner, str) or name not in ("format", "format_map"):
            return None
        return _Form(owner, is_map=name == "format_map")  # type: ignore[return-value]

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, check_key(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read an attribute."""
        return attr not in _UNBOUNDED and super().is_safe_attribute(obj, attr, value)

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        context: Context | None = None,
        eval_ctx: EvalContext | None = None,
    ) -> Any:
        """Applies a filter by name, as ``map`` does."""
        assert context is not None, f"filter {name} without a rendering"
        return self.paid(context, super().call_filter(name, value, args, kwargs, context, eval_ctx))

    def call_test(
        self,
        name: str,
        value: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        context: Context | None = None,
        eval_ctx: EvalContext | None = None,
    ) -> Any:
        """Applies a test by name, as ``select`` does."""
        assert context is not None, f"test {name} without a rendering"
        budget_of(context).pay(1)
        return super().call_test(name, value, args, kwargs, context, eval_ctx)


def _paid_each(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        budget_of(context).pay(1)
        yield value


def _pay_product(context: Context, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            each = 1 if isinstance(sequence, str) else ENTRY_CHARS
            budget_of(context).pay(each * len(sequence) * max(times, 0))


def _pay_fields(context: Context, form: str, num_fields: int, values: Any) -> None:
    """Pays for a filled-in format string, as if each field showed all values."""
    budget_of(context).pay(len(form))
    for _ in range(num_fields):
        budget_of(context).pay_text(values)
