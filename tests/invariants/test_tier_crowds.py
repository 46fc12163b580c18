"""Two tiers with a store behind them, shared by tenants with shares of their own: every structural invariant after every step.

``test_tier_machine.py`` compares one account with a model that knows which page goes next. Here several accounts press
each other on tiers of a few pages, adopted pages find their owners late, and nobody says who is to give what: only
that nothing is counted twice, nothing leaks, and everything that is begun can end.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np

from hiserve.cache.index.locks import path
from hiserve.cache.index.prefix_cache import HostAdmission, PrefixCache, PrefixLock, RunOp, Tier
from hiserve.core.transfers import PageCopy
from tests.helpers.tiers import NAMESPACE, PAGE_SIZE, is_whole, key, prompt, run_of
from tests.invariants.index_checks import check_structure
from tests.invariants.tier_model import ints

NUM_SEEDS, NUM_STEPS = 25, 200
ACCOUNTS = {b"a": None, b"b": b"1", b"c": b"1", b"d": None}
CONTENTS = 2  # so that prompts meet
WEIGHTS = {
    "admit": 30,
    "publish": 20,
    "leave": 10,
    "begin_stores": 10,
    "settle": 10,
    "take_uploads": 6,
    "end_upload": 4,
    "end_stage": 3,
    "begin_prefetch": 3,
    "end_prefetch": 2,
    "flush": 1,
    "grow": 1,
}


class Crowd:
    """Tenants, their rows and the copies under way."""

    def __init__(self, random: Random) -> None:
        self.random, self.ran = random, Counter[str]()
        num_host_pages, order = random.choice((3, 6, 12, 30)), random.choice(("lru", "priority"))
        self.cache = PrefixCache(
            num_pages=random.choice((10, 20, 40)),
            page_size=PAGE_SIZE,
            namespace=NAMESPACE,
            eviction=order,
            num_host_pages=num_host_pages,
            num_ready_host_pages=random.choice((None, 1)),
            host_admission=random.choice(list(HostAdmission)),
            max_upload_pages=random.choice((0, 1, max(1, num_host_pages // 4))),
        )
        self.rows: list[tuple[PrefixLock, list[int]]] = []
        self.past: list[tuple[bytes, list[int]]] = []
        self.copies: list[PageCopy] = []
        self.stages: list[PageCopy] = []
        self.uploads: list[RunOp] = []
        self.fetches: list[RunOp] = []
        if random.random() < 0.4:
            pages = range(1, min(self.cache.host.pages.num_ready, 10))
            self.cache.recover([run_of(ints([page]), page, tenant=random.choice(list(ACCOUNTS))) for page in pages])

    def step(self, number: int) -> None:
        self.cache.begin_after(number)
        (name,) = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        getattr(self, name)()
        self.ran["asked for stores"] += (
            self.cache.has_offloads
        )  # as an engine asks; it drops entries that are out of date
        check_structure(self.cache)
        for tier in Tier:
            self.cache.take_events(tier)
        self.cache.take_freed_host_pages()

    def contents(self, most: int = 7) -> list[int]:
        return [self.random.randint(1, CONTENTS) for _ in range(self.random.randint(1, most))]

    def admit(self) -> None:
        if len(self.rows) == 4:
            return
        tenant, contents = self.random.choice(list(ACCOUNTS)), self.contents()
        if self.past and self.random.random() < 0.6:
            tenant, contents = self.random.choice(self.past)
        self.past.append((tenant, contents))
        match = self.cache.match(tenant, prompt(*contents))
        num_host_tokens = match.num_host_tokens if self.random.random() < 0.8 else 0
        lock = self.cache.lock(match, num_host_tokens, self.random.randint(0, 2), ACCOUNTS[tenant])
        if lock.host_pages.size:
            pages = self.cache.allocate(np.zeros(lock.host_pages.size, dtype=np.int32))
            if pages is None:
                self.cache.release(lock)
                return
            self.copies.append(self.cache.begin_load(lock, pages))
            self.ran["loads"] += 1
        self.rows.append((lock, contents))

    def publish(self) -> None:
        ready = [row for row in self.rows if not row[0].ops]
        if not ready:
            return
        lock, contents = self.random.choice(ready)
        known = sum(node.num_pages for node in path(lock.node))
        new = contents[known:][: self.random.randint(1, 4)] or self.contents(4)
        pages = self.cache.allocate(np.zeros(len(new), dtype=np.int32))
        if pages is not None:
            self.cache.free(pages[self.cache.insert(lock, key(*new), pages).size :])

    def leave(self) -> None:
        if self.rows:
            lock, _ = self.rows.pop(self.random.randrange(len(self.rows)))
            if self.random.random() < 0.2:
                self.cache.ensure_backed(lock)
            self.cache.release(lock)

    def begin_stores(self) -> None:
        is_worth = self.random.choice((None, lambda _: False, lambda num_pages: num_pages > 1))
        copies = self.cache.begin_offloads(self.random.randint(1, 20), self.random.randint(1, 5), is_worth)
        self.copies += copies
        self.ran["stores"] += len(copies)

    def settle(self, *, ok: bool | None = None) -> None:
        if self.copies:
            copy = self.copies.pop(self.random.randrange(len(self.copies)))
            lost = self.cache.complete(copy.op, ok=self.random.random() < 0.85 if ok is None else ok)
            for row in [row for row in self.rows if any(row[0] is each for each in lost)]:
                self.rows.remove(row)
                self.cache.release(row[0])

    def take_uploads(self) -> None:
        uploads, stages = self.cache.store.begin_uploads()
        self.uploads += uploads
        self.stages += stages
        self.ran["uploads"] += len(uploads)
        self.ran["stages"] += len(stages)

    def end_upload(self) -> None:
        if self.uploads:
            self.cache.uploads.end_upload(self.uploads.pop(self.random.randrange(len(self.uploads))).op)

    def end_stage(self, *, ok: bool | None = None) -> None:
        if self.stages:
            stage = self.stages.pop(self.random.randrange(len(self.stages)))
            self.cache.uploads.end_stage(stage.op, ok=self.random.random() < 0.8 if ok is None else ok)

    def begin_prefetch(self) -> None:
        tenant, most = self.random.choice(list(ACCOUNTS)), self.random.randint(1, 4)
        begun = self.cache.store.begin_prefetch(tenant, prompt(*self.contents()), most)
        self.fetches += [begun] if begun is not None else []

    def end_prefetch(self) -> None:
        if self.fetches:
            fetch = self.fetches.pop(self.random.randrange(len(self.fetches)))
            if self.random.random() < 0.2:
                self.cache.store.abort_prefetch(fetch.op)
            self.cache.store_sync.end_prefetch(fetch.op, self.random.randint(0, fetch.run.pages.size))

    def flush(self) -> None:
        self.cache.flush(self.random.choice((None, *Tier)))

    def grow(self) -> None:
        pages = self.cache.host.pages
        self.cache.grow_host(min(pages.num_pages, pages.num_ready + self.random.randint(1, 20)))

    def finish(self) -> None:
        """All copies end well, and all that waits is copied."""
        while self.rows:
            self.leave()
        while self.fetches:
            self.end_prefetch()
        for _ in range(1000):
            self.begin_stores()
            self.take_uploads()
            if not (self.copies or self.stages or self.uploads or self.cache.uploads.has_uploads):
                break
            self.settle(ok=True)
            self.end_stage(ok=True)
            self.end_upload()
        assert not (self.copies or self.stages or self.uploads)
        assert not (self.cache.uploads.num_waiting and self.cache.host.pages.num_ready > 1)
        assert is_whole(self.cache)


def test_nothing_is_counted_twice_and_everything_ends() -> None:
    ran = Counter[str]()
    for seed in range(NUM_SEEDS):
        print(f"seed {seed}")
        crowd = Crowd(Random(seed))
        for number in range(1, NUM_STEPS):
            crowd.step(number)
        crowd.finish()
        ran += crowd.ran + Counter({"evictions": crowd.cache.device.num_evicted})
        ran["host evictions"] += crowd.cache.host.num_evicted
    print(ran)
    assert all(ran[name] >= 5 for name in ("loads", "stores", "uploads", "stages", "evictions", "host evictions"))
