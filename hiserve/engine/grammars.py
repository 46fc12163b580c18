"""The grammars of a worker's requests: which wait for theirs, where each row is in its own, and the masks of a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hiserve.core.plan import BatchPlan, Int32Array, MaskPlan
from hiserve.engine.queue import Request
from hiserve.errors import GrammarLimitError, HiserveError, RequestError
from hiserve.grammar.compiler import Compiler
from hiserve.grammar.matcher import WORD_BITS, MaskFiller, Matcher, Vocabulary

NO_END = -1
FREE = -1  # no mask


class GrammarRows:
    """Matchers of the rows whose requests have a grammar.

    A matcher has seen the tokens that its request knows, and no draft: a row that starts over, here or in another worker,
    gets one made from these tokens.

    Args:
        open_vocabulary: Reads the tokenizer; called in a thread, with the first grammar.
        vocab_size: Of the model.
        num_threads: Threads that compute masks.

    Attributes:
        num_masks: Masks that were computed.
        num_refused: Steps of a row in which its grammar refused a draft.
    """

    def __init__(self, open_vocabulary: Callable[[], Vocabulary], vocab_size: int, num_threads: int = 1) -> None:
        self._compiler = Compiler(open_vocabulary)
        self._num_words = -(-vocab_size // WORD_BITS)
        self._num_threads = num_threads
        self._filler: MaskFiller | None = None
        self._matchers: dict[int, Matcher] = {}
        self._errors: list[tuple[Request, HiserveError]] = []
        self.num_masks = self.num_refused = 0

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
        for index, row in enumerate(rows.tolist()):
            matcher = self._matchers.get(row)
            if matcher is not None:
                end = matcher.advance(tokens[index, : counts[index]].tolist())
                ends[index] = NO_END if end is None else end
        return ends

    def drafted_rows(self, plan: BatchPlan) -> Int32Array:
        """Returns the rows of a plan whose masks depend on drafts, int32 ``[n]``."""
        drafted = plan.rows[plan.num_draft > 0]
        return drafted[np.isin(drafted, list(self._matchers))]

    def masks(self, plan: BatchPlan, drafts: dict[int, list[int]]) -> tuple[MaskPlan | None, dict[int, HiserveError]]:
        """Computes the masks of a step: of each place that its rows draw at, after the drafts before it.

        Args:
            plan: No step is in flight that may change a row with a grammar.
            drafts: Of each of ``drafted_rows``, at least as many as the plan verifies.

        Returns:
            The masks, None where no row needs one; and the rows whose matcher has failed: they are free in this step, and
            their requests must end.
        """
        rows, num_draft = plan.rows[plan.samples].tolist(), plan.num_draft[plan.samples]
        if not any(row in self._matchers for row in rows):
            return None, {}
        width = 1 + int(plan.num_draft.max())
        entries = np.full((len(rows), width), FREE, dtype=np.int32)
        jobs: list[tuple[Matcher, int, list[int]]] = []
        num_masks = 0
        for index, (row, count) in enumerate(zip(rows, num_draft.tolist(), strict=True)):
            matcher = self._matchers.get(row)
            if matcher is not None:
                jobs.append((matcher, num_masks, drafts[row][:count] if count else []))
                entries[index, : count + 1] = np.arange(num_masks, num_masks + count + 1)
                num_masks += count + 1
        masks = np.full((num_masks, self._num_words), -1, dtype=np.int32)
        self._filler = self._filler or MaskFiller(self._num_threads)
        self._filler.fill(jobs, masks)
        failed: dict[int, HiserveError] = {}
        for index, row in enumerate(rows):
            matcher = self._matchers.get(row)
            if matcher is not None and matcher.error:
                message = f"the grammar cannot be followed any further: {matcher.error}. Simplify it."
                failed[row] = GrammarLimitError(message)
                entries[index] = FREE
        self.num_masks += num_masks
        # Masks after a refused draft stay free: no draw uses them.
        self.num_refused += sum(bool((masks[first + len(ahead)] == -1).all()) for _, first, ahead in jobs if ahead)
        return MaskPlan(plan.step_id, entries.reshape(-1), masks), failed

    def close(self) -> None:
        """Ends the threads."""
        self._compiler.close()


def no_vocabulary() -> Vocabulary:
    """Refuses every grammar, where there is no tokenizer.

    Raises:
        RequestError: Always.
    """
    raise RequestError("this engine has no tokenizer, which a grammar needs.", param="grammar")
