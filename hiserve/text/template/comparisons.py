"""Comparing, sorting and looking up in templates, paid for in advance.

Lists can contain each other many times over: of sixty lists, each containing the previous one twice, the last takes
as long to compare as 2^60 values. A value contained several times is therefore counted as often as the interpreter
visits it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jinja2
from jinja2.filters import FILTERS as FILTERS_OF_JINJA
from jinja2.runtime import Context, LoopContext
from jinja2.tests import TESTS as _TESTS

from hiserve.text.template.budget import ENTRY_CHARS, RenderBudget, budget_of, text_of

TESTS_OF_JINJA: Mapping[str, Any] = _TESTS
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_COMPARING_TESTS = "in == eq equalto != ne > gt greaterthan ge >= < lt lessthan <= le"
_TEXT_TESTS = "lower upper"
_COMPARING_FILTERS = "dictsort groupby max min sort unique"
_Containers = (list, tuple, dict)


def pay_visits(budget: RenderBudget, value: Any) -> None:
    """Pays for visiting all values within a value.

    Raises:
        RenderBudgetError: There are too many.
    """
    waiting: list[Iterator[Any]] = [iter((value,))]
    while waiting:
        inner = next(waiting[-1], _END)
        if inner is _END:
            waiting.pop()
            continue
        budget.pay(ENTRY_CHARS)
        if isinstance(inner, Mapping):
            waiting += [iter(inner.keys()), iter(inner.values())]
        elif isinstance(inner, Collection) and not isinstance(inner, str | bytes):
            waiting.append(iter(inner))


_END = object()


def pay_comparison(budget: RenderBudget, left: Any, right: Any) -> None:
    """Pays for comparing two values, or for searching the first in the second.

    Raises:
        RenderBudgetError: The values are too large.
        TypeError: A list is searched in an iterator, which can be walked only once.
    """
    if not isinstance(left, _Containers):
        budget.pay(len(right) if isinstance(right, Collection) else 1)
        return
    if isinstance(right, Iterator):
        raise TypeError("a list cannot be looked for among values that are made one by one")
    pay_visits(budget, left)
    pay_visits(budget, right)


def compared(context: Context, left: Any, *further: Any) -> Any:
    """Computes ``left operator right ...``. ``further`` alternates operators and functions for the next operand."""
    result: Any = True
    for name, right_of in zip(further[::2], further[1::2], strict=True):
        right = right_of()
        pay_comparison(budget_of(context), left, right)
        result = OPERATORS[name](left, right)
        if not result:
            return result
        left = right
    return result


def pay_call(budget: RenderBudget, function: Any, arguments: Collection[Any]) -> None:
    """Pays for a call of a list's or dict's method, which compares its arguments or looks them up."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, (*_Containers, LoopContext, type)) or function is dict:
        for argument in arguments:
            pay_visits(budget, argument)
        if isinstance(owner, list | tuple) and any(isinstance(argument, _Containers) for argument in arguments):
            pay_visits(budget, owner)


def check_key(key: Any) -> Any:
    """Returns a dict key that is not a tuple.

    Raises:
        TypeError: It is a tuple; looking it up would visit all values in it.
    """
    if isinstance(key, tuple):
        raise TypeError("a list cannot be a key")
    return key


def _comparing_test(inner: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_context
    def paid(context: Context, value: Any, other: Any) -> Any:
        pay_comparison(budget_of(context), value, other)
        if isinstance(other, _Containers) and not isinstance(value, _Containers):
            pay_comparison(budget_of(context), other, value)
        return inner(value, other)

    return paid


def _text_test(inner: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_context
    def paid(context: Context, value: Any) -> Any:
        return inner(text_of(context, value))

    return paid


def _comparing_filter(inner: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_context
    def paid(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        values = value if isinstance(value, Collection) else list(value)
        for _ in range(1 + len(values).bit_length()):  # sorting compares each value about log2(n) times
            pay_visits(budget_of(context), values)
        needs_environment = getattr(inner, "jinja_pass_arg", None) is not None
        return inner(*([context.environment] if needs_environment else []), values, *args, **kwargs)

    return paid


TESTS: dict[str, Callable[..., Any]] = {
    **TESTS_OF_JINJA,
    **{name: _comparing_test(TESTS_OF_JINJA[name]) for name in _COMPARING_TESTS.split()},
    **{name: _text_test(TESTS_OF_JINJA[name]) for name in _TEXT_TESTS.split()},
}
FILTERS: dict[str, Callable[..., Any]] = {
    name: _comparing_filter(FILTERS_OF_JINJA[name]) for name in _COMPARING_FILTERS.split()
}
