"""The prefix index against a model without a tree, under arbitrary sequences of operations.

Invariants are methods named after their numbers; those of other tiers come with the tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hiserve.cache.index.nodes import Node
from hiserve.cache.index.prefix_cache import Match, PrefixCache, PrefixLock
from tests.invariants import kv_checks
from tests.invariants.index_checks import check_structure
from tests.invariants.index_model import IndexModel, Place, Prefix, page_tokens, prefixes

NAMESPACE = b"namespace"
TENANTS = [b"", b"a", b"b"]
tenants = st.sampled_from([b"", b"", b"", b"", b"a", b"b"])
symbols = st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=8)
picks = st.integers(0, 15)


class WalkoutError(Exception):
    """An error that passes through the body of a lock."""


class IndexMachine(RuleBasedStateMachine):
    """Drives the manager and the model together.

    Args:
        page_size: Tokens per page.
        ran: Counts what really happened, over all examples.
    """

    def __init__(self, page_size: int, ran: Counter[str]) -> None:
        super().__init__()
        self.page_size = page_size
        self.page_bytes = 4 * page_size
        self.ran = ran

    @initialize(num_pages=st.integers(4, 20))
    def start(self, num_pages: int) -> None:
        self.told = kv_checks.Told(self.page_size)
        self.cache = PrefixCache(
            num_pages=num_pages,
            page_size=self.page_size,
            namespace=NAMESPACE,
            listener=self.told.events,
        )
        self.model = IndexModel(num_pages)
        self.receipts: dict[int, PrefixLock] = {}
        self.remembered: list[tuple[Match, bytes, Prefix]] = []
        self.content: dict[int, Place] = {}  # what was last written to each page
        self.replica: set[bytes] = set()
        self.steps = 0
        self.last_owner = 0

    # ---- rules

    @rule(tenant=tenants, pages=symbols, rest=picks)
    def match(self, tenant: bytes, pages: list[int], rest: int) -> None:
        prompt = self.prompt(pages, rest)
        match, prefix = self.checked_match(tenant, prompt)
        self.inv_32_match_is_monotone_and_idempotent(tenant, prompt, match)
        self.remembered.append((match, tenant, prefix))

    @rule(
        tenant=tenants,
        pages=symbols,
        rest=picks,
        how=st.sampled_from(["keep", "keep", "keep", "leave", "raise", "keep, raise"]),
    )
    def lock(self, tenant: bytes, pages: list[int], rest: int, how: str) -> None:
        match, prefix = self.checked_match(tenant, self.prompt(pages, rest))
        try:
            with self.cache.lock(match) as receipt:
                self.locked(receipt, tenant, prefix)
                if "keep" in how:
                    assert receipt.detach() is receipt
                if "raise" in how:
                    raise WalkoutError
        except WalkoutError:
            self.ran["exceptions"] += 1
        if how != "keep":
            del self.receipts[self.steps]
            self.model.release(self.steps)
        assert receipt.is_open == (how == "keep")

    @precondition(lambda self: self.remembered)
    @rule(pick=picks)
    def lock_remembered(self, pick: int) -> None:
        match, tenant, prefix = self.remembered.pop(pick % len(self.remembered))
        if match.tree_epoch == self.cache.tiers.tree_epoch:
            self.locked(self.cache.lock(match), tenant, prefix)
            self.ran["remembered"] += 1
        else:
            with pytest.raises(AssertionError, match="match again"):
                self.cache.lock(match)
            self.ran["stale matches"] += 1

    @rule(wanted=st.lists(st.integers(0, 22), max_size=7))
    def take(self, wanted: list[int]) -> None:
        self.steps += 1
        epoch, evictable = self.cache.tiers.tree_epoch, self.cache.device.num_evictable
        short = len(wanted) - len(self.model.free)
        pages = self.cache.allocate(np.array(wanted, dtype=np.int32))
        if short > len(self.model.evictable()):
            assert pages is None and self.cache.device.num_evictable == evictable
            self.ran["refused"] += 1
            return
        evicted = self.model.evict(max(0, short))
        self.ran["evicted"] += len(evicted)
        assert pages is not None and pages.dtype == np.int32
        assert (self.cache.tiers.tree_epoch > epoch) == bool(evicted)
        for i, (page, wish) in enumerate(zip(pages.tolist(), wanted, strict=True)):
            if wish in self.model.free and wish not in wanted[:i]:
                assert page == wish, f"page {wish} was free, {page} was given"
        self.inv_20_taken_pages_were_free(pages.tolist())
        self.model.private += pages.tolist()
        assert (np.diff(np.append(self.last_owner, self.cache.device.pages.owner[pages])) == 1).all()
        self.last_owner += len(pages)

    @precondition(lambda self: self.receipts)
    @rule(pick=picks, copied=st.integers(0, 4), new=symbols)
    def publish(self, pick: int, copied: int, new: list[int]) -> None:
        """Publishes below a lock: first what others published there meanwhile, then new pages."""
        number = list(self.receipts)[pick % len(self.receipts)]
        content = (*self.model.continuation(number)[:copied], *self.pages(new))
        self.take([0] * max(0, len(content) - len(self.model.private)))
        content = content[: len(self.model.private)]
        pages = (self.model.private[pick:] + self.model.private[:pick])[: len(content)]
        tenant, prefix = self.model.held[number]
        for part, page in zip(prefixes((*prefix, *content))[len(prefix) :], pages, strict=True):
            self.content[page] = (tenant, part)
        epoch, relocations = self.cache.tiers.tree_epoch, self.cache.tiers.relocation_version
        key = b"".join(content)
        canonical = self.cache.insert(self.receipts[number], key, np.array(pages, dtype=np.int32)).tolist()
        known = set(self.model.cached.values())
        assert canonical == self.model.publish(number, content, pages)
        is_new = not set(canonical) <= known
        assert (self.cache.tiers.tree_epoch > epoch) == is_new
        moved = canonical != pages
        self.inv_41_relocation_version_grows_iff_a_page_moved(relocations, moved)
        self.ran["published"] += is_new
        self.ran["moved"] += moved
        self.ran["moved in part"] += moved and is_new

    @rule(tenant=tenants, pages=symbols, rest=picks, stays=st.booleans())
    def serve(self, tenant: bytes, pages: list[int], rest: int, stays: bool) -> None:
        """A request's whole life at once, as the planner would do it."""
        self.lock(tenant, pages, rest, "keep")
        number = self.steps
        self.publish(list(self.receipts).index(number), 0, pages[len(self.model.held[number][1]) :])
        if not stays:
            self.release(list(self.receipts).index(number))

    @rule(tenant=tenants, pages=symbols, rest=picks)
    def lock_late(self, tenant: bytes, pages: list[int], rest: int) -> None:
        """Another request is served between a match and its lock: what it publishes makes the match stale."""
        self.match(tenant, pages, rest)
        self.serve(tenant, pages, rest, stays=False)
        self.lock_remembered(len(self.remembered) - 1)

    @precondition(lambda self: self.model.cached)
    @rule(pick=picks, cut=st.integers(0, 3), new=symbols)
    def catch_up(self, pick: int, cut: int, new: list[int]) -> None:
        """A request that began before its prefix was cached publishes the same pages again."""
        tenant, cached = list(self.model.cached)[pick % len(self.model.cached)]
        match, prefix = self.checked_match(tenant, b"".join(cached[:cut]) + bytes(4))
        self.locked(self.cache.lock(match), tenant, prefix)
        self.publish(len(self.receipts) - 1, 8, new)

    @precondition(lambda self: self.model.private)
    @rule(pick=picks, count=st.integers(1, 4))
    def give(self, pick: int, count: int) -> None:
        pages = (self.model.private[pick:] + self.model.private[:pick])[:count]
        self.cache.free(np.array(pages, dtype=np.int32))
        self.model.private = [page for page in self.model.private if page not in pages]
        self.model.free |= set(pages)

    @precondition(lambda self: self.receipts)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        number = list(self.receipts)[pick % len(self.receipts)]
        receipt = self.receipts.pop(number)
        self.cache.release(receipt)
        self.model.release(number)
        with pytest.raises(AssertionError, match="released before"):
            self.cache.release(receipt)

    @rule()
    def flush(self) -> None:
        count = len(self.model.evictable())
        epoch = self.cache.tiers.tree_epoch
        assert self.cache.flush() == count
        self.model.evict(count)
        self.inv_37_flush_leaves_only_what_is_locked(epoch, count)

    @rule()
    def take_events(self) -> None:
        self.inv_36_events_replay_to_the_tree()

    # ---- invariants after every step

    @invariant()
    def structure(self) -> None:
        check_structure(self.cache)

    @invariant()
    def inv_06_the_tree_holds_every_prefix_of_what_it_holds(self) -> None:
        found = dict(self.tree_pages())
        assert all((tenant, part) in found for tenant, prefix in found for part in prefixes(prefix))
        assert found == self.model.cached

    @invariant()
    def inv_11_locks_are_what_open_receipts_hold(self) -> None:
        expected: Counter[int] = Counter()
        for number, receipt in self.receipts.items():
            assert receipt.is_open
            path = self.path(receipt.node)
            expected.update(id(node) for node in path)
            assert path[0].digests[0] in self.cache.tree.roots
            assert b"".join(node.key for node in path) == b"".join(self.model.held[number][1])
        for node in [*self.cache.tree.roots.values(), *self.cache.tree.nodes()]:
            assert node.num_locks == expected.pop(id(node), 0)
        assert not expected, "a receipt refers to a node outside the tree"

    @invariant()
    def inv_12_locked_pages_stay(self) -> None:
        found = dict(self.tree_pages())
        free = set(self.cache.device.pages.free_pages().tolist())
        assert all(found[place] == self.model.cached[place] not in free for place in self.model.locked())

    @invariant()
    def inv_16_the_evictable_count_is_right(self) -> None:
        unlocked = sum(node.pages.size for node in self.cache.tree.nodes() if node.num_locks == 0)
        assert self.cache.device.num_evictable == unlocked == len(self.model.evictable())

    @invariant()
    def inv_17_free_evictable_protected_and_private_make_the_pool(self) -> None:
        free = self.cache.device.pages.num_free
        assert free == self.cache.device.pages.free_pages().size == len(self.model.free)
        protected, private = len(self.model.locked()), len(self.model.private)
        assert free + self.cache.device.num_evictable + protected + private == self.model.num_pages - 1

    @invariant()
    def inv_19_no_page_has_two_owners_and_the_sink_none(self) -> None:
        in_tree = [page for _, page in self.tree_pages()]
        free = self.cache.device.pages.free_pages().tolist()
        assert sorted(in_tree + self.model.private + free) == list(range(1, self.model.num_pages))
        stack = self.cache.device.pages._stack[: self.cache.device.pages._top].tolist()
        assert len(set(stack)) == len(stack) and set(free) <= set(stack) and 0 not in stack

    @invariant()
    def inv_34_no_page_is_found_under_another_tenant(self) -> None:
        for (tenant, prefix), page in self.tree_pages():
            assert self.content[page] == (tenant, prefix)

    # ---- invariants over single operations

    def inv_20_taken_pages_were_free(self, pages: list[int]) -> None:
        assert set(pages) <= self.model.free and len(set(pages)) == len(pages)
        self.model.free -= set(pages)

    def inv_31_pages_hold_the_matched_tokens_in_context(self, tenant: bytes, prefix: Prefix, pages: list[int]) -> None:
        assert [self.content[page] for page in pages] == [(tenant, part) for part in prefixes(prefix)]
        assert pages == self.model.pages_of(tenant, prefix)

    def inv_32_match_is_monotone_and_idempotent(self, tenant: bytes, prompt: bytes, match: Match) -> None:
        assert self.cache.match(tenant, prompt) is not match
        lengths = [self.cache.match(tenant, prompt[: 4 * n]).num_tokens for n in range(len(prompt) // 4 + 1)]
        assert lengths == sorted(lengths) and lengths[-1] == match.num_tokens

    def inv_33_the_last_token_is_never_matched(self, prompt: bytes, match: Match) -> None:
        assert match.num_tokens <= max(0, len(prompt) // 4 - 1)

    def inv_35_matched_and_computed_make_the_prompt(self, prompt: bytes, match: Match, prefix: Prefix) -> None:
        to_compute = len(prompt[len(b"".join(prefix)) :]) // 4
        assert match.num_tokens + to_compute == len(prompt) // 4

    def inv_36_events_replay_to_the_tree(self) -> None:
        published, removed = (
            [joined[i : i + 16] for i in range(0, len(joined), 16)] for joined in self.cache.take_events()
        )
        assert (
            set(published).isdisjoint(removed) and self.replica.isdisjoint(published) and self.replica >= set(removed)
        )
        parents = {
            digest: before
            for node in self.cache.tree.nodes()
            for before, digest in zip([node.parent.digests[-1], *node.digests], node.digests, strict=False)  # type: ignore[union-attr]
        }
        known = self.replica | {IndexModel.root_digest(NAMESPACE, tenant) for tenant in TENANTS}
        for digest in published:
            assert parents[digest] in known, "a page was reported before its parent"
            known.add(digest)
        self.replica = (self.replica | set(published)) - set(removed)
        assert self.replica == self.model.digests(NAMESPACE)
        kv_checks.inv_36_routers_know_what_each_tier_can_give(self.told, self.model.cached.keys(), ())
        self.ran["removed events"] += len(removed)

    def inv_37_flush_leaves_only_what_is_locked(self, epoch: int, count: int) -> None:
        assert self.cache.device.num_evictable == 0 and set(self.model.cached) == self.model.locked()
        assert (self.cache.tiers.tree_epoch > epoch) == bool(count)

    def inv_41_relocation_version_grows_iff_a_page_moved(self, before: int, moved: bool) -> None:
        assert self.cache.tiers.relocation_version == before + moved

    def inv_13_idle_means_nothing_is_locked_or_lost(self) -> None:
        assert all(node.num_locks == 0 for node in self.cache.tree.nodes())
        assert self.cache.device.num_evictable == len(self.model.cached)
        self.flush()
        assert not self.cache.tree.roots
        assert self.cache.device.pages.free_pages().tolist() == list(range(1, self.model.num_pages))
        self.take_events()
        assert not self.replica

    def teardown(self) -> None:
        """Every sequence must be able to end: nothing held, nothing left."""
        for number in list(self.receipts):
            self.cache.release(self.receipts.pop(number))
            self.model.release(number)
        self.cache.free(np.array(self.model.private, dtype=np.int32))
        self.model.free |= set(self.model.private)
        self.model.private.clear()
        self.inv_13_idle_means_nothing_is_locked_or_lost()

    # ---- helpers

    def pages(self, chosen: list[int]) -> Prefix:
        return tuple(page_tokens(symbol, self.page_size) for symbol in chosen)

    def prompt(self, chosen: list[int], rest: int) -> bytes:
        return b"".join(self.pages(chosen)) + bytes(4 * (rest % self.page_size if self.page_size > 1 else rest % 2))

    def checked_match(self, tenant: bytes, prompt: bytes) -> tuple[Match, Prefix]:
        self.steps += 1
        match = self.cache.match(tenant, prompt)
        prefix = self.model.match(tenant, prompt, self.page_bytes)
        note(f"{len(prompt) // 4} tokens of {tenant!r}: {match.num_tokens} cached")
        assert match.num_tokens == len(prefix) * self.page_size
        self.inv_33_the_last_token_is_never_matched(prompt, match)
        self.inv_35_matched_and_computed_make_the_prompt(prompt, match, prefix)
        self.ran["hits"] += bool(prefix)
        return match, prefix

    def locked(self, lock: PrefixLock, tenant: bytes, prefix: Prefix) -> None:
        self.steps += 1
        self.inv_31_pages_hold_the_matched_tokens_in_context(tenant, prefix, lock.pages.tolist())
        self.receipts[self.steps] = lock
        self.model.hold(self.steps, tenant, prefix)

    def path(self, node: Node) -> list[Node]:
        return [*self.path(node.parent), node] if node.parent is not None else [node]

    def tree_pages(self) -> Iterator[tuple[Place, int]]:
        """Walks the tree without its own search: every page with its place."""
        for tenant in TENANTS:
            root = self.cache.tree.roots.get(IndexModel.root_digest(NAMESPACE, tenant))
            stack: list[tuple[Node, Prefix]] = [(root, ())] if root is not None else []
            while stack:
                node, prefix = stack.pop()
                for i, page in enumerate(node.pages.tolist()):
                    prefix = (*prefix, node.key[i * self.page_bytes : (i + 1) * self.page_bytes])
                    yield (tenant, prefix), page
                stack += [(child, prefix) for child in node.children.values()]
