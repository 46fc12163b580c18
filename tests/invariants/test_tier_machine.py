"""The prefix index on two tiers against a model without a tree and a model of streams, under arbitrary sequences.

Rows run as the planner would run them, but less politely: pages are published while the forward that writes them is in
flight, and copies end in any order that their streams allow.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hiserve.cache.index.eviction import LruEviction
from hiserve.cache.index.manager import CacheManager, HostAdmission, Match, Receipt
from hiserve.cache.index.misses import MissReason
from hiserve.cache.index.tiers import Tier
from hiserve.core.copies import CopyKind, PageCopy, PageRun
from tests.invariants import tier_checks
from tests.invariants.index_checks import check_structure
from tests.invariants.index_model import Place, Prefix, page_tokens
from tests.invariants.streams import Event, Page, Streams
from tests.invariants.tier_checks import NAMESPACE, digest
from tests.invariants.tier_model import OpModel, TierModel, above, ints, parts

MAX_DEPTH = 2  # forwards in flight
tenants = st.sampled_from([b"", b"", b"", b"a"])
symbols = st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=7)
picks = st.integers(0, 15)


class WalkoutError(Exception):
    """An error that passes through the body of a lock."""


@dataclass
class Row:
    """A request that runs: the pages of its prefix, then those it computed itself."""

    number: int
    receipt: Receipt
    table: list[int]
    contents: list[bytes]
    goal: Prefix = ()  # what its prompt says; then it says something itself
    steps: list[int] = field(default_factory=list)  # that wrote the private ones

    def following(self, symbol: int, page_size: int) -> bytes:
        """Returns the next page."""
        known = len(self.contents)
        return self.goal[known] if known < len(self.goal) else page_tokens((symbol + self.number) % 3, page_size)

    @property
    def private(self) -> list[int]:
        return self.table[len(self.table) - len(self.steps) :]


class TierMachine(RuleBasedStateMachine):
    """Drives the manager, the model and the streams together.

    Args:
        page_size: Tokens per page.
        admission: Which pages are stored on the host.
        ran: Counts what really happened, over all examples.
    """

    def __init__(self, page_size: int, admission: HostAdmission, ran: Counter[str]) -> None:
        super().__init__()
        self.page_size = page_size
        self.page_bytes = 4 * page_size
        self.admission = admission
        self.ran = ran

    @initialize(num_pages=st.integers(4, 14), num_host_pages=st.integers(2, 14), max_upload=st.sampled_from([0, 2, 99]))
    def start(self, num_pages: int, num_host_pages: int, max_upload: int) -> None:
        self.max_upload = max_upload
        self.model = TierModel(num_pages, num_host_pages, max(2, num_host_pages - 2))
        self.steps = 0
        self.fresh()

    def fresh(self) -> None:
        """A process begins."""
        model = self.model
        self.cache = CacheManager(
            num_pages=model.num_pages,
            page_size=self.page_size,
            namespace=NAMESPACE,
            eviction=LruEviction(),
            num_host_pages=model.num_host_pages,
            num_ready_host_pages=model.num_ready,
            host_admission=self.admission,
            max_upload_pages=self.max_upload,
        )
        self.streams = Streams()
        self.rows: dict[int, Row] = {}
        self.copies: dict[int, tuple[PageCopy, Event]] = {}
        self.fetches: dict[int, tuple[PageRun, Event]] = {}
        self.uploads: dict[int, Event] = {}
        self.forwards: dict[int, Event] = {}
        self.in_flight: deque[int] = deque()
        self.step = 0
        self.content: dict[Page, Place | None] = {}
        self.replicas: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.states = tier_checks.states(self.cache)
        self.is_cut = False
        self.num_sent = 0

    # ---- rules: requests

    @rule(tenant=tenants, pages=symbols, rest=picks)
    def match(self, tenant: bytes, pages: list[int], rest: int) -> None:
        prompt = self.prompt(pages, rest)
        match, device, anywhere = self.checked_match(tenant, prompt)
        lengths = [
            (each.num_tokens, each.num_tokens + each.num_host_tokens)
            for each in (self.cache.match(tenant, prompt[: 4 * n]) for n in range(len(prompt) // 4 + 1))
        ]
        for column in zip(*lengths, strict=True):  # INV-32
            assert list(column) == sorted(column)
        assert lengths[-1] == (match.num_tokens, match.num_tokens + match.num_host_tokens)
        self.reasons_are_true(tenant, prompt, device, anywhere)

    @rule(
        tenant=tenants,
        pages=symbols,
        rest=picks,
        share=st.sampled_from([0, 1, 7, 7, 7]),
        how=st.sampled_from(["run"] * 6 + ["leave", "raise", "wait"]),
    )
    def admit(self, tenant: bytes, pages: list[int], rest: int, share: int, how: str) -> None:
        """A request gets a row, and loads what the host has of its prefix, or a part of it."""
        self.admit_prompt(tenant, self.prompt(pages, rest), share, how)

    @precondition(lambda self: self.model.places)
    @rule(
        pick=picks,
        share=st.sampled_from([1, 7, 7, 7]),
        squeezed=st.integers(0, 6),
        how=st.sampled_from(["run", "wait"]),
    )
    def come_back(self, pick: int, share: int, squeezed: int, how: str) -> None:
        """A conversation goes on whose pages may have left the device."""
        if squeezed:
            self.squeeze(squeezed)
        places = sorted(self.model.places, key=lambda place: (place in self.model.device, -len(place[1]), place))
        if places:
            tenant, prefix = places[pick % len(places)]
            self.admit_prompt(tenant, b"".join(prefix) + bytes(4), share, how)

    def admit_prompt(self, tenant: bytes, prompt: bytes, share: int, how: str) -> None:
        match, device, anywhere = self.checked_match(tenant, prompt)
        num_host = min(share, match.num_host_tokens // self.page_size)
        prefix = anywhere[: len(device) + num_host]
        try:
            with self.cache.lock(match, num_host * self.page_size) as receipt:
                row = self.locked(receipt, tenant, prefix, len(device))
                row.goal = self.usable(prompt + bytes(4))
                if how == "raise":
                    raise WalkoutError
                if how == "wait" or (how == "run" and self.load(row)):
                    receipt.keep()
        except WalkoutError:
            self.ran["exceptions"] += 1
        if not receipt.is_open:
            self.gone(row)

    @precondition(lambda self: any(row.receipt.host_pages.size for row in self.rows.values()))
    @rule(pick=picks)
    def load_late(self, pick: int) -> None:
        """A load that others may have come before."""
        waiting = [row for row in self.rows.values() if row.receipt.host_pages.size]
        row = waiting[pick % len(waiting)]
        places = parts(self.model.held[row.number])
        num_host = row.receipt.host_pages.size
        if all(place not in self.model.device for place in places[-num_host:]):
            self.load(row)
        else:
            self.ran["too late"] += 1
            with pytest.raises(AssertionError, match="match again"):
                self.cache.begin_load(row.receipt, np.zeros(num_host, dtype=np.int32))
            self.release(list(self.rows).index(row.number))

    @precondition(lambda self: self.rows and len(self.in_flight) < MAX_DEPTH)
    @rule(chosen=st.sets(picks, min_size=1, max_size=3), num_new=st.integers(0, 3), symbol=picks, waits=st.booleans())
    def launch(self, chosen: set[int], num_new: int, symbol: int, waits: bool) -> None:
        """A forward of some rows; those whose loads are in flight join only if it waits for them."""
        rows = {number: self.rows[number] for number in (list(self.rows)[pick % len(self.rows)] for pick in chosen)}
        joining = [row for row in rows.values() if not row.receipt.host_pages.size and (waits or not row.receipt.ops)]
        pages = {row.number: self.take([0] * num_new) for row in joining}
        loads = {op for row in joining for op in row.receipt.ops}
        self.ran["waits"] += len(loads)
        self.step += 1
        forward = self.streams.start("forward", *(self.copies[op][1] for op in loads))
        self.forwards[self.step] = forward
        self.in_flight.append(self.step)
        for row in joining:
            tenant = self.model.held[row.number][0]
            places = parts((tenant, tuple(row.contents)))
            for page, place in zip(row.table, places, strict=True):  # INV-24, INV-31
                self.streams.read(forward, Page("device", page))
                assert self.content[Page("device", page)] == place
            for page in pages[row.number] or []:
                row.contents.append(row.following(symbol, self.page_size))
                row.table.append(page)
                row.steps.append(self.step)
                self.streams.write(forward, Page("device", page))
                self.content[Page("device", page)] = (tenant, tuple(row.contents))
        self.cache.begin_after(self.step)

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self) -> None:
        self.streams.know(self.forwards[self.in_flight.popleft()])

    @precondition(lambda self: any(row.steps for row in self.rows.values()))
    @rule(pick=picks, count=st.integers(1, 4))
    def publish(self, pick: int, count: int) -> None:
        rows = [row for row in self.rows.values() if row.steps]
        row = rows[pick % len(rows)]
        pages = row.private[:count]
        first = len(row.table) - len(row.steps)
        content = tuple(row.contents[first : first + len(pages)])
        relocations, epoch = self.cache.versions.relocation_version, self.cache.versions.tree_epoch
        before = set(self.model.device)
        canonical = self.cache.publish(row.receipt, b"".join(content), ints(pages), max(row.steps[:count])).tolist()
        assert canonical == self.model.publish(row.number, content, pages)
        row.table[first : first + len(canonical)] = canonical
        del row.steps[: len(canonical)]
        moved = canonical != pages[: len(canonical)]
        assert self.cache.versions.relocation_version == relocations + moved  # INV-41
        assert (self.cache.versions.tree_epoch > epoch) == (set(self.model.device) != before)
        self.ran["moved"] += moved
        self.ran["behind a load"] += len(canonical) < len(pages)

    @rule(tenant=tenants, pages=symbols, stores=st.booleans(), stays=st.booleans(), share=st.sampled_from([0, 7]))
    def serve(self, tenant: bytes, pages: list[int], stores: bool, stays: bool, share: int) -> None:
        """A request's life at once, as the planner would do it."""
        self.admit(tenant, pages, 1, share, "run")
        row = self.rows.get(self.steps)
        if row is None:
            return
        while row.receipt.ops:
            self.settle(list(self.copies).index(min(row.receipt.ops)), True, False)
            self.observe()
        while self.in_flight:
            self.commit()
        self.launch({list(self.rows).index(row.number)}, len(pages) - len(row.contents), 0, False)
        self.commit()
        if row.steps:
            self.publish([each for each in self.rows.values() if each.steps].index(row), 9)
            self.observe()
        if stores:
            self.begin_stores(99)
            self.observe()
        if not stays:
            self.release(list(self.rows).index(row.number))

    @precondition(lambda self: self.rows)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        row = self.rows[list(self.rows)[pick % len(self.rows)]]
        self.lose_private(row)
        self.cache.release(row.receipt)
        with pytest.raises(AssertionError, match="released before"):  # INV-11
            self.cache.release(row.receipt)
        self.gone(row)

    @rule(count=st.integers(1, 13))
    def squeeze(self, count: int) -> None:
        """Takes device pages and gives them back: somebody was evicted."""
        pages = self.take([0] * count)
        if pages:
            self.cache.give(ints(pages))
            self.model.private -= set(pages)
            self.model.free |= set(pages)

    # ---- rules: copies

    @rule(max_pages=st.sampled_from([1, 2, 99, 99]))
    def begin_stores(self, max_pages: int) -> None:
        copies = self.cache.begin_stores(max_pages)
        assert sum(copy.host_pages.size for copy in copies) <= max_pages
        by_digest = {digest(place): place for place in self.model.device}
        for copy in copies:
            assert copy.run is not None and copy.kind is CopyKind.STORE
            places = [by_digest[each] for each in copy.run.digests]
            assert places == parts(places[-1])[-len(places) :] and digest(above(places[0])) == copy.run.parent
            assert copy.run.key == b"".join(place[1][-1] for place in places)
            assert copy.run.namespace == digest((places[0][0], ()))
            assert self.admission is HostAdmission.WRITE_THROUGH or self.model.wanted >= set(places)
            self.model.begin_store(copy.op, places, copy.device_pages.tolist(), copy.host_pages.tolist())
            self.copies[copy.op] = (copy, self.start_copy(copy))
        if sum(copy.host_pages.size for copy in copies) == max_pages:
            return
        lacking = self.model.device.keys() - self.model.host.keys()
        if not self.model.free_host and not self.model.host_evictable():
            self.model.given_up |= lacking
            self.ran["no room"] += bool(lacking)
        if self.admission is HostAdmission.SELECTIVE:
            lacking &= self.model.wanted
        assert all(self.model.excused(place) for place in lacking), "a page that should be stored is not"

    @precondition(lambda self: self.copies)
    @rule(pick=picks, ok=st.sampled_from([True, True, True, False]), drops=st.booleans())
    def settle(self, pick: int, ok: bool, drops: bool) -> None:
        """The oldest copy of a stream ends; or any store turns out to have been dropped before it began."""
        op = list(self.copies)[pick % len(self.copies)]
        kind = self.copies[op][0].kind
        if ok or not drops or kind is CopyKind.LOAD:
            op = min(number for number, (copy, _) in self.copies.items() if copy.kind is kind)
        copy, event = self.copies.pop(op)
        written = [Page("device", p) for p in copy.device_pages] if kind is CopyKind.LOAD else []
        written = written or [Page("host", p) for p in copy.host_pages]
        if not ok:
            self.content.update(dict.fromkeys(written))
            self.is_cut = True
        if not ok and drops and kind is CopyKind.STORE:
            self.streams.cancel(event)
        else:
            self.streams.know(event)
        relocations = self.cache.versions.relocation_version
        lost = self.cache.settle(op, ok=ok)
        with pytest.raises(AssertionError, match="not in flight"):  # INV-22
            self.cache.settle(op, ok=ok)
        if kind is CopyKind.LOAD:
            expected = self.model.end_load(op, ok)
            assert {id(receipt) for receipt in lost} == {id(self.rows[number].receipt) for number in expected}
            assert self.cache.versions.relocation_version == relocations + bool(lost)
            for number in expected:
                self.recompute(self.rows[number])
            self.ran["loaded" if ok else "failed loads"] += 1
            self.ran["lost rows"] += len(lost)
            return
        assert not lost
        stored = self.model.end_store(op, ok)
        self.ran["stored" if ok else "failed stores"] += 1
        self.take_uploads(copy, stored if ok else [])

    @precondition(lambda self: self.uploads)
    @rule(pick=picks)
    def end_upload(self, pick: int) -> None:
        op = list(self.uploads)[pick % len(self.uploads)]
        self.streams.know(self.uploads.pop(op))
        self.cache.end_upload(op)
        self.model.end(op)
        self.ran["uploads"] += 1

    @rule(tenant=tenants, pages=symbols, rest=picks, max_pages=st.integers(1, 6))
    def begin_prefetch(self, tenant: bytes, pages: list[int], rest: int, max_pages: int) -> None:
        prompt = self.prompt(pages, rest)
        _, _, anywhere = self.checked_match(tenant, prompt)
        wanted = self.usable(prompt)[len(anywhere) :][:max_pages]
        begun = self.cache.begin_prefetch(tenant, prompt, max_pages)
        end, model = (tenant, anywhere), self.model
        arriving = {each for run, _ in self.fetches.values() for each in run.digests}
        if not wanted or not model.is_host_ready(end) or digest((tenant, (*anywhere, wanted[0]))) in arriving:
            assert begun is None
            return
        staged = OpModel("prefetch", end, [], [])
        model.ops[0] = staged  # its hold comes before its pages
        count = min(len(wanted), len(model.free_host) + len(model.host_evictable()))
        if begun is None:
            assert count == 0
            del model.ops[0]
            return
        assert begun.run.pages.size == count > 0 and begun.run.parent == digest(end)
        assert begun.run.key == b"".join(wanted[:count])
        model.evict_host(max(0, count - len(model.free_host)))
        del model.ops[0]
        staged.host_pages = begun.run.pages.tolist()
        model.take_host(staged.host_pages)
        model.ops[begun.op] = staged
        event = self.streams.start(f"fetch {begun.op}")
        for page in staged.host_pages:
            self.streams.write(event, Page("host", page))
        self.fetches[begun.op] = (begun.run, event)

    @precondition(lambda self: self.fetches)
    @rule(pick=picks, share=st.sampled_from([0, 1, 9, 9]), aborts=st.booleans())
    def end_prefetch(self, pick: int, share: int, aborts: bool) -> None:
        op = list(self.fetches)[pick % len(self.fetches)]
        if aborts and not self.model.ops[op].is_lost:
            self.cache.abort_prefetch(op)
            self.model.ops[op].end, self.model.ops[op].is_lost = (self.model.ops[op].end[0], ()), True
            self.ran["aborts"] += 1
            return
        run, event = self.fetches.pop(op)
        self.streams.know(event)
        num_ok = min(share, len(run.digests))
        num_new = self.cache.end_prefetch(op, num_ok)
        staged = self.model.end(op)
        contents = [run.key[i : i + self.page_bytes] for i in range(0, len(run.key), self.page_bytes)]
        for i, page in enumerate(staged.host_pages):
            place = (staged.end[0], (*staged.end[1], *contents[: i + 1]))
            self.content[Page("host", page)] = place if i < num_ok else None
        if staged.is_lost or not self.model.is_host_ready(staged.end):
            assert num_new == 0
            self.model.free_host |= set(staged.host_pages)
            self.ran["prefetches without a place"] += 1
            return
        self.model.free_host |= set(staged.host_pages[num_ok:])
        assert num_new == self.model.insert_host(staged.end, tuple(contents[:num_ok]), staged.host_pages[:num_ok])
        self.ran["prefetched"] += bool(num_new)

    # ---- rules: everything

    @rule(tier=st.sampled_from([None, Tier.DEVICE, Tier.HOST]), seldom=st.integers(0, 3))
    def flush(self, tier: Tier | None, seldom: int) -> None:
        if seldom:
            return
        num_freed = self.cache.flush(tier)
        assert num_freed == self.model.flush(tier)
        self.is_cut = True
        self.inv_37_flush_leaves_only_what_is_held(tier)
        self.ran["flushes in flight"] += bool(self.copies)

    @rule(seldom=st.integers(0, 1))
    def grow(self, seldom: int) -> None:
        """More of the host tier becomes usable."""
        model = self.model
        if not seldom and model.num_ready < model.num_host_pages:
            model.free_host.add(model.num_ready)
            model.num_ready += 1
            self.cache.grow_host(model.num_ready)

    @rule(seldom=st.integers(0, 5), torn=st.booleans(), long=st.booleans())
    def restart(self, seldom: int, torn: bool, long: bool) -> None:
        """The process dies; the next one adopts what the host holds, parents first."""
        old = self.model
        kept = {place for place in old.host if place not in old.storing}
        if seldom or not kept:
            return
        if torn:  # one page has no checksum, and with it those below it
            victim = max(kept, key=lambda place: old.host[place])
            kept = {place for place in kept if victim not in parts(place)}
        content = {page: self.content[page] for page in self.content if page.tier == "host"}
        self.model = TierModel(old.num_pages, old.num_host_pages, old.num_ready)
        self.fresh()
        self.content = content
        runs = self.runs(kept, {place: old.host[place] for place in kept}, long)
        orphan = self.stray(kept, old)
        assert self.cache.adopt([run for run, _ in runs] + orphan) == len(kept)
        for run, places in runs:
            self.model.take_host(run.pages.tolist())
            start = above(places[0])
            self.model.insert_host(start, tuple(place[1][-1] for place in places), run.pages.tolist())
        self.ran["adopted"] += len(kept)

    @rule()
    def take_events(self) -> None:
        num_events = tier_checks.inv_36_events_replay_to_what_each_tier_can_give(self.cache, self.model, self.replicas)
        self.ran["events"] += num_events

    # ---- invariants after every step

    @invariant()
    def structure(self) -> None:
        check_structure(self.cache)
        model, cache = self.model, self.cache
        tier_checks.inv_02_the_tree_holds_what_the_model_holds(cache, model)
        receipts = {number: row.receipt for number, row in self.rows.items()}
        tier_checks.inv_11_locks_are_what_receipts_and_copies_hold(cache, model, receipts)
        tier_checks.inv_12_what_is_held_stays(cache, model)
        tier_checks.inv_16_the_evictable_counts_agree_with_the_model(cache, model)
        tier_checks.inv_17_free_evictable_protected_and_private_make_the_device_pool(cache, model)
        tier_checks.inv_18_cached_staged_and_orphaned_make_the_host_pool(cache, model)
        tier_checks.inv_22_the_copies_in_flight_are_those_not_settled(cache, model)
        self.observe()

    @invariant()
    def inv_27_who_reads_what_is_being_loaded_knows(self) -> None:
        for row in self.rows.values():
            path = parts(self.model.held[row.number])
            if row.receipt.host_pages.size:
                continue  # it has not decided yet; if others loaded meanwhile, it comes too late
            assert row.receipt.ops == {self.model.loading[place] for place in path if place in self.model.loading}

    @invariant()
    def inv_31_ready_pages_hold_their_tokens_in_context(self) -> None:
        for place, page in self.model.device.items():
            assert place in self.model.loading or self.content[Page("device", page)] == place
        for place, page in self.model.host.items():
            assert place in self.model.storing or self.content[Page("host", page)] == place

    @invariant()
    def inv_35_prefetched_and_left_out_make_what_was_wanted(self) -> None:
        exchange = self.cache.exchange
        in_flight = sum(len(run.digests) for run, _ in self.fetches.values())
        assert exchange.num_wanted == exchange.num_prefetched + exchange.unfulfilled.total() + in_flight

    def inv_37_flush_leaves_only_what_is_held(self, tier: Tier | None) -> None:
        model, held = self.model, {part for place in self.model.held.values() for part in parts(place)}
        if tier is None:
            assert self.cache.num_evictable == self.cache.host.num_evictable == 0
            assert model.places <= held
        if tier is Tier.DEVICE:
            assert self.cache.num_evictable == 0
        if tier is Tier.HOST:
            assert model.host.keys() <= held

    def teardown(self) -> None:
        """INV-13: every sequence must be able to end, with nothing held and nothing left."""
        while self.in_flight:
            self.commit()
        while self.copies:
            self.settle(0, True, False)
        while self.fetches:
            self.end_prefetch(0, 9, False)
        while self.uploads:
            self.end_upload(0)
        while self.rows:
            self.release(0)
        assert all(not node.num_locks and not node.num_host_locks for node in self.cache.tree.nodes())
        self.cache.flush()
        assert not self.cache.tree.roots and len(self.cache.ops) == 0
        assert self.cache.pages.num_free == self.model.num_pages - 1
        assert self.cache.host.pages.num_free == self.model.num_ready - 1
        self.ran["ordered accesses"] += self.streams.num_checked

    # ---- helpers

    def observe(self) -> None:
        """Between any two operations, pages go from state to state as they may."""
        states = tier_checks.states(self.cache)
        tier_checks.transitions_are_legal(self.states, states, is_cut=self.is_cut)
        self.states, self.is_cut = states, False

    def prompt(self, chosen: list[int], rest: int) -> bytes:
        pages = b"".join(page_tokens(symbol, self.page_size) for symbol in chosen)
        return pages + bytes(4 * (rest % self.page_size if self.page_size > 1 else rest % 2))

    def usable(self, prompt: bytes) -> Prefix:
        """INV-33: whole pages without the last token."""
        count = max(0, len(prompt) // 4 - 1) // self.page_size
        return tuple(prompt[i * self.page_bytes : (i + 1) * self.page_bytes] for i in range(count))

    def checked_match(self, tenant: bytes, prompt: bytes) -> tuple[Match, Prefix, Prefix]:
        match = self.cache.match(tenant, prompt)
        device, anywhere = self.model.match(tenant, self.usable(prompt))
        num_host = len(anywhere) - len(device)
        assert (match.num_tokens, match.num_host_tokens) == (len(device) * self.page_size, num_host * self.page_size)
        self.ran["device hits"] += bool(device)
        self.ran["host hits"] += bool(num_host)
        return match, device, anywhere

    def reasons_are_true(self, tenant: bytes, prompt: bytes, device: Prefix, anywhere: Prefix) -> None:
        usable = self.usable(prompt)
        miss = self.cache.explain(tenant, prompt, len(device) * self.page_size)
        if anywhere != device:
            assert miss.reason is MissReason.NOT_WORTH_LOADING and miss.num_tokens == len(device) * self.page_size
            miss = self.cache.explain(tenant, prompt, len(anywhere) * self.page_size)
        self.ran[miss.reason] += 1
        assert (miss.reason is MissReason.PAGE_REMAINDER) == (anywhere == usable)
        if anywhere == usable:
            return
        following = digest((tenant, usable[: len(anywhere) + 1]))
        arriving = any(following in run.digests for run, _ in self.fetches.values())
        assert (miss.reason is MissReason.IN_FLIGHT) == arriving
        others = {place for place in self.model.places if place[0] == tenant and place[1][:-1] == anywhere}
        if miss.reason is MissReason.NAMESPACE:
            assert self.model.places or self.model.held or self.model.ops
        if miss.reason is MissReason.DIVERGED:
            assert others
            lengths = [common_tokens(place[1][-1], usable[len(anywhere)]) for place in others]
            assert miss.num_tokens == len(anywhere) * self.page_size + max(lengths)
        if miss.reason is MissReason.COLD:
            assert not others or not anywhere

    def locked(self, receipt: Receipt, tenant: bytes, prefix: Prefix, num_device: int) -> Row:
        self.steps += 1
        row = Row(self.steps, receipt, receipt.pages.tolist(), list(prefix[:num_device]))
        places = parts((tenant, prefix))
        assert row.table == [self.model.device[place] for place in places[:num_device]]
        assert receipt.host_pages.tolist() == [self.model.host[place] for place in places[num_device:]]
        self.rows[row.number] = row
        self.model.held[row.number] = (tenant, prefix)
        self.model.use((tenant, prefix))
        self.model.wanted |= set(places)
        return row

    def load(self, row: Row) -> bool:
        """Loads the host part of a row; False when there are no pages for it."""
        num_host = row.receipt.host_pages.size
        if not num_host:
            return True
        host_pages = row.receipt.host_pages.tolist()
        pages = self.take([0] * num_host)
        if pages is None:
            return False
        copy = self.cache.begin_load(row.receipt, ints(pages))
        loading = self.model.begin_load(copy.op, row.number, pages)
        assert copy.kind is CopyKind.LOAD and copy.run is None and not row.receipt.host_pages.size
        assert (copy.device_pages.tolist(), copy.host_pages.tolist()) == (pages, host_pages)  # TC-23
        assert copy.host_pages.tolist() == loading.host_pages
        self.copies[copy.op] = (copy, self.start_copy(copy))
        row.table += pages
        row.contents = list(self.model.held[row.number][1])
        assert row.receipt.pages.tolist() == row.table
        return True

    def start_copy(self, copy: PageCopy) -> Event:
        assert copy.op > self.num_sent, "op numbers grow"  # INV-28
        self.num_sent = copy.op
        assert copy.after_step <= self.step, "a copy waits for an event that nobody recorded"  # INV-28
        after = [self.forwards[copy.after_step]] if copy.after_step else []
        event = self.streams.start("load" if copy.kind is CopyKind.LOAD else "store", *after)
        tiers = ("host", "device") if copy.kind is CopyKind.LOAD else ("device", "host")
        for device_page, host_page in zip(copy.device_pages.tolist(), copy.host_pages.tolist(), strict=True):
            source, target = (Page(tier, {"device": device_page, "host": host_page}[tier]) for tier in tiers)
            self.streams.read(event, source)
            self.streams.write(event, target)
            self.content[target] = self.content[source]
        return event

    def take_uploads(self, copy: PageCopy, stored: list[Place]) -> None:
        num_pages = copy.host_pages.size
        reserved = sum(len(op.host_pages) for op in self.model.ops.values() if op.kind == "upload")
        fits = len(stored) == num_pages and reserved + num_pages <= self.max_upload
        uploads = self.cache.take_uploads()
        assert len(uploads) == (fits and self.max_upload > 0)
        for upload in uploads:
            assert upload.run is copy.run
            event = self.streams.start(f"put {upload.op}")
            for page, place in zip(upload.run.pages.tolist(), stored, strict=True):
                self.streams.read(event, Page("host", page))
                assert self.content[Page("host", page)] == place
            self.model.ops[upload.op] = OpModel("upload", stored[-1], [], upload.run.pages.tolist())
            self.uploads[upload.op] = event

    def recompute(self, row: Row) -> None:
        """A row that lost pages goes on where its prefix ends now."""
        self.lose_private(row)
        tenant, prefix = self.model.held[row.number]
        row.contents = list(prefix)
        row.table = [self.model.device[part] for part in parts((tenant, prefix)) if part in self.model.device]
        row.contents = row.contents[: len(row.table)]
        assert row.receipt.pages.tolist() == row.table

    def lose_private(self, row: Row) -> None:
        private = row.private
        self.cache.give(ints(private))
        self.model.private -= set(private)
        self.model.free |= set(private)
        row.steps.clear()

    def gone(self, row: Row) -> None:
        del self.rows[row.number]
        self.model.use(self.model.held.pop(row.number))

    def take(self, wanted: list[int]) -> list[int] | None:
        short = len(wanted) - len(self.model.free)
        pages = self.cache.take(ints(wanted))
        if short > len(self.model.evictable()):
            assert pages is None
            self.ran["refused"] += 1
            return None
        assert pages is not None
        gone = self.model.evict(max(0, short))
        self.ran["deleted"] += len(gone)
        self.ran["demoted"] += max(0, short) - len(gone)
        self.model.take(pages.tolist())
        self.observe()
        return pages.tolist()

    def runs(self, kept: set[Place], pages: dict[Place, int], long: bool) -> list[tuple[PageRun, list[Place]]]:
        """Returns the kept pages as runs, parents first: single pages, or unbranched runs."""
        runs: list[list[Place]] = []
        for place in sorted(kept, key=lambda place: (len(place[1]), pages[place])):
            end = next((run for run in runs if run[-1] == above(place)), None)
            siblings = [other for other in kept if above(other) == above(place)]
            if long and end is not None and len(siblings) == 1:
                end.append(place)
            else:
                runs.append([place])
        return [(self.run(run, [pages[place] for place in run]), run) for run in runs]

    def run(self, places: list[Place], pages: list[int]) -> PageRun:
        return PageRun(
            pages=ints(pages),
            namespace=digest((places[0][0], ())),
            parent=digest(above(places[0])),
            digests=[digest(place) for place in places],
            key=b"".join(place[1][-1] for place in places),
        )

    def stray(self, kept: set[Place], old: TierModel) -> list[PageRun]:
        """Returns a page whose parent was lost, if there is one; nobody may find it."""
        stray = [place for place in old.host if above(place)[1] and above(place) not in kept and place not in kept]
        return [self.run(stray[:1], [old.host[stray[0]]])] if stray else []


def common_tokens(ours: bytes, theirs: bytes) -> int:
    """Counts the leading tokens that two pages share, one by one."""
    count = 0
    while count < len(ours) // 4 and ours[4 * count : 4 * count + 4] == theirs[4 * count : 4 * count + 4]:
        count += 1
    return count


def run_machine(page_size: int, admission: HostAdmission, num_examples: int, num_steps: int) -> Counter[str]:
    ran: Counter[str] = Counter()

    def machine() -> TierMachine:
        return TierMachine(page_size, admission, ran)

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"page size {page_size}, {admission}: {dict(ran)}")
    return ran


@pytest.mark.long  # a short run does not come by everything that it must have seen
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("admission", list(HostAdmission))
def test_two_tiers_agree_with_the_model_and_order_every_access(page_size: int, admission: HostAdmission) -> None:
    ran = run_machine(page_size, admission, 100, 50)
    for what in ("host hits", "loaded", "stored", "demoted", "deleted", "moved", "prefetched", "ordered accesses"):
        assert ran[what], f"{what} never happened; the sequences miss it"


@pytest.mark.long
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("admission", list(HostAdmission))
def test_two_tiers_agree_with_the_model_for_long(page_size: int, admission: HostAdmission) -> None:
    ran = run_machine(page_size, admission, 3000, 80)
    for what in (
        "host hits",
        "loaded",
        "failed loads",
        "lost rows",
        "waits",
        "behind a load",
        "stored",
        "failed stores",
    ):
        assert ran[what], f"{what} never happened; the sequences miss it"
    for what in ("demoted", "deleted", "moved", "prefetched", "aborts", "adopted", "uploads", "too late", "no room"):
        assert ran[what], f"{what} never happened; the sequences miss it"
    for reason in MissReason:
        assert ran[reason], f"no miss was {reason}"
