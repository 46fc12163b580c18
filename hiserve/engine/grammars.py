"""The grammars of a worker's requests: which wait for theirs, where each row is in its own, and the masks of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import NO_MASK, BatchPlan, Int32Array, MaskPlan
from hiserve.core.request import Grammar
from hiserve.core.usage import GrammarStats
from hiserve.engine.queue import Request
from hiserve.errors import GrammarLimitError, HiserveError, RequestError
from hiserve.grammar.compiler import Compiler
from hiserve.grammar.matcher import Matcher, MatcherThreads, Vocabulary

NO_END = -1
# A matcher that replaces another sees the row's tokens again, each some 7 us, and its copy takes as long as one: of a row at
# most, and of a step, the last row aside.
MAX_MOVED, MAX_SHOWN_AGAIN = 256, 128
Job = tuple[Matcher, int, list[int]]  # with the index of its first mask, and its drafts
Masks = tuple[MaskPlan | None, dict[int, HiserveError]]


class _Sources:
    """The compiled matchers of one grammar that rows have copies of.

    Args:
        grammar: The grammar.
        first: Its first one, which is compiled.
    """

    def __init__(self, grammar: Grammar, first: Future[Matcher]) -> None:
        self.grammar = grammar
        self.compiling = [first]
        self.num_rows = [0]

    @property
    def ready(self) -> list[int]:
        """The numbers of those that are compiled, one that fewest rows have a copy of first."""
        ready = [number for number, each in enumerate(self.compiling) if each.done() and not each.exception()]
        return sorted(ready, key=self.num_rows.__getitem__)

    @property
    def is_even(self) -> bool:
        """Whether no row should move to another one."""
        counts = [self.num_rows[number] for number in self.ready]
        return max(counts) - min(counts) < 2

    def add(self, another: Future[Matcher]) -> None:
        """Adds one, which may still be compiled."""
        self.compiling.append(another)
        self.num_rows.append(0)


class GrammarCopies:
    """Gives rows copies of compiled grammars: copies of one compute their masks one after another.

    A grammar of several rows is compiled up to once for each of them, and for each thread, behind the requests, of which none
    waits for it. Then rows move, so that each compiled one has as many.

    Args:
        compiler: Compiles grammars.
        num_threads: Threads that compute masks.
    """

    def __init__(self, compiler: Compiler, num_threads: int) -> None:
        self._compiler = compiler
        self._num_threads = num_threads
        self._sources: dict[bytes, _Sources] = {}  # by digest, of the grammars of rows
        self._source_of: dict[int, tuple[bytes, int]] = {}  # by row
        self._shared: set[bytes] = set()  # digests of grammars that may be compiled again, or whose rows may move

    def take(self, row: int, grammar: Grammar, compiled: Future[Matcher]) -> Matcher:
        """Returns a copy for a row, before its first token.

        Args:
            row: Without a grammar.
            grammar: Its grammar.
            compiled: Of the grammar.
        """
        sources = self._sources.get(grammar.digest)
        if sources is None:
            sources = self._sources[grammar.digest] = _Sources(grammar, compiled)
        else:
            self._shared.add(grammar.digest)
        return self._take(row, sources, sources.ready[0])

    def release(self, row: int) -> None:
        """Forgets the copy of a row."""
        digest, number = self._source_of.pop(row)
        sources = self._sources[digest]
        sources.num_rows[number] -= 1
        if not any(sources.num_rows):
            del self._sources[digest]
            self._shared.discard(digest)
        elif len(sources.compiling) > 1:
            self._shared.add(digest)

    def spread(self, may_move: Callable[[int], bool]) -> Iterator[tuple[int, Matcher]]:
        """Compiles shared grammars again, and yields the rows that move, each with its new copy, before its first token.

        A caller that stops asks again later for the others.

        Args:
            may_move: Whether a row may; one that may not never may.
        """
        for digest in list(self._shared):
            sources = self._sources[digest]
            self._compile_again(sources)
            while not sources.is_even:
                fewest, *_, most = sources.ready
                rows = (row for row, source in self._source_of.items() if source == (digest, most) and may_move(row))
                row = next(rows, None)
                if row is None:
                    break
                sources.num_rows[most] -= 1
                yield row, self._take(row, sources, fewest)
            if len(sources.compiling) >= self._num_wanted(sources) and all(each.done() for each in sources.compiling):
                self._shared.discard(digest)

    def _take(self, row: int, sources: _Sources, number: int) -> Matcher:
        sources.num_rows[number] += 1
        self._source_of[row] = sources.grammar.digest, number
        return sources.compiling[number].result().copy()

    def _num_wanted(self, sources: _Sources) -> int:
        return min(self._num_threads, sum(sources.num_rows))

    def _compile_again(self, sources: _Sources) -> None:
        number = len(sources.compiling)
        if number < self._num_wanted(sources):
            another = self._compiler.compile_again(sources.compiling[0].result(), sources.grammar, number)
            if another is not None:
                sources.add(another)


class GrammarRows:
    """Matchers of the rows whose requests have a grammar.

    A matcher has seen the tokens that its request knows, and no draft: a row that starts over, here or in another worker,
    gets one made from these tokens.

    Args:
        open_vocabulary: Reads the tokenizer; called in a thread, with the first grammar.
        num_threads: Threads that advance matchers and compute masks.

    Attributes:
        mask_s: Seconds that draws have waited for masks.
    """

    def __init__(self, open_vocabulary: Callable[[], Vocabulary], num_threads: int = 1) -> None:
        self._compiler = Compiler(open_vocabulary)
        self._num_threads = num_threads
        self._copies = GrammarCopies(self._compiler, num_threads)
        self._started: MatcherThreads | None = None
        self._fillers = ThreadPoolExecutor(2, thread_name_prefix="hiserve-masks")  # start with the first masks
        self._matchers: dict[int, Matcher] = {}
        self._errors: list[tuple[Request, HiserveError]] = []
        self._misled: set[int] = set()  # rows whose reply so far is none that their grammar lets go on
        self._num_masks = self._num_refused = 0
        self.mask_s = 0.0

    @property
    def _threads(self) -> MatcherThreads:
        """The threads, started with the first row that has a grammar."""
        self._started = self._started or MatcherThreads(self._num_threads)
        return self._started

    @property
    def is_used(self) -> bool:
        """Whether any row has a grammar."""
        return bool(self._matchers)

    def is_awaited(self, request: Request) -> bool:
        """Whether a waiting request must wait for its grammar; one without any need not. A failure is in ``take_errors``."""
        if request.sampling.grammar is None:
            return False
        if request.matcher is None:
            request.matcher = self._compiler.compile(request.sampling.grammar)
        if not request.matcher.done():
            return True
        error = request.matcher.exception()
        if isinstance(error, HiserveError):
            self._errors.append((request, error))
            return True
        if error is not None:
            raise error
        return False

    def take_errors(self) -> list[tuple[Request, HiserveError]]:
        """Returns the waiting requests whose grammar cannot be compiled, once."""
        errors, self._errors = self._errors, []
        return errors

    def admit(self, row: int, request: Request) -> None:
        """Gives a row the matcher of its request, which must not be awaited; it has seen the tokens after the prompt."""
        grammar = request.sampling.grammar
        if request.matcher is None or grammar is None:
            return
        matcher = self._matchers[row] = self._copies.take(row, grammar, request.matcher)
        end = matcher.advance(request.tokens[request.num_prompt :].tolist())
        if end is not None or matcher.error:
            self._misled.add(row)

    def release(self, row: int) -> None:
        """Forgets the matcher of a row, if it has one."""
        if self._matchers.pop(row, None) is not None:
            self._copies.release(row)
            self._misled.discard(row)

    def spread(self, reply: Callable[[int], Int32Array]) -> None:
        """Moves rows that share a compiled grammar to others of the same grammar that are ready, some rows at a time.

        The masks of no step may be being computed.

        Args:
            reply: Returns the tokens that the matcher of a row has seen, int32 ``[n]``.
        """
        num_shown = 0
        for row, matcher in self._copies.spread(lambda row: reply(row).size <= MAX_MOVED):
            tokens = reply(row)
            matcher.advance(tokens.tolist())
            self._matchers[row] = matcher
            num_shown += 1 + tokens.size
            if num_shown >= MAX_SHOWN_AGAIN:
                break

    def advance(self, rows: NDArray[np.int64], counts: Int32Array, tokens: Int32Array) -> Int32Array | None:
        """Shows matchers the tokens of their rows.

        Args:
            rows: int64 ``[S]``.
            counts: int32 ``[S]``. Tokens of each, all accepted.
            tokens: int32 ``[S, w]``.

        Returns:
            int32 ``[S]``: the index of the token that ends the row's grammar, ``NO_END`` where it goes on; None without
            any grammar.
        """
        if not self._matchers:
            return None
        each = zip(rows.tolist(), counts.tolist(), tokens.tolist(), strict=True)
        shown = [
            (index, self._matchers[row], emitted[:count])
            for index, (row, count, emitted) in enumerate(each)
            if row in self._matchers
        ]
        found = self._threads.advance([(matcher, emitted) for _, matcher, emitted in shown])
        ends = np.full(rows.size, NO_END, dtype=np.int32)
        for (index, _, _), end in zip(shown, found, strict=True):
            if end is not None:
                ends[index] = end
        return ends

    def constrain_any(self, rows: NDArray[np.int64]) -> bool:
        """Whether any of these rows has a grammar."""
        return not self._matchers.keys().isdisjoint(rows.tolist())

    def masks(
        self,
        plan: BatchPlan,
        drafts: Callable[[], Int32Array],
        lend: Callable[[int, int], tuple[Int32Array, Int32Array]],
    ) -> Callable[[], Masks]:
        """Starts to compute the masks of a step: of each place that its rows draw at, after the drafts before it.

        Threads compute them; the caller may plan the next step meanwhile, and shows no matcher a token.

        Args:
            plan: No step before it is in flight that may change a row with a grammar.
            drafts: Returns the drafts of every row; called if some row with a grammar verifies drafts.
            lend: Returns the arrays of so many entries and masks.

        Returns:
            A function that waits for the masks. It returns them, None where no row needs one, and the rows whose matcher has
            failed: they are free in this step, and their requests must end.
        """
        rows, num_draft = plan.rows[plan.samples].tolist(), plan.num_draft[plan.samples].tolist()
        of_rows: Int32Array | None = None
        jobs: list[Job] = []
        places: list[tuple[int, int]] = []  # of each job: its first entry, and the row
        width = 1 + int(plan.num_draft.max(initial=0))
        masked: list[int] = []  # entries that have the masks 0, 1, …
        for index, (row, count) in enumerate(zip(rows, num_draft, strict=True)):
            matcher = self._matchers.get(row)
            if matcher is None:
                continue
            ahead: list[int] = []
            if count:
                of_rows = drafts() if of_rows is None else of_rows
                ahead = matcher.allowed(of_rows[row, :count].tolist())
                self._num_refused += count - len(ahead)
            jobs.append((matcher, len(masked), ahead))
            places.append((index * width, row))
            masked.extend(range(index * width, index * width + 1 + len(ahead)))  # after a refused draft no draw counts
        if not jobs:
            return lambda: (None, {})
        entries, masks = lend(len(rows) * width, len(masked))
        entries[masked] = np.arange(len(masked), dtype=np.int32)
        for _, first, ahead in jobs:
            if ahead:
                masks[first + len(ahead)] = -1  # it stays as it is where the drafts end the grammar
        self._num_masks += len(masked)
        fillings = self._start_filling(jobs, masks)

        def wait() -> Masks:
            for filling in fillings:
                filling.result()
            failed: dict[int, HiserveError] = {}
            for (begin, row), (matcher, _, _) in zip(places, jobs, strict=True):
                if matcher.error:
                    entries[begin : begin + width] = NO_MASK
                if self._matchers.get(row) is matcher and (
                    error := self._error_of(row)
                ):  # else its request has left the row
                    failed[row] = error
            return MaskPlan(plan.step_id, entries, masks), failed

        return wait

    def _error_of(self, row: int) -> HiserveError | None:
        """Returns why the request of a row with a grammar cannot go on; None if it can."""
        why = self._matchers[row].error
        if row in self._misled:
            why = f": {why}" if why else ", which ends before their last one"
            return RequestError(
                f"the tokens of the reply so far (resume_token_ids) do not fit its grammar{why}. Give the tokens and the "
                "grammar of one reply."
            )
        return GrammarLimitError(f"the grammar cannot be followed any further: {why}. Simplify it.") if why else None

    def _start_filling(self, jobs: list[Job], masks: Int32Array) -> list[Future[None]]:
        """Starts the masks of the rows with drafts and of those without, which the library computes in calls of their own, at once."""
        groups = [[job for job in jobs if job[2]], [job for job in jobs if not job[2]]]
        threads, begun = self._threads, list[threading.Event]()
        fillings = []
        for group in filter(None, groups):
            begun.append(threading.Event())
            fillings.append(self._fillers.submit(_fill, threads, begun[-1], group, masks))
        for has_begun in begun:
            has_begun.wait()  # else the caller would hold the GIL, which the threads need until the library computes
        return fillings

    def stats(self) -> GrammarStats:
        """Returns the counts until now."""
        return GrammarStats(self._num_masks, self._num_refused, self.mask_s)

    def close(self) -> None:
        """Ends the threads."""
        self._fillers.shutdown()
        self._compiler.close()


def _fill(threads: MatcherThreads, has_begun: threading.Event, jobs: list[Job], masks: Int32Array) -> None:
    has_begun.set()
    threads.fill(jobs, masks)


def no_vocabulary() -> Vocabulary:
    """Refuses every grammar, where there is no tokenizer.

    Raises:
        RequestError: Always.
    """
    raise RequestError("this engine has no tokenizer, which a grammar needs.", param="grammar")
