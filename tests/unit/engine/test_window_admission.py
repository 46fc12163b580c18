"""Rows are admitted to window pages that are neither promised nor held by a transfer."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.cache.index.prefix_cache import TailSizes, Tier
from hiserve.core.window_pool import WindowLimits
from tests.helpers.copying import add, copying_engine, run
from tests.helpers.echo import oracle
from tests.helpers.steps import Steps

LIMITS = WindowLimits(window=9, page_size=1, num_draft=0, depth=0, max_batched_tokens=4)
LONGEST = 40  # tokens of a request; its row is promised less
TWO_ROWS = 1 + 2 * LIMITS.promised_pages(LONGEST) + LIMITS.step_pages


@pytest.mark.parametrize(("num_spare", "starts"), [(LIMITS.tail_pages - 1, False), (LIMITS.tail_pages, True)])
def test_a_row_that_loads_its_tail_waits_for_room_for_both(num_spare: int, starts: bool) -> None:
    """H12: the load holds the tail until its end is known; the row may have gone on by then, and have all its pages."""
    engine, executor, cache = copying_engine(
        num_pages=400,
        num_host_pages=400,
        page_size=1,
        max_len=LONGEST,
        budget=LIMITS.max_batched_tokens,
        windows=LIMITS,
        tails=TailSizes(window_pages=TWO_ROWS + num_spare),
    )
    planner, prompts = engine._planner, [np.arange(10 * first, 10 * first + 20) for first in (1, 5)]
    add(engine, 1, prompts[0])
    run(engine)
    cache.flush(Tier.DEVICE)
    add(engine, 2, prompts[1], max_tokens=LONGEST)
    while not planner._rows.active.size:
        engine.step()
    executor.holds = True
    add(engine, 3, prompts[0], max_tokens=LONGEST)
    for _ in range(8):
        engine.step()
        planner._rows.check()
    assert (planner._rows.active.size == 2) == starts
    executor.holds = False
    assert run(engine)[3].host == 19, "it waits for room, and still loads"


@pytest.mark.parametrize(("page_size", "num_draft"), [(1, 6), (2, 5), (4, 3), (4, 4)])
def test_a_row_whose_state_lags_behind_its_drafts_keeps_within_its_bound(page_size: int, num_draft: int) -> None:
    """H12: all drafts are right; the window before the next snapshot begins behind those of the last step."""
    window, prompt, num_new = 9, np.arange(3, 12, dtype=np.int32), 80
    steps = Steps(
        num_pages=200,
        page_size=page_size,
        num_draft=num_draft,
        budget=16,
        max_len=200,
        num_snapshot_slots=30,
        window=window,
    )
    steps.add(1, prompt, max_tokens=num_new)
    reply, windows, held = oracle(prompt, num_new), steps.rows.windows, []
    while len(said := steps.said.get(1, [])) < num_new:
        plan = steps.planner.plan()
        assert plan is not None and windows is not None
        held.append(windows.num_held(1))
        steps.emit(plan, (reply + [0] * num_draft)[len(said) :][: 1 + int(plan.num_draft[0])])
    assert windows is not None and max(held) <= windows._limits.row_pages, max(held)


def test_a_chunk_that_is_cut_gives_its_window_pages_back() -> None:
    """H12: they count as those of prompt tokens in flight."""
    steps = Steps(num_pages=40, page_size=4, budget=64, tail_every=8, num_snapshot_slots=10, window=9)
    steps.add(1, np.arange(3, 43, dtype=np.int32))
    plan = steps.plan()
    assert steps.rows.windows is not None
    assert (plan.num_new.tolist(), steps.rows.windows.num_held(1)) == ([12], 3), "it ends before the second boundary"
    steps.commit()
    steps.finish()
