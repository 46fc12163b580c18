"""What copies and everybody else do: stores, acks in any legal order, prefetches, uploads, flush, growth, restart."""

from __future__ import annotations

from random import Random

import pytest

from hiserve.cache.index.prefix_cache import HostAdmission, Tier
from hiserve.core.transfers import CopyKind, PageCopy, PageRun
from tests.invariants import kv_checks, tier_checks
from tests.invariants.index_model import Place
from tests.invariants.streams import Page
from tests.invariants.tier_checks import digest
from tests.invariants.tier_model import OpModel, TierModel, above, parts
from tests.invariants.tier_world import World


def begin_stores(world: World, random: Random) -> None:
    model, max_pages = world.model, random.choice((1, 2, 99, 99))
    spare, ends, reserve = world.spare(), model.idle_ends(), world.cache.tiers.reserve
    is_outrun = reserve.is_outrun
    copies = world.cache.begin_offloads(max_pages)
    is_outrun |= reserve.is_outrun
    again = frozenset(each for copy in copies if copy.run is not None for each in copy.run.digests)
    gone = world.lose_host(spare | world.spare(), again)
    assert not gone or copies or model.num_reserved, "pages left the host for nothing"
    assert sum(copy.host_pages.size for copy in copies) <= max_pages
    by_digest = {digest(place): place for place in model.device}
    for copy in copies:
        assert copy.run is not None and copy.kind is CopyKind.OFFLOAD
        places = [by_digest[each] for each in copy.run.digests]
        assert places == parts(places[-1])[-len(places) :] and digest(above(places[0])) == copy.run.parent
        assert copy.run.key == b"".join(place[1][-1] for place in places)
        assert copy.run.namespace == digest((places[0][0], ()))
        # What was used once comes along only where a leaf grew after what was below it, and chosen, had been evicted.
        assert world.setting.admission is HostAdmission.WRITE_THROUGH or model.wanted & set(places)
        model.begin_store(copy.op, places, copy.device_pages.tolist(), copy.host_pages.tolist())
        world.start(copy)
    assert not gone or len(model.free_host) <= model.num_reserved, "more left the host than was needed"
    if len(copies) == 1 and gone and not is_outrun:  # then last copies go first
        what_goes_first(world, gone, ends - set(parts(places[-1])))
    if sum(copy.host_pages.size for copy in copies) == max_pages:
        return
    lacking = model.device.keys() - model.host.keys()
    if len(model.free_host) <= model.num_reserved:
        model.given_up |= lacking
        world.ran["no room"] += bool(lacking)
    if world.setting.admission is HostAdmission.SELECTIVE:
        lacking &= model.wanted
    assert all(model.excused(place) for place in lacking), "a page that should be stored is not"


def what_goes_first(world: World, gone: set[Place], ends: set[Place]) -> None:
    """Of what the device has, too, the host forgets what was used last, before anything goes that is nowhere else."""
    model, spare = world.model, world.spare()
    forgotten = gone & model.device.keys()
    left = {place for place in ends - gone if place in model.host} - spare
    assert not left or len(forgotten) == len(gone), "a page went that was nowhere else"
    assert all(model.used[one] >= model.used[other] for one in forgotten & ends for other in left)


def settle(world: World, random: Random) -> None:
    """The oldest copy of a stream ends; or any store turns out to have been dropped before it began."""
    op = random.choice(list(world.copies))
    kind = world.copies[op][0].kind
    is_ok = random.random() < 0.75
    is_dropped = not is_ok and kind is CopyKind.OFFLOAD and random.random() < 0.5
    if not is_dropped:
        op = min(number for number, (copy, _) in world.copies.items() if copy.kind is kind)
    settle_op(world, op, ok=is_ok, is_dropped=is_dropped, random=random)


