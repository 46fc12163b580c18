"""Random workloads of a model with recurrent states: every row has the state of its tokens, every tail that of its boundary."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from hiserve.cache.index.locks import path
from hiserve.core.transfers import CopyKind
from tests.helpers.echo_states import EMPTY, fold
from tests.helpers.widening import some
from tests.invariants.planner_run import Run


class SnapshotRun(Run):
    """Checks slots and tails after each step, too."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, faults=options.pop("faults", False), **options)
        assert self.executor.states is not None and self.cache.snapshots is not None
        self.states, self.snapshots = self.executor.states, self.cache.snapshots

    def take(self, report: Any) -> None:
        super().take(report)
        self.check_slots()

    def check_slots(self) -> None:
        """H1 and H7: free and held slots partition the pool; a tail has the state of its boundary."""
        self.snapshots.check()
        rows, held = self.planner._rows.snapshots, np.zeros_like(self.snapshots.num_refs)
        assert rows is not None
        for slots in (*rows._starts.values(), *(each.slot for stores in rows._stores.values() for each in stores)):
            held[slots] += 1
        for op in self.cache.ops:
            held[op.slots] += 1
        for node in self.cache.tree.nodes():
            for tail in (node.tails or {}).values():
                held[tail.slots] += 1
                if tail.is_on_device and not tail.device_ready_op:
                    key = b"".join(step.key for step in reversed(list(path(tail.node))))
                    end = sum(step.num_pages for step in path(tail.node)) - tail.node.num_pages + tail.at
                    tokens = np.frombuffer(key, dtype=np.int32)[: end * self.page_size]
                    assert self.states.slots[tail.slots[0]] == fold(EMPTY, tokens), f"slot {tail.slots}, {tokens.size}"
        assert np.array_equal(held, self.snapshots.num_refs), f"{held} hold, {self.snapshots.num_refs} are counted"

    def go(self) -> SnapshotRun:
        super().go()
        host = self.executor.host
        assert self.states.num_broken <= (0 if host is None else 6 * host.num_failed[CopyKind.LOAD])
        assert self.snapshots.num_pinned == len([op for op in self.cache.ops if op.slots.size])
        return self


@pytest.mark.parametrize(
    ("depth", "num_draft"), some(product((0, 1, 2), (0, 1, 3)), (0, 0), (1, 0), (2, 1), (0, 3), (1, 3), (2, 3))
)
def test_random_workloads_resume_from_the_states_of_their_prefixes(depth: int, num_draft: int) -> None:
    preempted = cached = restored = skipped = 0
    for seed in range(7):
        print("seed", seed)
        page_size = [1, 4, 16][seed % 3]
        run = SnapshotRun(
            seed,
            depth=depth,
            num_draft=num_draft,
            num_pages=1 + 80 // page_size + int(seed % 4) * (8 // page_size + 1),
            page_size=page_size,
            num_snapshot_slots=[2, 5, 12, 60][seed % 4],
            tail_every=[0, 2 * page_size][seed % 2],
        ).go()
        assert not run.failed
        stats = run.engine.stats()
        preempted, cached = preempted + stats.preemptions, cached + stats.cached_tokens
        restored += run.states.num_restored
        skipped += run.snapshots.num_evicted_tails
    assert min(preempted, cached, restored, skipped) >= 1, (preempted, cached, restored, skipped)


@pytest.mark.parametrize("depth", some([0, 1, 2], 1))
def test_failed_and_refused_steps_leave_no_slot_and_no_state_behind(depth: int) -> None:
    """H1, H14: whatever a step left half done is in no tail, and no slot is lost."""
    given_up = deferred = stale = restored = 0
    for seed in range(300, 306):
        print("seed", seed)
        page_size = [4, 1][seed % 2]
        run = SnapshotRun(
            seed,
            depth=depth,
            num_draft=[0, 3][seed % 4 // 2],
            num_pages=1 + 120 // page_size,
            page_size=page_size,
            num_snapshot_slots=[6, 30][seed % 3 % 2],
            tail_every=2 * page_size,
            faults=seed % 3 == 0,
            defer_rate=0.05,
            fault_rate=0.05,
        ).go()
        given_up, deferred = given_up + len(run.executor.given_up), deferred + run.executor.num_deferred
        stale += run.engine.stats().stale_rows
        restored += run.states.num_restored
    assert min(given_up, deferred, stale, restored) >= 1, (given_up, deferred, stale, restored)


@pytest.mark.parametrize(("depth", "num_draft"), some(product((0, 1), (0, 2)), (0, 0), (1, 2)))
def test_resume_points_come_from_the_host_whole_or_not_at_all(depth: int, num_draft: int) -> None:
    """H10: history and snapshot are loaded together; a row reads its slot when both have arrived."""
    loaded = waited = failed = 0
    for seed in range(400, 408):
        print("seed", seed)
        page_size = [4, 1][seed % 2]
        run = SnapshotRun(
            seed,
            depth=depth,
            num_draft=num_draft,
            num_pages=1 + 88 // page_size,
            page_size=page_size,
            num_snapshot_slots=[3, 6, 12][seed % 3],
            num_host_pages=[60, 300][seed % 2],
            overlaps_loads=seed % 4 < 2,
            max_rows=[1, 6][seed % 2],
            fail_rate=0.1,
            wants_scores=0.0,
        ).go()
        assert run.executor.host is not None
        loaded += run.cache.num_arrived[CopyKind.LOAD]
        waited += run.executor.host.num_waits
        failed += run.executor.host.num_failed[CopyKind.LOAD]
    assert min(loaded, waited, failed) >= 1, (loaded, waited, failed)


@pytest.mark.parametrize(("page_size", "depth"), [(1, 1), (4, 0)])
def test_rows_with_windows_and_snapshots_hold_no_more_pages_than_they_were_promised(page_size: int, depth: int) -> None:
    """H1, H12, with pages of two rows."""
    num_cached = 0
    for seed in range(500, 503):
        print("seed", seed)
        run = SnapshotRun(
            seed,
            depth=depth,
            num_draft=6,
            num_pages=1 + 120 // page_size,
            page_size=page_size,
            num_snapshot_slots=12,
            window=[1, 5, 9][seed % 3],
            wants_scores=0.0,
        ).go()
        assert run.cache.windows is not None
        run.cache.windows.check()
        num_cached += run.engine.stats().cached_tokens
    assert num_cached > 0
