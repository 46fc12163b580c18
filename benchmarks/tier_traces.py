"""Conversations that come back, and the hits of one LRU cache as large as all tiers together.

Neither the trace nor the cache knows anything of the index: pages are numbered by what they hold in context.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

NUM_CONVERSATIONS = 64


@dataclass(frozen=True)
class Turn:
    """One request."""

    prompt: np.ndarray  # int32 ``[n]``. All that was said before and what is new
    num_new: int
    conversation: int


def in_turn(rng: np.random.Generator) -> Iterator[int]:
    """The one of two random conversations that waits longer: nearly one after the other, none far ahead of the others."""
    last = np.zeros(NUM_CONVERSATIONS)
    for now in count(1):
        pair = rng.choice(NUM_CONVERSATIONS, 2, replace=False)
        which = int(pair[last[pair].argmin()])
        last[which] = now
        yield which


def by_rank(rng: np.random.Generator) -> Iterator[int]:
    """Some conversations often and others seldom (Zipf, exponent 1)."""
    weights = 1.0 / np.arange(1, NUM_CONVERSATIONS + 1)
    names = rng.permutation(NUM_CONVERSATIONS)
    while True:
        yield int(names[rng.choice(NUM_CONVERSATIONS, p=weights / weights.sum())])


def rounds(rng: np.random.Generator) -> Iterator[int]:
    """All, one after the other: the order in which least recently used is the worst that can go."""
    while True:
        yield from range(NUM_CONVERSATIONS)


ORDERS: dict[str, Callable[[np.random.Generator], Iterator[int]]] = {
    "in turn": in_turn,
    "zipf": by_rank,
    "rounds": rounds,
}


class Conversations:
    """Turns without end: each continues its conversation, or begins it anew when that has more than ``max_pages``.

    Lengths are in proportion to ``page_size``; tokens are from ``vocabulary[0]`` up to ``vocabulary[1]``.
    """

    def __init__(
        self, order: str, seed: int, page_size: int, max_pages: int, vocabulary: tuple[int, int] = (2, 128_000)
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._order = ORDERS[order](self._rng)
        self._following: int | None = None
        self._page_size = page_size
        self._max_tokens = max_pages * page_size
        self._vocabulary = vocabulary
        self._said = [np.empty(0, dtype=np.int32)] * NUM_CONVERSATIONS

    @property
    def following(self) -> int:
        if self._following is None:
            self._following = next(self._order)
        return self._following

    def next(self) -> Turn:
        """Returns the next request. Its reply must be given before that conversation's next request."""
        which, page = self.following, self._page_size
        self._following = None
        num_asked, num_new = (int(n) for n in self._rng.integers((4 * page, page), (12 * page, 4 * page)))
        said = self._said[which]
        if said.size + num_asked + num_new > self._max_tokens:
            said = said[:0]
        asked = self._rng.integers(*self._vocabulary, num_asked, dtype=np.int32)
        return Turn(np.concatenate((said, asked)), num_new, which)

    def replied(self, turn: Turn, reply: np.ndarray) -> None:
        """Takes in a reply, int32 ``[turn.num_new]``."""
        self._said[turn.conversation] = np.concatenate((turn.prompt, reply))


class UnionLru:
    """One cache of whole pages, least recently used out first, of a path its end."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._names: dict[tuple[int, bytes], int] = {}
        self._serial = count(1)
        self._held: OrderedDict[int, None] = OrderedDict()

    def serve(self, turn: Turn, reply: np.ndarray) -> int:
        """Returns the tokens of a prompt that are found; the last one never is. Nor is a reply's last one computed."""
        found = 0
        for page in self._path(turn.prompt[:-1]):
            if page not in self._held:
                break
            found += self._page_size
        for page in reversed(self._path(np.concatenate((turn.prompt, reply[:-1])))):
            self._held[page] = None
            self._held.move_to_end(page)
        while len(self._held) > self._num_pages:
            self._held.popitem(last=False)
        return found

    def _path(self, tokens: np.ndarray) -> list[int]:
        path, name = [], 0
        for start in range(0, tokens.size // self._page_size * self._page_size, self._page_size):
            above = name, tokens[start : start + self._page_size].tobytes()
            name = self._names.get(above) or self._names.setdefault(above, next(self._serial))
            path.append(name)
        return path
