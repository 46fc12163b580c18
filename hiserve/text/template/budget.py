"""The budget of one rendering of a chat template: time, and characters that it makes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import jinja2
from jinja2.runtime import Context
from jinja2.utils import Namespace

# Characters that one rendering may make, intermediate ones included.
MAX_WORK_CHARS = 2**27
ENTRY_CHARS = 64  # cost of an entry of a list
MAX_WIDTH = 999  # of a padded field
MAX_INT_BITS = 4096

# The budget is a variable of the rendering, under a name that no template can spell.
BUDGET = " budget"


class RenderBudgetError(jinja2.TemplateRuntimeError):
    """A rendering has used up its budget."""


class RenderBudget:
    """The remaining time and characters of a rendering. Time in which its thread gets no CPU is not counted."""

    __slots__ = ("_cpu_deadline", "_deadline", "_left", "_seconds")

    def __init__(self, seconds: float, chars: int = MAX_WORK_CHARS) -> None:
        self._seconds = seconds
        self._deadline, self._cpu_deadline = time.monotonic() + seconds, time.thread_time() + seconds
        self._left = chars

    def pay(self, chars: int) -> None:
        """Subtracts an amount.

        Raises:
            RenderBudgetError: The characters or the time are used up.
        """
        self._left -= chars
        if self._left < 0:
            raise RenderBudgetError("it makes too much text on the way")
        # In this order: the clock of the thread is read by a system call.
        if time.monotonic() > self._deadline and time.thread_time() > self._cpu_deadline:
            raise RenderBudgetError(f"it takes longer than {self._seconds:g} s")

    def pay_text(self, value: Any) -> None:
        """Pays for the text of a value before it is made; a value contained several times is paid for each time.

        Raises:
            RenderBudgetError: As ``pay``.
            TypeError: The value is a namespace, which may contain itself.
        """
        if isinstance(value, str):
            self.pay(len(value))
            return
        waiting = [value]
        while waiting:
            inner = waiting.pop()
            self.pay(ENTRY_CHARS)
            if isinstance(inner, str):
                self.pay(8 * len(inner))  # quoted and escaped
            elif isinstance(inner, Mapping):
                waiting += [*inner.keys(), *inner.values()]
            elif isinstance(inner, Collection):
                self.pay(ENTRY_CHARS * len(inner))
                waiting += inner
            elif isinstance(inner, Namespace):
                raise TypeError("a namespace has no text")


def budget_of(context: Context) -> RenderBudget:
    budget: RenderBudget = context.parent[BUDGET]
    return budget


def text_of(context: Context, value: Any) -> str:
    """Pays for the text of a value and returns it."""
    budget_of(context).pay_text(value)
    return str(value)


def check_width(width: Any) -> None:
    """Refuses a padding that would make a long text from a short one.

    Raises:
        ValueError: The width is a number above ``MAX_WIDTH``.
    """
    if isinstance(width, int) and width > MAX_WIDTH:
        raise ValueError(f"a width of {width} is more than {MAX_WIDTH}")


def check_bits(num_bits: int) -> None:
    """Refuses numbers that take long to compute with.

    Raises:
        ValueError: There are more than ``MAX_INT_BITS`` bits.
    """
    if num_bits > MAX_INT_BITS:
        raise ValueError(f"a number has more than {MAX_INT_BITS} bits")
