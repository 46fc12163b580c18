"""A worker's grammars: compiled in a thread, and kept for the requests that come with the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from hiserve.core.request import Grammar
from hiserve.grammar.matcher import Matcher, Vocabulary

MAX_GRAMMARS = 256
MAX_AGAIN_S = 0.02  # CPU time of a grammar that may be compiled again while no request waits for it
STACK_BYTES = 8 * 2**20  # eight times that of ``grammar.vet_process``, whose verdict is for less


class Compiler:
    """Compiles one grammar at a time, without holding the caller up.

    Args:
        open_vocabulary: Reads the tokenizer, at the first grammar, in the thread.
    """

    def __init__(self, open_vocabulary: Callable[[], Vocabulary]) -> None:
        self._open = open_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[tuple[bytes, int], Future[Matcher]] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def compile(self, grammar: Grammar, number: int = 0) -> Future[Matcher]:
        """Returns the future matcher of a grammar, before its first token. Requests share it: each needs a ``copy``.

        The caller keeps the future: after ``MAX_GRAMMARS`` others a grammar is compiled again. The future fails with a
        HiserveError if the grammar cannot be compiled, or there is no tokenizer.

        Args:
            grammar: The grammar.
            number: Tells several matchers of one grammar apart, of which none is a copy of another.
        """
        key = grammar.digest, number
        compiling = self._compiled.get(key)
        if compiling is None:
            compiling = self._compiled[key] = self._start().submit(self._compile, grammar)
            if len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return compiling

    def compile_again(self, matcher: Matcher, grammar: Grammar, number: int) -> Future[Matcher] | None:
        """As ``compile``, of a grammar that has a matcher; None where this could hold up a grammar that has none.

        Args:
            matcher: Of the grammar.
            grammar: The grammar.
            number: Above 0.
        """
        if matcher.source.compile_s <= MAX_AGAIN_S and all(each.done() for each in self._compiled.values()):
            return self.compile(grammar, number)
        return None

    def close(self) -> None:
        """Ends the thread; a grammar that is being compiled is finished first."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _start(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hiserve-grammar")
            before = threading.stack_size(STACK_BYTES)
            try:
                self._thread.submit(int).result()  # the thread is started with the first work
            finally:
                threading.stack_size(before)
        return self._thread

    def _compile(self, grammar: Grammar) -> Matcher:
        if self._vocabulary is None:
            self._vocabulary = self._open()
        return self._vocabulary.compile(grammar)