def settle_op(world: World, op: int, *, ok: bool, random: Random, is_dropped: bool = False) -> None:
    copy, event = world.copies.pop(op)
    is_load = copy.kind is CopyKind.LOAD
    if not ok:
        pages = (
            [Page("device", p) for p in copy.device_pages] if is_load else [Page("host", p) for p in copy.host_pages]
        )
        world.content.update(dict.fromkeys(pages))
        world.is_cut = True
    if is_dropped:
        world.streams.cancel(event)
    else:
        world.streams.know(event)
    if ok and not is_load:
        world.shelf.finish(copy.host_pages)
    if world.model.ops[op].kind == "stage":
        end_stage(world, copy, ok=ok)
        take_uploads(world, random)
        return
    relocations = world.cache.tiers.relocation_version
    lost = world.cache.complete(op, ok=ok)
    with pytest.raises(AssertionError, match="not in flight"):  # INV-22
        world.cache.complete(op, ok=ok)
    if not is_load:
        assert not lost
        stored = world.model.end_store(op, ok)
        world.ran["stored" if ok else "failed stores"] += 1
        if ok and world.max_upload and world.setting.admission is HostAdmission.SELECTIVE:
            world.model.awaited |= set(stored)
        return
    expected = world.model.end_load(op, ok)
    assert {id(lock) for lock in lost} == {id(world.rows[number].lock) for number in expected}
    assert world.cache.tiers.relocation_version == relocations + bool(lost)  # INV-41
    for number in sorted(expected):
        world.recompute(world.rows[number])
    world.ran["loaded" if ok else "failed loads"] += 1
    world.ran["lost rows"] += len(lost)


def take_uploads(world: World, random: Random) -> None:
    """What waits for the store is read on the host, or copied there first; parents before children, nothing twice."""
    model = world.model
    spare = world.spare()
    uploads, stages = world.cache.store.begin_uploads()
    staged = {op for op, each in model.ops.items() if each.kind == "upload"} - world.uploads.keys()
    for begun in sorted([*uploads, *stages], key=lambda each: each.op):
        assert begun.run is not None
        if begun.op in staged:
            read_for_upload(world, begun.op, begun.run)
            continue
        is_upload = not isinstance(begun, PageCopy)
        by_digest = {digest(place): place for place in (model.host if is_upload else model.device)}
        places = [by_digest[each] for each in begun.run.digests]
        assert places == parts(places[-1])[-len(places) :] and digest(above(places[0])) == begun.run.parent
        assert begun.run.key == b"".join(place[1][-1] for place in places)
        # Pages before one that does not wait were uploaded before, or came from the store or a former process.
        assert set(places) <= model.awaited and above(places[0]) not in model.awaited
        model.awaited -= set(places)
        end = tier_checks.place_of(world.cache, world.cache.ops[begun.op].lock.node)  # it may hold more than it reads
        assert places[-1] in parts(end)
        if is_upload:
            assert [model.host[place] for place in places] == begun.run.pages.tolist()
            model.ops[begun.op] = OpModel("upload", end, [], begun.run.pages.tolist())
            read_for_upload(world, begun.op, begun.run)
        else:
            assert not model.storing.keys() & set(places) and not model.loading.keys() & set(places)
            model.ops[begun.op] = OpModel("stage", end, begun.device_pages.tolist(), [])
    # A stage makes room when it and the uploads before it hold their pages: what they hold does not go, however old it is.
    held = [model.ops[upload.op].end for upload in uploads if upload.op not in staged]
    orders = [model.order(end) for end in held if end not in model.device]
    last = {place: model.order(place) for place in model.host.keys() - model.device.keys()}
    gone = world.lose_host(spare - model.locked())  # what a stage holds is spare no more
    assert not gone or stages, "pages left the host for nothing"
    world.ran["passed over"] += any(last[place] > min(orders, default=last[place]) for place in gone & last.keys())
    for stage in stages:
        model.ops[stage.op].host_pages = stage.host_pages.tolist()
        model.take_host(model.ops[stage.op].host_pages)
        world.start(stage)
        world.ran["stages"] += 1
    reserved = sum(len(op.host_pages) for op in model.ops.values() if op.kind in ("upload", "stage"))
    assert reserved <= max(0, world.max_upload)


