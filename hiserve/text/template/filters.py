"""The filters of chat templates: Jinja's without those of unbounded output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
from jinja2.filters import FILTERS as JINJA
from jinja2.runtime import Context

from hiserve.text.template.budget import ENTRY_CHARS, budget_of, check_width, text_of
from hiserve.text.template.comparisons import FILTERS as COMPARING

# The result is no larger than the input.
_BOUNDED = (
    "abs attr count d default first float int items last length list map reject rejectattr reverse select selectattr"
)
# These convert their input to text first; the input may be a list of lists of one long text.
_OF_TEXT = "capitalize e escape forceescape lower safe title trim upper urlencode wordcount"


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
