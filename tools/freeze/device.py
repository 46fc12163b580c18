"""An executor of a real engine whose steps and copies end when a virtual clock says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tools.freeze import names
from tools.freeze.clock import VirtualClock
from tools.freeze.names import value

POLL_S = 0.00002  # planning takes at least this long
ANSWER_S = 0.001  # of a lookup
COPY_S, PAGE_S = 0.0004, 0.0002
FAILING = 3  # of the copies of a kind that fails, those whose number it divides
REAL_WAIT_S = 0.01  # while a thread carries a copy out
MAX_POLLS = 12_000  # of these: two minutes
READY_S = 120.0  # for the memory of the host tier, and for each order to the store


@dataclass(frozen=True)
class Weather:
    """What goes wrong, and how fast the device is."""

    failing: tuple[str, ...] = ()  # words of ``names.KINDS``: of copies of these kinds some are said to have failed
    faults: tuple[int, ...] = ()  # steps that are given up as if memory had run out
    deferrals: tuple[int, ...] = ()  # steps that are deferred
    step_s: float = 0.001  # of a step, besides its tokens
    token_s: float = 0.0001  # of each token


class VirtualDevice:
    """Executes each plan at once, and returns its result later.

    The engine's own executor does all the work: the device waits for its threads, so that they never race with planning.
    The host tier is ready before the first step, and the store carries out its orders one by one.

    Args:
        executor: The engine's own.
        clock: Advanced by each wait for a step or a copy.
        weather: What goes wrong.
        log: Is given each plan, and each result when it is taken in.
    """

    def __init__(self, executor: Any, clock: VirtualClock, weather: Weather, log: Callable[[str, Any], None]) -> None:
        self._executor = executor
        self._clock = clock
        self._weather = weather
        self._log = log
        self._busy_until_s = 0.0
        self._link_until_s: Counter[str] = Counter()
        self._open: dict[int, tuple[str, float, float]] = {}  # copies: kind, when it ends, how long it takes
        self._asked: dict[int, float] = {}  # lookups: when they are answered
        self._acks: list[tuple[float, int, Any]] = []
        self._found: list[tuple[float, int, Any]] = []
        names.wait_for_host(executor, READY_S)
        names.wait_for_store(executor, READY_S)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the executor's own."""
        return getattr(self._executor, name)

    def submit(self, plan: Any) -> Future[Any]:
        """Runs a step; the time when it ends comes with its result."""
        self._log("plan", plan)
        result = self._spoiled(plan, self._executor.submit(plan).result())
        num_tokens = int(value(plan, names.PLAN, "new").sum())
        took_s = self._weather.step_s + num_tokens * self._weather.token_s if num_tokens else 0.0
        self._busy_until_s = end_s = max(self._busy_until_s, self._clock.now_s) + took_s
        for copy in value(plan, names.PLAN, "copies"):
            kind = names.KINDS[value(copy, names.COPY, "kind")]
            begin_s = max(self._link_until_s[kind], end_s if kind == "offload" else self._clock.now_s)
            copy_s = COPY_S + PAGE_S * value(copy, names.COPY, "host").size
            self._link_until_s[kind] = begin_s + copy_s
            self._open[value(copy, names.COPY, "number")] = kind, begin_s + copy_s, copy_s
        for lookup in value(plan, names.PLAN, "lookups"):
            self._asked[value(lookup, names.LOOKUP, "request")] = self._clock.now_s + ANSWER_S
        return _Later(result, lambda: self._ended(end_s, result))

    def take_acks(self, wait_s: float = 0.0) -> list[Any]:
        """Returns the copies that have ended by the clock, which moves on if there is time to wait."""
        self._gather()
        self._clock.now_s += POLL_S
        if wait_s and not self._is_due():
            times = [each[0] for each in (*self._acks, *self._found)]
            until_s = self._clock.now_s + wait_s
            self._clock.advance_to(min([until_s, *times]))
        due = [each for each in self._acks if each[0] <= self._clock.now_s]
        self._acks = self._acks[len(due) :]
        return [ack for _, _, ack in due]

    def take_found(self) -> list[tuple[int, Any]]:
        """Returns the lookups that are answered by the clock."""
        self._gather()
        due = [each for each in self._found if each[0] <= self._clock.now_s]
        self._found = self._found[len(due) :]
        return [(uid, answer) for _, uid, answer in due]

    def _is_due(self) -> bool:
        return any(each[0] <= self._clock.now_s for each in (*self._acks, *self._found))

    def _gather(self) -> None:
        """Waits until the executor's threads have carried out all that was ordered."""
        for attempt in range(MAX_POLLS):
            self._acks += map(self._told, self._executor.take_acks(REAL_WAIT_S if attempt else 0.0))
            self._found += [(self._asked.pop(uid), uid, answer) for uid, answer in self._executor.take_found()]
            if not self._open and not self._asked:
                break
        else:
            raise AssertionError(f"copies {sorted(self._open)} or lookups {sorted(self._asked)} are not answered")
        self._acks.sort(key=lambda each: each[:2])
        self._found.sort()

    def _told(self, ack: Any) -> tuple[float, int, Any]:
        """Returns when a copy ends by the clock, its number, and how it ends."""
        number = value(ack, names.ACK, "number")
        kind, end_s, took_s = self._open.pop(number)
        ack = names.changed(ack, names.ACK, seconds=took_s)
        if kind in self._weather.failing and number % FAILING == 0:
            ack = names.changed(ack, names.ACK, reason="broken", bytes=0)
        return end_s, number, ack

    def _spoiled(self, plan: Any, result: Any) -> Any:
        step, num_rows = value(plan, names.PLAN, "step"), value(plan, names.PLAN, "rows").size
        if not num_rows:
            return result
        nothing = {
            "counts": value(result, names.RESULT, "counts")[:0],
            "tokens": value(result, names.RESULT, "tokens")[:0],
        }
        if step in self._weather.faults:
            return names.changed(
                result, names.RESULT, **nothing, scores=None, prompt_scores=None, fault=names.out_of_memory()
            )
        if step in self._weather.deferrals:
            return names.changed(result, names.RESULT, **nothing, scores=None, prompt_scores=None, deferred="weather")
        return result

    def _ended(self, end_s: float, result: Any) -> None:
        self._clock.advance_to(end_s)
        self._log("result", result)


class _Later(Future[Any]):
    """A result that is there, and moves the clock when it is taken."""

    def __init__(self, result: Any, taken: Callable[[], None]) -> None:
        super().__init__()
        self._taken = taken
        self.set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        """Returns it."""
        self._taken()
        return super().result(timeout)
