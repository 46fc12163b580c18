"""Random workloads in which memory runs out in the middle of steps: no token, no score and no page is lost."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from hiserve.engine.oom_recovery import LOAD_FAILED
from tests.helpers.widening import some
from tests.invariants.planner_run import Run


@pytest.mark.parametrize(("depth", "num_draft"), some(product((0, 1, 2), (0, 2)), (0, 2), (1, 0), (2, 2)))
def test_steps_given_up_half_done_change_no_token_and_no_score(depth: int, num_draft: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(400, 406):
        print("seed", seed)
        page_size = [1, 4, 16][seed % 3]
        num_pages = 1 + 80 // page_size + seed % 4 * (8 // page_size + 1)
        run = Run(
            seed,
            depth=depth,
            num_draft=num_draft,
            num_pages=num_pages,
            page_size=page_size,
            faults=False,
            fault_rate=0.03,
        ).go()
        stats = run.engine.stats()
        assert not run.failed
        assert not stats.stale_rows
        assert stats.step_faults.get("out_of_memory", 0) == len(run.executor.given_up)
        seen += Counter(faults=len(run.executor.given_up), preempted=stats.preemptions, cached=stats.cached_tokens)
        seen["accepted"] += run.executor.num_accepted
    wanted = ["faults", "preempted", "cached"] + ["accepted"] * (num_draft > 0)
    assert all(seen[each] for each in wanted), seen


@pytest.mark.parametrize(("depth", "overlaps"), some(product((0, 1), (False, True)), (0, False), (1, True)))
def test_copies_of_steps_given_up_end_like_any_others(depth: int, overlaps: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(420, 425):
        print("seed", seed)
        page_size = (1, 4, 16)[seed % 3]
        run = Run(
            seed,
            depth=depth,
            num_draft=seed % 2,
            num_pages=1 + 80 // page_size + seed % 4,
            page_size=page_size,
            faults=False,
            num_host_pages=2 + 200 // page_size,
            overlaps_loads=overlaps,
            fail_rate=0.4,
            fault_rate=0.03,
        ).go()
        stats, host = run.engine.stats(), run.executor.host
        assert host is not None
        assert not run.failed
        assert not stats.stale_rows
        for copies in (stats.cache.loads, stats.cache.offloads):
            assert copies.num_in_flight == 0
            assert copies.num_wanted == copies.num_fulfilled + sum(copies.unfulfilled.values())
        with_copies = [plan for plan in run.executor.given_up if plan.copies]
        seen += Counter(faults=len(with_copies), loaded=stats.cache.loads.num_fulfilled, waited=host.num_waits)
        seen += Counter(lost=stats.step_faults.get(LOAD_FAILED, 0))
    wanted = ["faults", "loaded", "lost"] + ["waited"] * overlaps
    assert all(seen[each] for each in wanted), seen
