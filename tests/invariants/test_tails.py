"""H3: ``match`` finds the deepest resume point, against sets of prefixes, whatever came and went."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import MissReason, PrefixCache, PrefixLock, WindowPages
from tests.helpers.tail_model import TailModel

PAGE, NAMESPACE = 2, b"n" * 16


def make_cache(num_pages: int = 60, num_window_pages: int = 30) -> tuple[PrefixCache, WindowPages]:
    cache = PrefixCache(num_pages=num_pages, page_size=PAGE, namespace=NAMESPACE, num_window_pages=num_window_pages)
    assert cache.windows is not None
    return cache, cache.windows


class Runs:
    """Random rows: resumed at a match, published page by page, with tails at random boundaries."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.cache, self.windows = make_cache()
        self.model = TailModel(NAMESPACE, PAGE)
        self.rows: list[tuple[np.ndarray, int, PrefixLock]] = []  # tokens, published pages, lock

    def prompt(self) -> np.ndarray:
        return self.rng.integers(0, 2, int(self.rng.integers(1, 24))).astype(np.int32)

    def start(self) -> None:
        tokens = self.prompt()
        found = self.cache.match(b"", tokens.tobytes())
        pages, num_cached = self.model.match(tokens.tobytes())
        assert (found.num_tokens, found.num_history_tokens) == (pages * PAGE, num_cached * PAGE)
        assert (found.tail is None) == (pages == 0)
        miss = self.cache.explain(b"", tokens.tobytes(), found.num_tokens)
        assert (miss.reason is MissReason.NO_TAIL) == (pages < num_cached)
        if len(self.rows) < 4:
            self.rows.append((tokens, pages, self.cache.lock(found).detach()))

    def publish(self) -> None:
        index = int(self.rng.integers(len(self.rows)))
        tokens, num_pages, lock = self.rows[index]
        end = (
            int(self.rng.integers(num_pages, tokens.size // PAGE + 1)) if tokens.size // PAGE > num_pages else num_pages
        )
        if end > num_pages:
            pages = self.cache.allocate(np.zeros(end - num_pages, dtype=np.int32))
            if pages is None:
                return
            self.cache.insert(lock, tokens[num_pages * PAGE : end * PAGE].tobytes(), pages)
            self.rows[index] = tokens, end, lock

    def keep(self) -> None:
        tokens, num_pages, lock = self.rows[int(self.rng.integers(len(self.rows)))]
        if num_pages:
            boundary = int(self.rng.integers(1, num_pages + 1))
            pages = self.windows.allocate(np.zeros(min(boundary, 2), dtype=np.int32))
            self.model.tails[self.model.names(tokens.tobytes())[boundary - 1]] = self.cache.keep_tail(
                lock, num_pages - boundary, pages
            )
            self.windows.drop(pages)

    def end(self) -> None:
        self.cache.release(self.rows.pop(int(self.rng.integers(len(self.rows))))[2])

    def squeeze(self) -> None:
        pages = self.cache.allocate(np.zeros(int(self.rng.integers(1, 40)), dtype=np.int32))
        if pages is not None:
            self.cache.free(pages)

    def step(self) -> None:
        chosen = int(self.rng.integers(12))
        if chosen < 4 or not self.rows:
            self.start()
        elif chosen < 7:
            self.publish()
        elif chosen < 9:
            self.keep()
        elif chosen < 10:
            self.end()
        elif chosen < 11:
            self.squeeze()
        elif self.rng.integers(12) == 0:
            self.cache.flush()
        self.model.apply(*self.cache.take_events())
        self.model.check()
        self.windows.check()


@pytest.mark.parametrize("seed", range(40))
def test_match_is_the_deepest_resume_point_whatever_came_and_went(seed: int) -> None:
    runs = Runs(seed)
    for _ in range(150):
        runs.step()
    for _, _, lock in runs.rows:
        runs.cache.release(lock)
    runs.cache.flush()
    assert runs.windows.num_tails == 0 and runs.windows.num_free == runs.windows.num_pages - 1


@pytest.mark.parametrize("use", ["a match", "a row that ends there"])
def test_a_boundary_that_is_used_keeps_its_tail_longer(use: str) -> None:
    cache, windows = make_cache(num_window_pages=5)
    locks, prompts = [], [np.full(5, token, dtype=np.int32) for token in (1, 2)]
    for tokens in prompts:
        locks.append(cache.lock(cache.match(b"", tokens.tobytes())).detach())
        pages = cache.allocate(np.zeros(2, dtype=np.int32))
        assert pages is not None
        cache.insert(locks[-1], tokens[:4].tobytes(), pages)
        held = windows.allocate(np.zeros(2, dtype=np.int32))
        cache.keep_tail(locks[-1], 0, held)
        windows.drop(held)
    if use == "a match":
        locks.append(cache.lock(cache.match(b"", prompts[0].tobytes())).detach())
    else:
        cache.keep_tail(locks[0], 0, np.empty(0, dtype=np.int32))
    windows.allocate(np.zeros(2, dtype=np.int32))
    assert [cache.match(b"", tokens.tobytes()).num_tokens for tokens in prompts] == [4, 0]


def test_a_match_from_before_a_tail_is_matched_again() -> None:
    cache, windows = make_cache()
    tokens = np.arange(5, dtype=np.int32)
    lock = cache.lock(cache.match(b"", tokens.tobytes())).detach()
    pages = cache.allocate(np.zeros(2, dtype=np.int32))
    assert pages is not None
    cache.insert(lock, tokens[:4].tobytes(), pages)
    before = cache.match(b"", tokens.tobytes())
    cache.keep_tail(lock, 0, windows.allocate(np.zeros(2, dtype=np.int32)))
    assert (before.num_tokens, cache.match(b"", tokens.tobytes()).num_tokens) == (0, 4)
    with pytest.raises(AssertionError, match="the tree changed since the match"):
        cache.lock(before)


def test_a_boundary_keeps_the_tail_that_it_has() -> None:
    cache, windows = make_cache()
    tokens = np.arange(9, dtype=np.int32)
    lock = cache.lock(cache.match(b"", tokens.tobytes())).detach()
    pages = cache.allocate(np.zeros(4, dtype=np.int32))
    assert pages is not None
    cache.insert(lock, tokens[:8].tobytes(), pages)
    first = cache.keep_tail(lock, 1, windows.allocate(np.zeros(2, dtype=np.int32)))
    second = cache.keep_tail(lock, 1, windows.allocate(np.zeros(2, dtype=np.int32)))
    assert first is second and windows.num_tails == 1
    with pytest.raises(AssertionError, match="no page ends 4 pages before the end"):
        cache.keep_tail(lock, 4, first.pages)
    cache.release(lock)
