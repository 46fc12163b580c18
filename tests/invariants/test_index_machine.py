"""The prefix index against a model without a tree, under arbitrary sequences of operations; also with retained pages, and time."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from tests.helpers.widening import some
from tests.invariants.index_machine import IndexMachine, picks, symbols, tenants


class RetentionMachine(IndexMachine):
    """The machine of the index, with requests that retain their prefixes, and time."""

    now_s = 0

    @precondition(lambda self: self.receipts)
    @rule(pick=picks, num_pages=st.integers(0, 6), ttl_s=st.integers(1, 6))
    def retain(self, pick: int, num_pages: int, ttl_s: int) -> None:
        number = list(self.receipts)[pick % len(self.receipts)]
        until_s, num_ignored = self.now_s + ttl_s, self.cache.stats().num_not_retained
        self.cache.retain(self.receipts[number], num_pages * self.page_size + self.page_size - 1, until_s)
        num_beyond = self.model.retain(number, num_pages, until_s)
        assert self.cache.stats().num_not_retained == num_ignored + num_beyond
        self.ran["retained"] += bool(self.model.until)
        self.ran["beyond the quota"] += num_beyond > 0

    @precondition(lambda self: self.model.until)
    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        self.cache.expire(self.now_s)
        over = [place for place, until in self.model.until.items() if until <= self.now_s]
        for place in over:
            del self.model.until[place]
        self.ran["no longer retained"] += bool(over)

    @rule(
        tenant=tenants,
        pages=symbols,
        num_pages=st.integers(1, 6),
        ttl_s=st.integers(1, 6),
        spared=st.integers(0, 6),
        seconds=st.integers(0, 3),
    )
    def serve_and_retain(
        self, tenant: bytes, pages: list[int], num_pages: int, ttl_s: int, spared: int, seconds: int
    ) -> None:
        """A whole life, so that every path is taken many times."""
        self.serve(tenant, pages, 1, True)
        last = len(self.receipts) - 1
        self.retain(last, num_pages, ttl_s)
        self.release(last)
        self.squeeze(spared)
        self.wait(seconds)

    def squeeze(self, spared: int) -> None:
        """Takes almost all pages that can be had, and gives them back."""
        num_before = len(self.model.until)
        self.take([0] * max(0, len(self.model.free) + len(self.model.evictable()) - spared))
        self.ran["retained evicted"] += len(self.model.until) < num_before
        self.give(0, len(self.model.private))

    @invariant()
    def inv_42_retained_pages_are_those_of_the_model(self) -> None:
        times = {page: node.retained_until_s for node in self.cache.tree.nodes() for page in node.pages.tolist()}
        assert {place: times[page] for place, page in self.tree_pages() if times[page]} == self.model.until
        assert self.cache.stats().num_retained == len(self.model.until)


def run(kind: type[IndexMachine], page_size: int, max_examples: int, paths: tuple[str, ...]) -> None:
    """Runs machines; each path must be taken at least once."""
    ran: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: kind(page_size, ran),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"page size {page_size}: {dict(ran)}")
    for path in paths:
        assert ran[path], f"{path} never happened; the sequences miss it"


@pytest.mark.parametrize(("page_size", "num_runs"), some(product((1, 4, 16), (60, 200)), (1, 60), (4, 60), (16, 60)))
def test_index_agrees_with_the_model(page_size: int, num_runs: int) -> None:
    paths = ("hits", "evicted", "refused", "published", "moved", "moved in part", "remembered", "stale matches")
    run(IndexMachine, page_size, num_runs, paths)


@pytest.mark.parametrize("page_size", some([1, 4], 4))
def test_retained_pages_go_last_until_their_time(page_size: int) -> None:
    paths = ("retained", "beyond the quota", "no longer retained", "retained evicted")
    run(RetentionMachine, page_size, 100, paths)
