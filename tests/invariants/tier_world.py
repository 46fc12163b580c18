"""One process of the cache on two tiers, beside the models it is compared with; what all rules share."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from hiserve.cache.index.prefix_cache import HostAdmission, Match, PrefixCache, PrefixLock, Tier
from hiserve.cache.index.uploads import RESERVED_SHARE
from hiserve.core.transfers import CopyKind, PageCopy, PageRun
from tests.invariants import kv_checks, tier_checks
from tests.invariants.index_checks import check_structure
from tests.invariants.index_model import Place, Prefix, page_tokens
from tests.invariants.shelf import Shelf
from tests.invariants.streams import Event, Page, Streams
from tests.invariants.tier_checks import NAMESPACE
from tests.invariants.tier_model import TierModel, ints, parts

TENANTS = (b"", b"", b"", b"a")
ACCOUNT = b"all"
SYMBOLS = (0, 0, 0, 1, 2)


@dataclass(frozen=True)
class Setting:
    """What one machine is made for.

    Attributes:
        page_size: Tokens per page.
        admission: Which pages are stored on the host.
        by_priority: Whether both tiers evict by priority; else least recently used first.
    """

    page_size: int
    admission: HostAdmission
    by_priority: bool


@dataclass
class Row:
    """A request that runs: the pages of its prefix, then those it computed itself."""

    number: int
    lock: PrefixLock
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


class World:
    """The manager, the model, the streams and the shelf together.

    Args:
        setting: What it is made for.
        random: Decides everything.
        directory: For the named segment.
        ran: Counts what really happened.

    Attributes:
        told: What the manager decided, in order; the same again for the same decisions of others.
    """

    def __init__(self, setting: Setting, random: Random, directory: Path, ran: Counter[str]) -> None:
        self.setting = setting
        self.page_size = setting.page_size
        self.page_bytes = 4 * setting.page_size
        self.ran = ran
        self.max_upload = random.choice((0, 2, 99))
        num_host_pages = random.randint(2, 16)
        self.model = TierModel(random.randint(6, 18), num_host_pages, max(2, num_host_pages - 2), setting.by_priority)
        self.shelf = Shelf(directory, setting.page_size, num_host_pages)
        self.num_rows = 0
        self.now_s = 0
        self.told: list[object] = []
        self.begin()

    def begin(self) -> None:
        """A process begins."""
        model = self.model
        self.routers = kv_checks.Told(self.page_size)
        self.cache = PrefixCache(
            num_pages=model.num_pages,
            page_size=self.page_size,
            namespace=NAMESPACE,
            eviction="priority" if self.setting.by_priority else "lru",
            num_host_pages=model.num_host_pages,
            num_ready_host_pages=model.num_ready,
            host_admission=self.setting.admission,
            max_upload_pages=self.max_upload,
            listener=self.routers.events,
        )
        if self.max_upload:
            model.num_reserved = max(1, min(self.max_upload, model.num_host_pages // RESERVED_SHARE))
        self.streams = Streams()
        self.rows: dict[int, Row] = {}
        self.copies: dict[int, tuple[PageCopy, Event]] = {}
        self.fetches: dict[int, tuple[PageRun, Event, Place]] = {}
        self.uploads: dict[int, Event] = {}
        self.forwards: dict[int, Event] = {}
        self.in_flight: deque[int] = deque()
        self.step = 0
        self.content: dict[Page, Place | None] = {}
        self.replicas: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.states = tier_checks.states(self.cache)
        self.is_cut = False
        self.num_sent = 0

    # --- checks

    def check(self) -> None:
        """Everything that holds between any two operations."""
        cache, model = self.cache, self.model
        check_structure(cache)
        tier_checks.inv_02_the_tree_holds_what_the_model_holds(cache, model)
        tier_checks.inv_09_priorities_are_those_of_the_model(cache, model)
        tier_checks.inv_09_uses_have_the_order_of_the_model(cache, model)
        tier_checks.inv_42_retained_pages_are_those_of_the_model(cache, model)
        receipts = {number: row.lock for number, row in self.rows.items()}
        tier_checks.inv_11_locks_are_what_receipts_and_copies_hold(cache, model, receipts)
        tier_checks.inv_12_what_is_held_stays(cache, model)
        tier_checks.inv_16_the_evictable_counts_agree_with_the_model(cache, model)
        tier_checks.inv_17_free_evictable_protected_and_private_make_the_device_pool(cache, model)
        tier_checks.inv_18_cached_staged_and_orphaned_make_the_host_pool(cache, model)
        tier_checks.a_store_is_promised_what_was_offered_and_is_cached(cache, model)
        tier_checks.inv_22_the_copies_in_flight_are_those_not_settled(cache, model)
        tier_checks.inv_23_every_part_of_a_node_knows_its_copy(cache, model)
        tier_checks.inv_27_who_reads_what_is_being_loaded_knows(model, receipts)
        self.inv_29_every_copy_in_flight_was_sent()
        self.inv_31_what_can_be_found_holds_its_tokens_in_context()
        self.inv_35_prefetched_and_left_out_make_what_was_wanted()
        self.observe()

    def inv_29_every_copy_in_flight_was_sent(self) -> None:
        assert {op.number for op in self.cache.ops} == {*self.copies, *self.fetches, *self.uploads}

    def inv_31_what_can_be_found_holds_its_tokens_in_context(self) -> None:
        """And so INV-30: nothing that failed to arrive can be found."""
        for place, page in self.model.device.items():
            assert place in self.model.loading or self.content[Page("device", page)] == place
        for place, page in self.model.host.items():
            assert place in self.model.storing or self.content[Page("host", page)] == place

    def inv_35_prefetched_and_left_out_make_what_was_wanted(self) -> None:
        store_sync = self.cache.store_sync
        in_flight = sum(len(run.digests) for run, _, _ in self.fetches.values())
        assert store_sync.num_wanted == store_sync.num_prefetched + store_sync.unfulfilled.total() + in_flight

    def observe(self) -> None:
        """Between any two operations, pages go from state to state as they may."""
        states = tier_checks.states(self.cache)
        tier_checks.transitions_are_legal(self.states, states, is_cut=self.is_cut)
        self.states, self.is_cut = states, False

    # --- prompts

    def prompt(self, random: Random) -> tuple[bytes, bytes]:
        """Returns a tenant and a prompt of few pages, most of which others have, too."""
        pages = b"".join(page_tokens(random.choice(SYMBOLS), self.page_size) for _ in range(random.randint(0, 7)))
        return random.choice(TENANTS), pages + bytes(4 * random.randint(0, max(1, self.page_size - 1)))

    def usable(self, prompt: bytes) -> Prefix:
        """INV-33: whole pages without the last token."""
        count = max(0, len(prompt) // 4 - 1) // self.page_size
        return tuple(prompt[i * self.page_bytes : (i + 1) * self.page_bytes] for i in range(count))

    def match(self, tenant: bytes, prompt: bytes) -> tuple[Match, Prefix, Prefix]:
        """Returns a match, the prefix that the device has, and that which any tier has; INV-31, INV-34."""
        match = self.cache.match(tenant, prompt)
        device, anywhere = self.model.match(tenant, self.usable(prompt))
        num_host = len(anywhere) - len(device)
        assert (match.num_tokens, match.num_host_tokens) == (len(device) * self.page_size, num_host * self.page_size)
        self.ran["device hits"] += bool(device)
        self.ran["host hits"] += bool(num_host)
        return match, device, anywhere

    def is_arriving(self, place: Place) -> bool:
        """Whether a prefetch brings a page, and has a place for it."""
        alive = (run for op, (run, _, _) in self.fetches.items() if not self.model.ops[op].is_lost)
        return any(tier_checks.digest(place) in run.digests for run in alive)

    # --- pages and copies

    def take(self, count: int) -> list[int] | None:
        """Takes device pages, as both see it."""
        short = count - len(self.model.free)
        costs = {
            place: node.eviction_cost for place, node, _ in tier_checks.pages_in_tree(self.cache) if node.pages.size
        }
        pages = self.cache.allocate(ints([0] * count))
        if short > len(self.model.evictable()):
            assert pages is None
            self.ran["refused"] += 1
            return None
        assert pages is not None
        num_retained = len(self.model.until)
        gone = self.model.evict(max(0, short), costs)
        self.ran["retained evicted"] += len(self.model.until) < num_retained
        self.ran["deleted"] += len(gone)
        self.ran["demoted"] += max(0, short) - len(gone)
        self.model.take(pages.tolist())
        self.observe()
        self.told.append(("take", pages.tolist()))
        return pages.tolist()

    def spare(self) -> set[Place]:
        """Returns what the device counts among what may go at no loss."""
        return {place for place, node, _ in tier_checks.pages_in_tree(self.cache) if node.is_spare}

    def lose_host(self, spare: set[Place], again: frozenset[bytes] = frozenset()) -> set[Place]:
        """Takes note of what left the host to make room, though ``again`` may have come back; returns it."""
        on_host = {place for place, node, _ in tier_checks.pages_in_tree(self.cache) if node.host_pages.size}
        gone = self.model.host.keys() - on_host
        gone |= {place for place in self.model.host if again and tier_checks.digest(place) in again}
        self.ran["copies forgotten"] += bool(gone & self.model.device.keys())
        self.model.lose_host(set(gone), spare)
        return gone

    def share_all(self) -> None:
        """One account for all tenants: whose share is whose is for ``test_index_machine.py``."""
        for root in self.cache.tree.roots.values():
            self.cache.tiers.assign_account(root, ACCOUNT)

    def give(self, pages: Iterable[int]) -> None:
        """INV-20: pages that were taken and given back are free again, as they were before."""
        pages = list(pages)
        self.cache.free(ints(pages))
        self.model.private -= set(pages)
        self.model.free |= set(pages)

    def start(self, copy: PageCopy) -> None:
        """A copy between device and host is sent to its stream."""
        assert copy.op > self.num_sent, "op numbers grow"  # INV-28
        self.num_sent = copy.op
        assert copy.after_step <= self.step, "a copy waits for an event that nobody recorded"  # INV-28
        after = [self.forwards[copy.after_step]] if copy.after_step else []
        is_load = copy.kind is CopyKind.LOAD
        event = self.streams.start("load" if is_load else "store", *after)
        if copy.run is not None:
            self.write_host(copy.run)
        for pages in zip(copy.device_pages.tolist(), copy.host_pages.tolist(), strict=True):
            device, host = Page("device", pages[0]), Page("host", pages[1])
            source, target = (host, device) if is_load else (device, host)
            assert not is_load or self.shelf.is_intact(host.number)
            self.streams.read(event, source)  # INV-24 to INV-27, here and below
            self.streams.write(event, target)
            self.content[target] = self.content[source]
        self.copies[copy.op] = (copy, event)
        self.told.append((copy.op, copy.kind, copy.device_pages.tolist(), copy.host_pages.tolist(), copy.after_step))

    def write_host(self, run: PageRun) -> None:
        """What was given back is forgotten before anything new is written to it."""
        self.shelf.free(self.cache.take_freed_host_pages())
        self.shelf.begin(run)

    def record(self) -> None:
        """A plan without copies tells the pool what was given back, and until when pages are retained."""
        self.shelf.free(self.cache.take_freed_host_pages())
        self.shelf.retain(*self.cache.host_times.take())

    def end(self) -> None:
        """INV-13: with no copies and no rows left, nothing is held; INV-37: a flush leaves nothing at all."""
        assert not (self.copies or self.fetches or self.uploads or self.rows or self.in_flight)
        assert all(not node.num_locks and not node.num_host_locks for node in self.cache.tree.nodes())
        assert all(not root.num_locks and not root.num_host_locks for root in self.cache.tree.roots.values())
        self.cache.flush()
        assert not self.cache.tree.roots and len(self.cache.ops) == 0
        assert self.cache.device.pages.num_free == self.model.num_pages - 1
        assert self.cache.host.pages.num_free == self.model.num_ready - 1
        self.ran["ordered accesses"] += self.streams.num_checked

    # --- rows

    def release(self, row: Row) -> None:
        """A request ends, or is preempted, whatever it waits for."""
        self.ran["left while loading"] += bool(row.lock.ops)
        self.lose_private(row)
        self.cache.release(row.lock)
        self.forget(row)

    def lose_private(self, row: Row) -> None:
        self.give(row.private)
        row.steps.clear()

    def forget(self, row: Row) -> None:
        del self.rows[row.number]
        self.model.release(row.number)

    def recompute(self, row: Row) -> None:
        """A row that lost pages goes on where its prefix ends now."""
        self.lose_private(row)
        tenant, prefix = self.model.held[row.number]
        on_device = [part for part in parts((tenant, prefix)) if part in self.model.device]
        row.table = [self.model.device[part] for part in on_device]
        row.contents = list(prefix[: len(on_device)])
        assert row.lock.pages.tolist() == row.table
