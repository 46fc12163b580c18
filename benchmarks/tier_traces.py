"""Conversations that come back, and what one LRU cache as large as all tiers together would find of their prompts.

Neither the trace nor the cache knows anything of the index: pages are numbered by what they hold in context.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

NUM_CONVERSATIONS = 64
REPLY = 1  # what the model of a simulation says; no prompt has it


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        prompt: int32 ``[n]``. All that was said before and what is new.
        num_new: Tokens to generate.
        conversation: Which.
    """

    prompt: np.ndarray
    num_new: int
    conversation: int


def in_turn(rng: np.random.Generator) -> Iterator[int]:
    """Whoever of two came less lately: nearly one after the other, and no conversation is far ahead of the others."""
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


ORDERS: dict[str, Callable[[np.random.Generator], Iterator[int]]] = {"in turn": in_turn, "zipf": by_rank}


def conversations(order: str, seed: int, page_size: int, max_pages: int) -> Iterator[Turn]:
    """Turns without end: each continues its conversation, or begins it anew when that has become too long.

    Args:
        order: Of ``ORDERS``.
        seed: Of everything.
        page_size: Tokens per page; lengths are in proportion.
        max_pages: Longest prompt and reply, in pages.
    """
    rng = np.random.default_rng(seed)
    said = [np.empty(0, dtype=np.int32)] * NUM_CONVERSATIONS
    for which in ORDERS[order](rng):
        num_asked, num_new = (int(n) for n in rng.integers((4 * page_size, page_size), (12 * page_size, 4 * page_size)))
        if said[which].size + num_asked + num_new > max_pages * page_size:
            said[which] = said[which][:0]
        asked = rng.integers(2, 128_000, num_asked, dtype=np.int32)
        prompt = np.concatenate((said[which], asked))
        said[which] = np.concatenate((prompt, np.full(num_new, REPLY, dtype=np.int32)))
        yield Turn(prompt, num_new, which)


class UnionLru:
    """One cache of whole pages, least recently used out first, of a path its end.

    Args:
        num_pages: Of all tiers together.
        page_size: Tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages = num_pages
        self._page_size = page_size
        self._names: dict[tuple[int, bytes], int] = {}
        self._serial = count(1)
        self._held: OrderedDict[int, None] = OrderedDict()

    def serve(self, turn: Turn) -> int:
        """Returns the tokens of a prompt that are found; the last one never is."""
        found = 0
        for page in self._path(turn.prompt[:-1]):
            if page not in self._held:
                break
            found += self._page_size
        computed = np.concatenate((turn.prompt, np.full(turn.num_new - 1, REPLY, dtype=np.int32)))
        for page in reversed(self._path(computed)):
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
