"""The grammars of a worker's requests: which wait for theirs, where each row is in its own, and the masks of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import NO_MASK, BatchPlan, Int32Array, MaskPlan
from hiserve.core.usage import GrammarStats
from hiserve.engine.queue import Request
from hiserve.errors import GrammarLimitError, HiserveError, RequestError
from hiserve.grammar.compiler import Compiler
from hiserve.grammar.matcher import MaskFiller, Matcher, Vocabulary

NO_END = -1
Masks = tuple[MaskPlan | None, dict[int, HiserveError]]


class GrammarRows:
    """Matchers of the rows whose requests have a grammar.

    A matcher has seen the tokens that its request knows, and no draft: a row that starts over, here or in another worker,
    gets one made from these tokens.

    Args:
        open_vocabulary: Reads the tokenizer; called in a thread, with the first grammar.
        num_threads: Threads that compute masks.

    Attributes:
        mask_s: Seconds that draws have waited for masks.
    """

    def __init__(self, open_vocabulary: Callable[[], Vocabulary], num_threads: int = 1) -> None:
        self._compiler = Compiler(open_vocabulary)
        self._num_threads = num_threads
        self._filler: MaskFiller | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hiserve-masks")  # starts with the first masks
        self._matchers: dict[int, Matcher] = {}
        self._errors: list[tuple[Request, HiserveError]] = []
        self._num_masks = self._num_refused = 0
        self.mask_s = 0.0

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
        if request.matcher is not None:
            matcher = self._matchers[row] = request.matcher.result().copy()
            matcher.advance(request.tokens[request.num_prompt :].tolist())

    def release(self, row: int) -> None:
        """Forgets the matcher of a row, if it has one."""
        self._matchers.pop(row, None)

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
        ends = np.full(rows.size, NO_END, dtype=np.int32)
        for index, (row, count, emitted) in enumerate(
            zip(rows.tolist(), counts.tolist(), tokens.tolist(), strict=True)
        ):
            matcher = self._matchers.get(row)
            if matcher is not None:
                end = matcher.advance(emitted[:count])
                ends[index] = NO_END if end is None else end
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

        A thread computes them; the caller may plan the next step meanwhile, and shows no matcher a token.

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
        jobs: list[tuple[Matcher, int, list[int]]] = []
        places: list[tuple[int, int]] = []  # of each job: among the rows that sample, and the row
        num_masks = 0
        for index, (row, count) in enumerate(zip(rows, num_draft, strict=True)):
            matcher = self._matchers.get(row)
            if matcher is None:
                continue
            ahead: list[int] = []
            if count:
                of_rows = drafts() if of_rows is None else of_rows
                ahead = matcher.allowed(of_rows[row, :count].tolist())
                self._num_refused += count - len(ahead)
            jobs.append((matcher, num_masks, ahead))
            places.append((index, row))
            num_masks += 1 + len(ahead)
        if not jobs:
            return lambda: (None, {})
        width = 1 + int(plan.num_draft.max())
        entries, masks = lend(len(rows) * width, num_masks)
        for (index, _), (_, first, ahead) in zip(places, jobs, strict=True):
            # After a refused draft no draw counts.
            entries[index * width : index * width + 1 + len(ahead)] = np.arange(first, first + 1 + len(ahead))
            if ahead:
                masks[first + len(ahead)] = -1  # it stays as it is where the drafts end the grammar
        self._num_masks += num_masks
        self._filler = self._filler or MaskFiller(self._num_threads)
        has_begun = threading.Event()
        filling = self._thread.submit(self._fill, has_begun, jobs, masks)
        has_begun.wait()  # else the caller would hold the GIL, which the thread needs until the library computes

        def wait() -> Masks:
            filling.result()
            failed: dict[int, HiserveError] = {}
            for (index, row), (matcher, _, _) in zip(places, jobs, strict=True):
                if matcher.error:
                    entries[index * width : (index + 1) * width] = NO_MASK
                    if self._matchers.get(row) is matcher:  # else its request has left the row
                        message = f"the grammar cannot be followed any further: {matcher.error}. Simplify it."
                        failed[row] = GrammarLimitError(message)
            return MaskPlan(plan.step_id, entries, masks), failed

        return wait

    def _fill(self, has_begun: threading.Event, jobs: list[tuple[Matcher, int, list[int]]], masks: Int32Array) -> None:
        assert self._filler is not None, "masks are computed before there is a pool of threads"
        has_begun.set()
        self._filler.fill(jobs, masks)

    def stats(self) -> GrammarStats:
        """Returns the counts until now."""
        return GrammarStats(self._num_masks, self._num_refused, self.mask_s)

    def close(self) -> None:
        """Ends the threads."""
        self._thread.shutdown()
        self._compiler.close()


def no_vocabulary() -> Vocabulary:
    """Refuses every grammar, where there is no tokenizer.

    Raises:
        RequestError: Always.
    """
    raise RequestError("this engine has no tokenizer, which a grammar needs.", param="grammar")