def read_for_upload(world: World, op: int, run: PageRun) -> None:
    event = world.streams.start(f"put {op}")
    for page, each in zip(run.pages.tolist(), run.digests, strict=True):
        world.streams.read(event, Page("host", page))
        place = world.content[Page("host", page)]
        assert place is not None and digest(place) == each
    world.uploads[op] = event


def end_stage(world: World, copy: PageCopy, *, ok: bool) -> None:
    """What arrived is uploaded from where it is, though nobody finds it there."""
    model = world.model
    ended = model.end(copy.op)
    world.cache.uploads.end_stage(copy.op, ok=ok)
    if not ok:
        model.free_host |= set(ended.host_pages)
        world.ran["failed stages"] += 1
        return
    (op,) = {each.number for each in world.cache.ops} - model.ops.keys()
    model.ops[op] = OpModel("upload", (ended.end[0], ()), [], ended.host_pages, host_orphans=set(ended.host_pages))


def end_upload(world: World, random: Random) -> None:
    op = random.choice(list(world.uploads))
    world.streams.know(world.uploads.pop(op))
    world.cache.uploads.end_upload(op)
    world.model.end(op)
    world.ran["uploads"] += 1


def begin_prefetch(world: World, random: Random) -> None:
    (tenant, prompt), max_pages, model = world.prompt(random), random.randint(1, 6), world.model
    _, _, anywhere = world.match(tenant, prompt)
    wanted = world.usable(prompt)[len(anywhere) :][:max_pages]
    spare = world.spare()
    begun = world.cache.store.begin_prefetch(tenant, prompt, max_pages)
    world.share_all()
    end = (tenant, anywhere)
    if not wanted or not model.is_host_ready(end) or world.is_arriving((tenant, (*anywhere, wanted[0]))):
        assert begun is None
        return
    staged = OpModel("prefetch", end, [], [])
    model.ops[0] = staged  # its hold comes before its pages
    count = min(len(wanted), model.num_host_available())
    if begun is None:
        assert count == 0
        del model.ops[0]
        return
    assert begun.run.pages.size == count > 0 and begun.run.parent == digest(end)
    assert begun.run.key == b"".join(wanted[:count])
    short = count - len(model.free_host)
    assert max(0, short) <= len(world.lose_host(spare)) <= max(0, short + model.num_reserved)
    del model.ops[0]
    staged.host_pages = begun.run.pages.tolist()
    model.take_host(staged.host_pages)
    model.ops[begun.op] = staged
    event = world.streams.start(f"fetch {begun.op}")
    world.write_host(begun.run)
    for page in staged.host_pages:
        world.streams.write(event, Page("host", page))
    world.fetches[begun.op] = (begun.run, event, end)
    world.told.append((begun.op, staged.host_pages))


def abort_prefetch(world: World, random: Random) -> None:
    op = random.choice(list(world.fetches))
    staged = world.model.ops[op]
    if not staged.is_lost:
        world.cache.store.abort_prefetch(op)
        staged.end, staged.is_lost = (staged.end[0], ()), True
        world.ran["aborts"] += 1


def end_prefetch(world: World, random: Random) -> None:
    op = random.choice(list(world.fetches))
    run, event, start = world.fetches.pop(op)
    world.streams.know(event)
    num_ok = min(random.choice((0, 1, 9, 9)), len(run.digests))
    world.shelf.finish(run.pages[:num_ok])
    staged, model = world.model.end(op), world.model
    contents = tuple(run.key[i : i + world.page_bytes] for i in range(0, len(run.key), world.page_bytes))
    for i, page in enumerate(staged.host_pages):
        world.content[Page("host", page)] = (start[0], (*start[1], *contents[: i + 1])) if i < num_ok else None
    num_new = world.cache.store_sync.end_prefetch(op, num_ok)
    world.ran["failed prefetches"] += num_ok < len(run.digests)
    if staged.is_lost or not model.is_host_ready(staged.end):
        assert num_new == 0
        model.free_host |= set(staged.host_pages)
        world.ran["prefetches without a place"] += 1
        return
    model.free_host |= set(staged.host_pages[num_ok:])
    assert num_new == model.insert_host(staged.end, contents[:num_ok], staged.host_pages[:num_ok])
    world.ran["prefetched"] += bool(num_new)


