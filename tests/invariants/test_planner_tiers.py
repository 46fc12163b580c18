"""Random workloads over both tiers: copies that end late, fail or are waited for change no token."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from hiserve.cache.index.prefix_cache import HostAdmission
from hiserve.core.transfers import CopyKind
from hiserve.engine.host_loads import LoadCostModel
from tests.helpers.widening import some
from tests.invariants.planner_run import Run

CASES = list(itertools.product((0, 1, 2), (False, True), HostAdmission))
USUAL = [
    (0, False, HostAdmission.WRITE_THROUGH),
    (1, True, HostAdmission.SELECTIVE),
    (2, False, HostAdmission.SELECTIVE),
    (2, True, HostAdmission.WRITE_THROUGH),
]


class Fickle(LoadCostModel):
    """Finds every third load not worth it."""

    def __init__(self) -> None:
        super().__init__(16)
        self._asked = 0

    def is_worth_loading(self, num_tokens: int, num_before: int, num_copied: int | None = None) -> bool:
        self._asked += 1
        return self._asked % 3 > 0


def run(seed: int, depth: int, overlaps: bool, admission: HostAdmission, **options: object) -> Run:
    print("seed", seed)
    page_size = (1, 4, 16)[seed % 3]
    return Run(
        seed,
        depth=depth,
        num_draft=seed % 2,
        num_pages=1 + 80 // page_size + seed % 4,
        page_size=page_size,
        faults=False,
        num_host_pages=2 + (200 if seed % 2 else 40) // page_size,
        host_admission=admission,
        overlaps_loads=overlaps,
        **options,
    ).go()


@pytest.mark.parametrize(("depth", "overlaps", "admission"), some(CASES, *USUAL))
def test_random_workloads_over_both_tiers_match_the_oracle(
    depth: int, overlaps: bool, admission: HostAdmission
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(300, 314):  # in 313, a row waits for its load while others hold its pages
        done = run(seed, depth, overlaps, admission, fail_rate=0.4 * (seed % 2), costs=Fickle())
        stats, host = done.engine.stats(), done.executor.host
        assert host is not None
        assert not done.failed
        assert not stats.stale_rows  # whoever ran had its pages
        seen += Counter(
            loaded=stats.cache.loads.num_fulfilled,
            stored=stats.cache.offloads.num_fulfilled,
            left=stats.cache.loads.unfulfilled.get("not_worth_loading", 0),
        )
        seen += Counter(preempted=stats.preemptions, waited=host.num_waits)
        seen += Counter(lost=host.num_failed[CopyKind.LOAD], unstored=host.num_failed[CopyKind.OFFLOAD])
    wanted = ["loaded", "stored", "left", "preempted", "lost", "unstored"] + ["waited"] * overlaps
    assert all(seen[each] for each in wanted), seen
    assert overlaps or not seen["waited"]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_steps_that_the_gate_refuses_are_planned_again(depth: int) -> None:
    deferred = 0
    for seed in range(320, 326):
        done = run(seed, depth, True, HostAdmission.WRITE_THROUGH, defer_rate=0.1, fail_rate=0.1)
        deferred += done.executor.num_deferred
        assert not done.failed
        assert done.engine.stats().deferred_steps == done.executor.num_deferred
    assert deferred > 0
