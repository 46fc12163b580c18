"""Tries grammars out in a process that may die of them, before an engine sees them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from hiserve.core.request import LENIENT, Grammar, GrammarKind
from hiserve.errors import HiserveError, OverloadedError, RequestError, UnavailableError
from hiserve.ipc.child import JobProcess
from hiserve.text.helpers.fair_threads import FairSemaphore

COMMAND = (sys.executable, "-m", "hiserve.grammar.vet_process")
TOO_COMPLEX = "grammar_too_complex"
MAX_VERDICTS = 4096
TRIAL_S = 0.01  # of a grammar that is sound
# A caller whose grammars ended this many processes within this time waits before its next new one.
MAX_KILLS, KILL_S = 2, 60.0
MAX_CALLERS = 4096


class Setup(msgspec.Struct, frozen=True):
    """First message to the process: the model's folder, vocabulary and end tokens."""

    folder: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Trial(msgspec.Struct, frozen=True):
    """Job: a grammar.

    Attributes:
        grammar: The grammar.
        may_relax: Of a JSON schema, keywords that no mask can hold may be left out.
        mark: A text to which any reply may come, and after which replies are to be tried too.
    """

    grammar: Grammar
    may_relax: bool
    mark: str = ""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer: the kind to compile the grammar as, with warnings; or the code and the reason of its refusal."""

    code: str = ""
    reason: str = ""
    kind: GrammarKind = "json"
    warnings: list[str] = []


class Vetting:
    """Gives verdicts on grammars, and keeps them. Used in one event loop; callers take turns.

    Args:
        folder: The model's, with its tokenizer.
        vocab_size: Of the model.
        eos_token_ids: Its end tokens.
        max_waiting: Requests that may wait for a verdict, half of them one caller's, and as many grammars.
        clock: Monotonic seconds.

    Attributes:
        trials: Grammars that were tried, by outcome: accepted, refused, or killed with the process.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_waiting: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        setup = Setup(str(folder), vocab_size, tuple(token for token in eos_token_ids if token < vocab_size))
        self._process = JobProcess(COMMAND, msgspec.msgpack.encode(setup))
        self._max_waiting = max_waiting
        self._waiting: Counter[int] = Counter()  # requests, by caller
        self._trials: Counter[int] = Counter()  # by caller; also those for which no request waits any more
        self._clock = clock
        self._turn = FairSemaphore(1)
        self._verdicts: OrderedDict[tuple[bytes, bool], asyncio.Task[Verdict]] = OrderedDict()
        self._kills: OrderedDict[int, deque[float]] = OrderedDict()  # times, by caller
        self.trials = {"accepted": 0, "refused": 0, "killed": 0}

    async def check(
        self, grammar: Grammar, param: str, *, may_relax: bool = False, mark: str = "", caller: int = 0
    ) -> tuple[Grammar, list[str]]:
        """Returns the grammar as an engine may compile it, and what it does not hold of it.

        Args:
            grammar: Within the bounds of ``grammar.bounds``.
            param: The field that it came in.
            may_relax: Of a JSON schema, leave out what no mask can hold.
            mark: As of ``Trial``.
            caller: Who asks.

        Raises:
            RequestError: It is not a grammar, nothing satisfies it, or it takes too much time, stack or memory.
            OverloadedError: Grammars of this caller have just ended several processes, or too many requests wait.
            UnavailableError: The process cannot be started.
        """
        key = grammar.digest, may_relax and grammar.kind in LENIENT
        trying = self._verdicts.get(key)
        is_new = trying is None or (trying.done() and (trying.cancelled() or trying.exception()))
        if trying is None or is_new or not trying.done():
            self._check_room(caller)
        if trying is None or is_new:
            self._check_caller(caller, param)
            trying = self._verdicts[key] = asyncio.create_task(self._try(Trial(grammar, key[1], mark), caller))
            self._trials[caller] += 1
            trying.add_done_callback(partial(self._ended, caller))
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        self._waiting[caller] += 1
        try:
            verdict = await asyncio.shield(trying)
        finally:
            _count_down(self._waiting, caller)
        if verdict.code:
            raise RequestError(
                f"{param} cannot be used as a grammar: {verdict.reason}.", code=verdict.code, param=param
            )
        return grammar.as_kind(verdict.kind), verdict.warnings

    async def close(self) -> None:
        """Ends the process."""
        await self._process.end()

    async def _try(self, trial: Trial, caller: int) -> Verdict:
        await self._turn.enter(caller)
        try:
            self._check_caller(caller, None)  # those that waited with this one may have ended processes meanwhile
            try:
                answer = await self._process.do([msgspec.msgpack.encode(trial)])
            except HiserveError as error:
                raise UnavailableError(f"a process to try grammars cannot be started: {error}") from None
            if answer is not None:
                verdict = msgspec.msgpack.decode(answer[0], type=Verdict)
                self.trials["refused" if verdict.code else "accepted"] += 1
                return verdict
            self.trials["killed"] += 1
            self._kills.setdefault(caller, deque(maxlen=MAX_KILLS)).append(self._clock())
            if len(self._kills) > MAX_CALLERS:
                self._kills.popitem(last=False)
            return Verdict(TOO_COMPLEX, "it takes too much time or memory. Simplify it")
        finally:
            self._turn.leave()

    def _ended(self, caller: int, trying: asyncio.Task[Verdict]) -> None:
        _count_down(self._trials, caller)
        if not trying.cancelled():
            trying.exception()  # a request that was cancelled does not read it

    def _check_room(self, caller: int) -> None:
        num_waiting = max(self._waiting.total(), self._trials.total())
        own = max(self._waiting[caller], self._trials[caller])
        if num_waiting >= self._max_waiting or own >= -(-self._max_waiting // 2):
            raise OverloadedError(
                f"{num_waiting} requests wait for their grammars to be tried, {own} of this caller; the limit is "
                f"{self._max_waiting}, half of it for one caller. Try again later.",
                retry_after_s=1 + int(num_waiting * TRIAL_S),
            )

    def _check_caller(self, caller: int, param: str | None) -> None:
        kills = self._kills.get(caller)
        if kills is None or len(kills) < MAX_KILLS:
            return
        wait_s = kills[0] + KILL_S - self._clock()
        if wait_s > 0:
            raise OverloadedError(
                f"{MAX_KILLS} grammars of this caller took too much time or memory. Wait before sending a new one.",
                param=param,
                retry_after_s=int(wait_s) + 1,
            )


def _count_down(counts: Counter[int], caller: int) -> None:
    counts[caller] -= 1
    if not counts[caller]:
        del counts[caller]
