"""What a real conversation trace finds on each tier, against an account of pages that knows nothing of the index."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.helpers.copying import FILLER, add, copying_engine, run
from tests.helpers.widening import some
from tests.invariants.conversation_trace import MAX_LEN, PAGE, requests

NUM_DIFFERENT, NUM_REQUESTS = 120, 250  # of the trace, and drawn from them: its users come back
NUM_PAGES, ENDLESS = 700, 60_000
PRIORITIES = (0, 0, 0, 1, 7, -2)


class TierOracle:
    """Two sets of pages, each page by its number in a trie of everything ever computed.

    The device keeps the pages used last, the host all that were ever computed, if there is one; children go before
    parents. What a smaller host finds is for ``test_union_of_tiers.py``.

    Args:
        num_pages: That the device holds.
        num_host_pages: That the host holds, which is enough for all; 0 without one.
        by_priority: Whether pages used by requests of lower priority go first.
    """

    def __init__(self, num_pages: int, num_host_pages: int, by_priority: bool) -> None:
        self.num_pages, self.num_host_pages = num_pages, num_host_pages
        self.by_priority = by_priority
        self.number: dict[tuple[int, bytes], int] = {}
        self.device: set[int] = set()
        self.host: set[int] = set()
        self.rank: dict[int, tuple[int, int, int]] = {}  # priority, last use, depth from the end

    def path(self, tokens: np.ndarray) -> list[int]:
        """Returns the numbers of the full pages of a prompt."""
        path, parent = [], -1
        for start in range(0, tokens.size // PAGE * PAGE, PAGE):
            parent = self.number.setdefault((parent, tokens[start : start + PAGE].tobytes()), len(self.number))
            path.append(parent)
        return path

    def serve(self, time: int, prompt: np.ndarray, computed: np.ndarray, priority: int) -> tuple[int, int]:
        """Returns the tokens that a request finds on the device and after them on the host, and what it leaves."""
        usable, path = self.path(prompt[:-1]), self.path(computed)
        found = next((i for i, page in enumerate(usable) if page not in self.device), len(usable))
        anywhere = next((i for i, page in enumerate(usable) if page not in self.device | self.host), len(usable))
        self.use(time, path[:anywhere], priority)
        self.take(-(-prompt.size // PAGE) - found, set(path[:anywhere]))
        self.publish(time, path[: prompt.size // PAGE], priority)
        if prompt.size % PAGE == 0 and computed.size > prompt.size:
            self.take(1, set(path[: prompt.size // PAGE]))
        for end in range(prompt.size // PAGE + 1, len(path) + 1):
            self.publish(time, path[:end], priority)
            if computed.size > end * PAGE:
                self.take(1, set(path[:end]))
        return found * PAGE, (anywhere - found) * PAGE

    def use(self, time: int, path: list[int], priority: int) -> None:
        for depth, page in enumerate(path):
            known = self.rank[page][0] if page in self.device | self.host else priority
            self.rank[page] = (max(known, priority) if self.by_priority else 0, time, -depth)

    def publish(self, time: int, path: list[int], priority: int) -> None:
        self.use(time, path, priority)
        self.device |= set(path)
        if self.num_host_pages:
            self.host |= set(path)
            assert len(self.host) <= self.num_host_pages

    def take(self, count: int, held: set[int]) -> None:
        self.evict(self.device, held, count - (self.num_pages - len(self.device)))

    def evict(self, tier: set[int], held: set[int], count: int) -> None:
        victims = sorted(tier - held, key=lambda page: self.rank[page])
        tier.difference_update(victims[: max(0, count)])


@pytest.mark.parametrize(
    ("num_host_pages", "by_priority"),
    some(product((0, ENDLESS), (False, True)), (0, False), (ENDLESS, True)),
    ids=["device, lru", "device, priority", "endless host, lru", "endless host, priority"],
)
def test_a_trace_finds_on_each_tier_what_the_account_says(num_host_pages: int, by_priority: bool) -> None:
    print("seed 3")
    rng = np.random.default_rng(3)
    engine, executor, cache = copying_engine(
        num_pages=NUM_PAGES + 1,
        num_host_pages=num_host_pages + 1 if num_host_pages else 0,
        page_size=PAGE,
        max_rows=2,
        max_len=MAX_LEN,
        budget=1024,
        eviction="priority" if by_priority else "lru",
    )
    oracle = TierOracle(NUM_PAGES, num_host_pages, by_priority)
    totals = np.zeros(2, dtype=np.int64)
    trace = requests()[:NUM_DIFFERENT]
    for uid in range(NUM_REQUESTS):
        prompt, num_new = trace[int(NUM_DIFFERENT * rng.random() ** 2)]
        priority = int(rng.choice(PRIORITIES))
        add(engine, uid, prompt, num_new, priority)
        use = run(engine)[uid]
        computed = np.concatenate((prompt, np.full(num_new - 1, FILLER, dtype=np.int32)))
        wanted = oracle.serve(uid, prompt, computed, priority)
        assert (use.device, use.host) == wanted, f"request {uid}"
        totals += wanted  # INV-35: what was found and what was computed make the prompt
        num_computed = sum(int(plan.num_new.sum()) for plan in executor.plans) - (num_new - 1)
        assert sum(wanted) + num_computed == prompt.size
        executor.plans.clear()
    print(f"{totals} of the prompts' tokens found on device and host")
    assert cache.device.num_evicted > 1000 and totals[0] > 0
    assert bool(totals[1]) == bool(num_host_pages)
    assert cache.tiers.num_unbacked == (0 if num_host_pages else cache.device.num_evicted)
