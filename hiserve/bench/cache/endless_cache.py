"""What a cache without end would have held: an independent set of whole-page prefixes, in order of arrival."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from hiserve.core.plan import Int32Array

# The root of a namespace is its name.
_Node: TypeAlias = int | str


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """One request as a cache sees it.

    Attributes:
        prompt: Token ids, int32 ``[n]``.
        output: Token ids, int32 ``[m]``; an engine need not compute the last one, and may (a step ahead, or as a draft).
        begin_s: When it was sent, seconds on any clock.
        end_s: When its reply ended, on the same clock; infinity when it never did.
        namespace: Requests of different namespaces share nothing.
    """

    prompt: Int32Array
    output: Int32Array
    begin_s: float
    end_s: float
    namespace: str = ""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens of one request that a cache without end could have given.

    A prefix that an earlier request is still computing may be found or not, depending on how far that is, and so may
    the page that a reply's last token fills. So there are two numbers, and a perfect cache's lies between them.

    Attributes:
        most: Those of every request that was sent before, whole replies included.
        least: Those of requests that had ended before, without the last tokens of replies.
    """

    most: int
    least: int


def endless_cache(visits: Sequence[Visit], page_size: int) -> list[Held]:
    """Replays requests in the order in which they were sent; those sent at one moment in the order given.

    Args:
        visits: In any order.
        page_size: Tokens per page, at least 1; only whole pages are found, and never a prompt's last token.

    Returns:
        One entry for each visit, in the order given.
    """
    pages = _Pages(page_size)
    found: dict[int, Held] = {}
    for index in sorted(range(len(visits)), key=lambda at: (visits[at].begin_s, at)):
        found[index] = pages.look_up(visits[index])
        pages.add(visits[index])
    return [found[index] for index in range(len(visits))]


class _Pages:
    """A trie of pages: a node is the number of a prefix, an edge the bytes of one page."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * 4
        self._page_size = page_size
        self._children: dict[tuple[_Node, bytes], int] = {}
        self._ended_s: list[float] = []

    def look_up(self, visit: Visit) -> Held:
        """Counts the leading tokens that are there, and those of requests that have ended."""
        most = least = 0
        node: _Node = visit.namespace
        for page in self._cut(visit.prompt[:-1].tobytes()):
            child = self._children.get((node, page))
            if child is None:
                break
            node = child
            most += self._page_size
            if self._ended_s[child] <= visit.begin_s:
                least = most
        return Held(most=most, least=least)

    def add(self, visit: Visit) -> None:
        """Adds what the request may compute; a page has ended when the first request that surely computed it has."""
        node: _Node = visit.namespace
        num_sure = (visit.prompt.size + visit.output[:-1].size) // self._page_size
        for index, page in enumerate(self._cut(visit.prompt.tobytes() + visit.output.tobytes())):
            child = self._children.setdefault((node, page), len(self._ended_s))
            if child == len(self._ended_s):
                self._ended_s.append(math.inf)
            if index < num_sure:
                self._ended_s[child] = min(self._ended_s[child], visit.end_s)
            node = child

    def _cut(self, tokens: bytes) -> Iterator[bytes]:
        """Yields the bytes of each whole page."""
        size = self._page_bytes
        return (tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size))