def flush(world: World, random: Random) -> None:
    """INV-37: only what receipts hold stays, and what is in flight ends in nothing."""
    tier = random.choice((None, Tier.DEVICE, Tier.HOST))
    model = world.model
    assert world.cache.flush(tier) == model.flush(tier)
    world.is_cut = True
    held = {part for place in model.held.values() for part in parts(place)}
    if tier is not Tier.HOST:
        assert world.cache.device.num_evictable == 0
    if tier is None:
        assert world.cache.host.num_evictable == 0 and model.places <= held
    if tier is Tier.HOST:
        assert model.host.keys() <= held
    world.ran["flushes"] += 1
    world.ran["flushes in flight"] += bool(world.copies)


def grow(world: World, random: Random) -> None:
    """More of the host tier becomes usable."""
    world.model.free_host.add(world.model.num_ready)
    world.model.num_ready += 1
    world.cache.grow_host(world.model.num_ready)


def seal(world: World, random: Random) -> None:
    """Some pages get their checksums."""
    world.shelf.seal({page for page in sorted(world.shelf.unsealed) if random.random() < 0.8})


def record(world: World, random: Random) -> None:
    world.record()


def restart(world: World, random: Random) -> None:
    """The process dies; the next one adopts what the host holds with a checksum, parents first, and retains what was recorded."""
    old, shelf = world.model, world.shelf
    if is_recorded := random.random() < 0.5:
        world.record()
    content = {page: place for page, place in world.content.items() if page.tier == "host"}
    found = {content[Page("host", page)] for page in shelf.sealed}
    kept = {place for place in found if place and found >= set(parts(place))}
    runs = shelf.restart()
    world.model = TierModel(old.num_pages, old.num_host_pages, old.num_ready, old.by_priority)
    world.begin()
    world.content = content
    places = [content[Page("host", page)] for run in runs for page in run.pages.tolist()]
    assert set(places) == kept and len(places) == len(kept)
    assert [digest(place) for place in places if place] == [each for run in runs for each in run.digests]
    assert world.cache.recover(runs) == len(kept)
    world.share_all()
    shelf.keep({page for run in runs for page in run.pages.tolist()})
    for run in runs:
        pages = run.pages.tolist()
        contents = [content[Page("host", page)] for page in pages]
        world.model.take_host(pages)
        world.model.insert_host(above(contents[0]), tuple(place[1][-1] for place in contents if place), pages)
    world.cache.expire(world.now_s)
    until_s = {place: node.retained_until_s for place, node, _ in tier_checks.pages_in_tree(world.cache)}
    world.model.until = {place: each for place, each in until_s.items() if each}
    if is_recorded:
        # Other pages were given up while an upload read them, though the host may have had them again since.
        adopted = zip(places, (page for run in runs for page in run.pages.tolist()), strict=True)
        same = {place for place, page in adopted if place and old.host.get(place) == page}
        known = {place for place in same if same >= set(parts(place))}
        assert {place: each for place, each in world.model.until.items() if place in known} == {
            place: each for place, each in old.until.items() if place in known
        }
        world.ran["retained again"] += bool(world.model.until)
    world.ran["adopted"] += len(kept)
    world.ran["adopted less than found"] += len(kept) < len(found)


def take_events(world: World, random: Random) -> None:
    world.ran["events"] += tier_checks.inv_36_events_replay_to_what_each_tier_can_give(
        world.cache, world.model, world.replicas
    )
    kv_checks.inv_36_routers_know_what_each_tier_can_give(
        world.routers, world.model.device.keys() - world.model.loading, world.model.host.keys() - world.model.storing
    )
