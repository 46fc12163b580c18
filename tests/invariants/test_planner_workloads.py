"""Random workloads through planner and index, against an executor that stores token ids."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.widening import some
from tests.invariants.planner_run import Run


@pytest.mark.parametrize(("depth", "num_draft"), some(product((0, 1, 2), (0, 1, 3)), (0, 0), (1, 1), (1, 3), (2, 3)))
def test_random_workloads_match_the_oracle(depth: int, num_draft: int) -> None:
    preempted = cached = accepted = 0
    for seed in range(12):
        print("seed", seed)
        page_size = [1, 4, 16][seed % 3]
        num_pages = 1 + 80 // page_size + int(seed % 4) * (8 // page_size + 1)
        run = Run(seed, depth=depth, num_draft=num_draft, num_pages=num_pages, page_size=page_size, faults=False).go()
        preempted += run.engine.stats().preemptions
        cached += run.engine.stats().cached_tokens
        accepted += run.executor.num_accepted
        assert not run.failed
    assert preempted >= 1
    assert cached > 0
    assert (accepted > 0) == (num_draft > 0)


@pytest.mark.parametrize("depth", some([0, 1, 2], 1, 2))
def test_a_stale_row_is_recomputed_once_and_then_fails_alone(depth: int) -> None:
    stale = failed = 0
    for seed in range(100, 112):
        print("seed", seed)
        run = Run(seed, depth=depth, num_draft=1, num_pages=60, page_size=4, faults=True).go()
        stale += run.engine.stats().stale_rows
        failed += len(run.failed)
    assert stale > failed > 0


@pytest.mark.parametrize(("depth", "num_draft"), some(product((0, 1, 2), (0, 2)), (0, 0), (1, 2), (2, 2)))
def test_every_request_gets_each_of_its_scores_once_and_in_order(depth: int, num_draft: int) -> None:
    """Prompts in chunks, prefixes that others cached, preemptions and faults in the middle of a prompt."""
    preempted = stale = resumed = cached = 0
    for seed in range(200, 212):
        print("seed", seed)
        page_size = [1, 4][seed % 2]
        run = Run(
            seed,
            depth=depth,
            num_draft=num_draft,
            num_pages=1 + 84 // page_size,
            page_size=page_size,
            faults=seed % 3 == 0,
            wants_scores=0.6,
        ).go()
        preempted += run.engine.stats().preemptions
        stale += run.engine.stats().stale_rows
        resumed += run.executor.num_resumed
        cached += run.engine.stats().cached_tokens
    assert min(preempted, stale, resumed, cached) >= 1, (preempted, stale, resumed, cached)
