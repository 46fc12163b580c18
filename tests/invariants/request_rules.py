"""What requests do: match, lock, load, run, publish, end; less politely than the planner would.

Pages are published while the forward that writes them is in flight.
"""

from __future__ import annotations

from random import Random

import pytest

from hiserve.cache.index.prefix_cache import HostAdmission, MissReason, PrefixLock
from hiserve.core.transfers import CopyKind
from tests.invariants import copy_rules
from tests.invariants.index_model import Prefix
from tests.invariants.streams import Page
from tests.invariants.tier_model import above, ints, parts
from tests.invariants.tier_world import ACCOUNT, Row, World

MAX_DEPTH = 2  # forwards in flight
MAX_PUBLISHED = 4
SHARES = (1, 7, 7, 7)  # of the pages that the host has, how many are wanted at most
PRIORITIES = (0, 0, 1, 5, -3)


class WalkoutError(Exception):
    """An error that passes through the body of a lock."""


def match(world: World, random: Random) -> None:
    tenant, prompt = world.prompt(random)
    found, device, anywhere = world.match(tenant, prompt)
    shorter = (world.cache.match(tenant, prompt[: 4 * n]) for n in range(len(prompt) // 4 + 1))
    lengths = [(each.num_tokens, each.num_tokens + each.num_host_tokens) for each in shorter]
    for column in zip(*lengths, strict=True):  # INV-32
        assert list(column) == sorted(column)
    assert lengths[-1] == (found.num_tokens, found.num_tokens + found.num_host_tokens)
    reasons_are_true(world, tenant, prompt, device, anywhere)


def admit(world: World, random: Random) -> None:
    """A request gets a row, and loads what the host has of its prefix, or a part of it."""
    how = random.choice(["run"] * 6 + ["leave", "raise", "wait"])
    admit_prompt(world, random, *world.prompt(random), random.choice((0, *SHARES)), how)


def come_back(world: World, random: Random) -> None:
    """A conversation goes on whose pages may have left the device."""
    if random.random() < 0.8:
        squeeze(world, random)
    places = sorted(world.model.places, key=lambda place: (place in world.model.device, -len(place[1]), place))
    if places:
        tenant, prefix = random.choice(places[:6])
        how = random.choice(("run", "run", "wait"))
        admit_prompt(world, random, tenant, b"".join(prefix) + bytes(4), random.choice(SHARES), how)


def admit_prompt(world: World, random: Random, tenant: bytes, prompt: bytes, share: int, how: str) -> Row | None:
    found, device, anywhere = world.match(tenant, prompt)
    num_host = min(share, found.num_host_tokens // world.page_size)
    prefix = anywhere[: len(device) + num_host]
    priority = random.choice(PRIORITIES)
    num_nodes, num_busy = count_nodes(world)
    try:
        with world.cache.lock(found, num_host * world.page_size, priority, ACCOUNT) as lock:
            row = locked(world, lock, tenant, prefix, len(device))
            world.model.hold(row.number, (tenant, prefix), priority)
            row.goal = world.usable(prompt + bytes(4))
            world.ran["splits"] += count_nodes(world)[0] > num_nodes
            world.ran["splits of a copy"] += count_nodes(world)[1] > num_busy
            if how == "raise":
                raise WalkoutError
            if how == "wait" or (how == "run" and load(world, row)):
                lock.detach()
    except WalkoutError:
        world.ran["exceptions"] += 1
    if not lock.is_open:
        world.forget(row)
        return None
    return row


def load_late(world: World, random: Random) -> None:
    """A load that others may have come before."""
    row = random.choice([row for row in world.rows.values() if row.lock.host_pages.size])
    places = parts(world.model.held[row.number])
    num_host = row.lock.host_pages.size
    if all(place not in world.model.device for place in places[-num_host:]):
        load(world, row)
        return
    world.ran["too late"] += 1
    with pytest.raises(AssertionError, match="match again"):
        world.cache.begin_load(row.lock, ints([0] * num_host))
    world.release(row)


def launch(world: World, random: Random) -> None:
    """A forward of some rows; those whose loads are in flight join only if it waits for them."""
    waits = random.random() < 0.5
    rows = random.sample(list(world.rows.values()), random.randint(1, min(3, len(world.rows))))
    joining = [row for row in rows if not row.lock.host_pages.size and (waits or not row.lock.ops)]
    forward(world, joining, random.randint(0, 3), random.randint(0, 2))


def forward(world: World, rows: list[Row], num_new: int, symbol: int) -> None:
    pages = {row.number: world.take(num_new) for row in rows}
    loads = {op for row in rows for op in row.lock.ops}
    world.ran["waits"] += len(loads)
    world.step += 1
    event = world.streams.start("forward", *(world.copies[op][1] for op in sorted(loads)))
    world.forwards[world.step] = event
    world.in_flight.append(world.step)
    for row in rows:
        tenant = world.model.held[row.number][0]
        places = parts((tenant, tuple(row.contents)))
        for page, place in zip(row.table, places, strict=True):  # INV-24, INV-31
            world.streams.read(event, Page("device", page))
            assert world.content[Page("device", page)] == place
        for page in pages[row.number] or []:
            row.contents.append(row.following(symbol, world.page_size))
            row.table.append(page)
            row.steps.append(world.step)
            world.streams.write(event, Page("device", page))
            world.content[Page("device", page)] = (tenant, tuple(row.contents))
    world.cache.begin_after(world.step)


def commit(world: World, random: Random) -> None:
    world.streams.know(world.forwards[world.in_flight.popleft()])


def publish(world: World, random: Random) -> None:
    publish_row(world, random.choice(publishable(world)), random.randint(1, MAX_PUBLISHED))


def publishable(world: World) -> list[Row]:
    """Returns the rows that have computed pages; what waits for a load is taken in after it (INV-36)."""
    return [row for row in world.rows.values() if row.steps and not row.lock.ops]


def publish_row(world: World, row: Row, count: int) -> None:
    """Pages that others have already give way to theirs: a relocation of a live row."""
    pages = row.private[:count]
    first = len(row.table) - len(row.steps)
    content = tuple(row.contents[first : first + len(pages)])
    relocations, epoch = world.cache.tiers.relocation_version, world.cache.tiers.tree_epoch
    before, clock = set(world.model.device), world.cache.tiers.clock
    canonical = world.cache.insert(row.lock, b"".join(content), ints(pages), max(row.steps[:count])).tolist()
    places = world.model.places
    assert canonical == world.model.publish(row.number, content, pages, is_use=world.cache.tiers.clock > clock)
    if world.max_upload and world.setting.admission is HostAdmission.WRITE_THROUGH:
        world.model.awaited |= world.model.places - places
    row.table[first : first + len(canonical)] = canonical
    del row.steps[: len(canonical)]
    moved = canonical != pages[: len(canonical)]
    assert world.cache.tiers.relocation_version == relocations + moved  # INV-41
    assert (world.cache.tiers.tree_epoch > epoch) == (set(world.model.device) != before)
    world.ran["relocated"] += moved
    world.ran["behind a load"] += len(canonical) < len(pages)


def serve(world: World, random: Random) -> None:
    """A request's life at once, as the planner would do it."""
    tenant, prompt = world.prompt(random)
    row = admit_prompt(world, random, tenant, prompt, random.choice((0, 7)), "run")
    if row is None:
        return
    while row.lock.ops:
        copy_rules.settle_op(world, min(row.lock.ops), ok=True, random=random)
        world.observe()
    while world.in_flight:
        commit(world, random)
    forward(world, [row], max(0, len(prompt) // 4 // world.page_size - len(row.contents)), 0)
    commit(world, random)
    if row.steps:
        publish_row(world, row, len(row.steps))
        world.observe()
    if random.random() < 0.5:
        copy_rules.begin_stores(world, random)
        world.observe()
    if random.random() < 0.5:
        world.release(row)


def release(world: World, random: Random) -> None:
    row = random.choice(list(world.rows.values()))
    world.release(row)
    with pytest.raises(AssertionError, match="released before"):  # INV-11
        world.cache.release(row.lock)


def retain(world: World, random: Random) -> None:
    row, num_pages, until_s = (
        random.choice(list(world.rows.values())),
        random.randint(0, 6),
        world.now_s + random.randint(1, 6),
    )
    num_ignored = world.cache.stats().num_not_retained
    world.cache.retain(row.lock, num_pages * world.page_size + world.page_size // 2, until_s)
    num_beyond = world.model.retain(row.number, num_pages, until_s)
    assert world.cache.stats().num_not_retained == num_ignored + num_beyond
    world.ran["retained"] += bool(world.model.until)
    world.ran["beyond the quota"] += num_beyond > 0


def wait(world: World, random: Random) -> None:
    world.now_s += random.randint(1, 3)
    world.cache.expire(world.now_s)
    over = {place for place, until in world.model.until.items() if until <= world.now_s}
    world.model.until = {place: until for place, until in world.model.until.items() if place not in over}
    world.ran["no longer retained"] += bool(over)


def squeeze(world: World, random: Random) -> None:
    """Takes device pages and gives them back: somebody was evicted."""
    world.give(world.take(random.randint(1, 13)) or [])


# --- inside


def locked(world: World, lock: PrefixLock, tenant: bytes, prefix: Prefix, num_device: int) -> Row:
    world.num_rows += 1
    row = Row(world.num_rows, lock, lock.pages.tolist(), list(prefix[:num_device]))
    places = parts((tenant, prefix))
    assert row.table == [world.model.device[place] for place in places[:num_device]]
    assert lock.host_pages.tolist() == [world.model.host[place] for place in places[num_device:]]
    world.rows[row.number] = row
    return row


def load(world: World, row: Row) -> bool:
    """Loads the host part of a row; False when there are no pages for it."""
    host_pages = row.lock.host_pages.tolist()
    if not host_pages:
        return True
    pages = world.take(len(host_pages))
    if pages is None:
        return False
    copy = world.cache.begin_load(row.lock, ints(pages))
    loading = world.model.begin_load(copy.op, row.number, pages)
    assert copy.kind is CopyKind.LOAD and copy.run is None and not row.lock.host_pages.size
    assert (copy.device_pages.tolist(), copy.host_pages.tolist()) == (pages, host_pages)  # TC-23
    assert host_pages == loading.host_pages
    world.start(copy)
    row.table += pages
    row.contents = list(world.model.held[row.number][1])
    assert row.lock.pages.tolist() == row.table
    return True


def count_nodes(world: World) -> tuple[int, int]:
    """Returns how many nodes there are, and how many of them a copy uses."""
    nodes = list(world.cache.tree.nodes())
    return len(nodes), sum(node.pending_op > 0 for node in nodes)


def reasons_are_true(world: World, tenant: bytes, prompt: bytes, device: Prefix, anywhere: Prefix) -> None:
    usable, model = world.usable(prompt), world.model
    miss = world.cache.explain(tenant, prompt, len(device) * world.page_size)
    if anywhere != device:
        assert miss.reason is MissReason.NOT_WORTH_LOADING and miss.num_tokens == len(device) * world.page_size
        world.ran[f"miss: {miss.reason}"] += 1
        miss = world.cache.explain(tenant, prompt, len(anywhere) * world.page_size)
    world.ran[f"miss: {miss.reason}"] += 1
    assert (miss.reason is MissReason.PAGE_REMAINDER) == (anywhere == usable)
    if anywhere == usable:
        return
    stored = world.cache.explain(tenant, prompt, len(anywhere) * world.page_size, is_in_store=True)
    world.ran[f"miss: {stored.reason}"] += 1
    assert stored.reason is (MissReason.IN_FLIGHT if miss.reason is MissReason.IN_FLIGHT else MissReason.NOT_FETCHED)
    arriving = world.is_arriving((tenant, usable[: len(anywhere) + 1]))
    assert (miss.reason is MissReason.IN_FLIGHT) == arriving
    others = {place for place in model.places if above(place) == (tenant, anywhere)}
    if miss.reason is MissReason.NAMESPACE:
        assert model.places or model.held or model.ops
    if miss.reason is MissReason.DIVERGED:
        assert others
        lengths = [common_tokens(place[1][-1], usable[len(anywhere)]) for place in others]
        assert miss.num_tokens == len(anywhere) * world.page_size + max(lengths)
    if miss.reason is MissReason.COLD:
        assert not others or not anywhere


def common_tokens(ours: bytes, theirs: bytes) -> int:
    """Counts the leading tokens that two pages share, one by one."""
    count = 0
    while count < len(ours) // 4 and ours[4 * count : 4 * count + 4] == theirs[4 * count : 4 * count + 4]:
        count += 1
    return count
