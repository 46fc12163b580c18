"""The matchers of rows as copies of compiled grammars: rows that share a grammar spread over several of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

from hiserve.core.request import Grammar
from hiserve.grammar.compiler import Compiler
from hiserve.grammar.matcher import Matcher


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
