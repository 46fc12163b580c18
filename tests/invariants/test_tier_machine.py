"""The prefix index on two tiers against a model without a tree, a model of streams and a segment that outlives it.

Random sequences of what requests, copies and everybody else do (``request_rules``, ``copy_rules``), from fixed seeds;
after every operation all checks run (``World.check``). What each invariant of hierarchical caches is checked by:

======  ==========================================================================================================
INV     where
======  ==========================================================================================================
01-07   here after every operation: ``index_checks``
08, 15  do not apply: a page holds everything that moves together, draft KV included, so there are no auxiliary
        pools or lists of their own
09-12   here: ``index_checks``, ``tier_checks``; INV-11 also in ``request_rules.release``
13      here: ``World.end``, when nothing runs any more
14      here: ``index_checks``
16-19   here: ``index_checks``, ``tier_checks``
20      here: ``World.give``; ``tests/unit/cache/test_allocator.py``
21-23   here: ``index_checks``, ``tier_checks``, ``copy_rules.settle_op``
24-28   here: every access in ``World.start``, ``request_rules.forward`` and ``copy_rules`` is ordered by ``streams``
29      here: ``World.inv_29...``; rows that leave while their load runs are counted below
30, 31  here: ``World.inv_31...``, also for what a restart adopts
32      here: ``request_rules.match``
33, 34  here: ``World.usable`` and ``World.match`` say what a match must be
35      here: ``World.inv_35...``; of a request's own tokens ``test_trace_of_tiers.py``
36      here: ``tier_checks``
37      here: ``copy_rules.flush``, ``World.end``
38      here: the same decisions of others get the same answers; a model on several ranks does not exist yet
39      does not apply: the draft's KV is part of each page
40      ``test_planner_workloads.py``; ``test_reported_bugs_life.py`` (TC-40, TC-41, TC-44, TC-46)
41      here: ``request_rules.publish_row``, ``copy_rules.settle_op``; rows' versions ``tests/unit/engine``
======  ==========================================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiserve.cache.index.prefix_cache import HostAdmission, MissReason
from tests.helpers.widening import some
from tests.invariants import copy_rules, request_rules
from tests.invariants.tier_world import Setting, World

NUM_STEPS = 150
MAX_ROWS = 4
NUM_SEEDS = 54, 120  # in turn for each setting
SETTINGS = [
    Setting(page_size, admission, by_priority)
    for page_size in (1, 4, 16)
    for admission in HostAdmission
    for by_priority in (False, True)
]
MUST_HAPPEN = (
    *("device hits", "host hits", "splits", "splits of a copy", "exceptions", "left while loading", "too late"),
    *("loaded", "failed loads", "lost rows", "waits", "relocated", "refused"),
    *(
        "stored",
        "failed stores",
        "uploads",
        "stages",
        "failed stages",
        "no room",
        "demoted",
        "deleted",
        "host evictions",
        "copies forgotten",
    ),
    *("prefetched", "failed prefetches", "aborts", "prefetches without a place"),
    *("retained", "beyond the quota", "no longer retained", "retained evicted", "retained again"),
    *("flushes", "flushes in flight", "adopted", "adopted less than found", "events", "ordered accesses"),
    *(f"miss: {reason}" for reason in MissReason if reason is not MissReason.NO_TAIL),  # there are no windows
)


class Rule(NamedTuple):
    """Something that may happen: how often, compared with the others, and when it can."""

    run: Callable[[World, Random], object]
    weight: int
    can_run: Callable[[World], object] = lambda world: True


def has_room(world: World) -> bool:
    """Whether another row may come: with many, nothing could ever leave the device."""
    return len(world.rows) < MAX_ROWS


RULES = [
    Rule(request_rules.match, 12),
    Rule(request_rules.admit, 12, has_room),
    Rule(request_rules.come_back, 20, lambda world: has_room(world) and world.model.places),
    Rule(request_rules.load_late, 8, lambda world: any(r.lock.host_pages.size for r in world.rows.values())),
    Rule(request_rules.launch, 16, lambda world: world.rows and len(world.in_flight) < request_rules.MAX_DEPTH),
    Rule(request_rules.commit, 12, lambda world: world.in_flight),
    Rule(request_rules.publish, 16, request_rules.publishable),
    Rule(request_rules.serve, 20, has_room),
    Rule(request_rules.release, 12, lambda world: world.rows),
    Rule(request_rules.squeeze, 4),
    Rule(request_rules.retain, 6, lambda world: world.rows),
    Rule(request_rules.wait, 4, lambda world: world.model.until),
    Rule(copy_rules.begin_stores, 10),
    Rule(copy_rules.settle, 16, lambda world: world.copies),
    Rule(copy_rules.take_uploads, 10),
    Rule(copy_rules.end_upload, 6, lambda world: world.uploads),
    Rule(copy_rules.begin_prefetch, 10),
    Rule(copy_rules.abort_prefetch, 2, lambda world: world.fetches),
    Rule(copy_rules.end_prefetch, 8, lambda world: world.fetches),
    Rule(copy_rules.flush, 1),
    Rule(copy_rules.grow, 1, lambda world: world.model.num_ready < world.model.num_host_pages),
    Rule(copy_rules.seal, 6, lambda world: world.shelf.unsealed),
    Rule(copy_rules.record, 4),
    Rule(copy_rules.restart, 2, lambda world: world.shelf.sealed),
    Rule(copy_rules.take_events, 6),
]


def walk(setting: Setting, random: Random, directory: Path, ran: Counter[str], num_steps: int) -> World:
    """Does what ``random`` says, then lets everything end."""
    world = World(setting, random, directory, ran)
    log: list[str] = []
    try:
        for _ in range(num_steps):
            possible = [rule for rule in RULES if rule.can_run(world)]
            (rule,) = random.choices(possible, [rule.weight for rule in possible])
            log.append(rule.run.__name__)
            rule.run(world, random)
            world.check()
        finish(world, random)
    except BaseException:
        print(f"{setting}, after {' '.join(log)}")
        raise
    ran["host evictions"] += world.cache.host.num_evicted
    world.shelf.close()
    return world


def finish(world: World, random: Random) -> None:
    """Every sequence must be able to end."""
    while world.in_flight:
        request_rules.commit(world, random)
    while world.copies:
        copy_rules.settle_op(world, min(world.copies), ok=True, random=random)
        world.observe()
    while world.fetches:
        copy_rules.end_prefetch(world, random)
    while world.uploads:
        copy_rules.end_upload(world, random)
    while world.rows:
        request_rules.release(world, random)
    while world.model.awaited:  # with nothing in its way, everything gets to the store
        copy_rules.begin_stores(world, random)
        world.observe()
        copy_rules.take_uploads(world, random)
        world.observe()
        if not (world.copies or world.uploads):  # what a restart adopted may leave no page to go by
            assert not world.model.free_host, f"{len(world.model.awaited)} pages wait for nothing"
            world.give(world.take(len(world.model.free) + len(world.model.evictable())) or ())
        while world.copies:
            copy_rules.settle_op(world, min(world.copies), ok=True, random=random)
            world.observe()
        while world.uploads:
            copy_rules.end_upload(world, random)
    world.check()
    world.end()


def walks(seeds: range, directory: Path, num_steps: int) -> Counter[str]:
    ran: Counter[str] = Counter()
    for seed in seeds:
        print(f"seed {seed}")
        walk(SETTINGS[seed % len(SETTINGS)], Random(seed), directory, ran, num_steps)
    return ran


@pytest.mark.parametrize("num_seeds", some(NUM_SEEDS, NUM_SEEDS[0]))
def test_two_tiers_agree_with_the_model_and_order_every_access(tmp_path: Path, num_seeds: int) -> None:
    ran = walks(range(num_seeds), tmp_path, NUM_STEPS)
    print(dict(ran))
    missed = [what for what in MUST_HAPPEN if not ran[what]]
    assert not missed, f"{missed} never happened; the sequences miss it"


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[-1]], ids=str)
def test_the_same_decisions_get_the_same_answers(setting: Setting, tmp_path: Path) -> None:
    """INV-38: nothing depends on time or on where an object lies."""
    first, second = (walk(setting, Random(7), tmp_path, Counter(), NUM_STEPS).told for _ in range(2))
    assert first == second and len(first) > 20


def test_what_an_upload_holds_stays_though_a_stage_of_the_same_call_makes_room(tmp_path: Path) -> None:
    ran = walks(range(1092, 1093), tmp_path, 300)
    assert ran["passed over"], "nothing that an upload holds was older than what left the host; take another seed"


@pytest.mark.long
def test_two_tiers_agree_with_the_model_for_long(tmp_path: Path) -> None:
    walks(range(1000, 3000), tmp_path, 300)


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_two_tiers_agree_with_the_model_in_small(setting: Setting, tmp_path: Path) -> None:
    """Finds the shortest sequence that fails."""

    @settings(max_examples=1000, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(random=st.randoms(use_true_random=False), num_steps=st.integers(1, 60))
    def sequences(random: Random, num_steps: int) -> None:
        walk(setting, random, tmp_path, Counter(), num_steps)

    sequences()
