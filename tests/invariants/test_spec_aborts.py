"""Requests are aborted at every point of a speculative cycle: no page is lost, and nobody else's tokens change."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from concurrent.futures import Future

import numpy as np
import pytest

from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.ipc.messages import Admit
from hiserve.ipc.updates import RequestUpdates
from tests.helpers.echo import oracle
from tests.helpers.engines import echo_engine
from tests.invariants.page_checks import check_pages

NUM_REQUESTS, NUM_DRAFT, PAGE, MAX_LEN = 30, 3, 4, 64
ABORT_RATE = 0.06
# Between two steps; between plan and launch; while it runs, or its drafts wait for the step that verifies them; between
# its end and what is made of it; right after that.
POINTS = ("idle", "planned", "launched", "verified", "committed")
STATES = ("prompt", "drafted", "verifying", "loading", "preempted")


class Cycle:
    """A planner and an executor on two tiers, stepped by hand; a request is aborted now and then.

    Args:
        seed: Of everything.
        depth: Steps in flight while the next is planned.
        overlaps_loads: As the planner takes it.

    Attributes:
        seen: Aborts, by point and state of the request.
    """

    def __init__(self, seed: int, depth: int, overlaps_loads: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.depth = depth
        self.engine, self.planner, self.executor, self.cache = echo_engine(
            num_pages=2 + MAX_LEN // PAGE,
            page_size=PAGE,
            max_len=MAX_LEN,
            budget=24,
            num_draft=NUM_DRAFT,
            eos=(),
            seed=seed,
            num_host_pages=40,
            overlaps_loads=overlaps_loads,
            fail_rate=0.1,
        )
        self.flying: deque[tuple[BatchPlan, Future[StepResult]]] = deque()
        self.prompts: list[np.ndarray] = []
        self.sizes: list[int] = []
        self.said: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.aborted: set[int] = set()
        self.seen: Counter[tuple[str, str]] = Counter()
        self.planner.grow_host(self.executor.num_ready_host_pages)

    def run(self) -> None:
        for _ in range(5_000):
            if len(self.prompts) < NUM_REQUESTS and self.rng.random() < 0.3:
                self.add()
            elif len(self.prompts) == NUM_REQUESTS and not self.planner.has_work and not self.flying:
                return self.check_end()
            self.point("idle")
            self.cycle()
            self.listen(self.planner.take_report())
        raise AssertionError("the requests do not end")

    def add(self) -> None:
        """Every other request comes again, to find its pages wherever they are."""
        uid = len(self.prompts)
        if uid and self.rng.random() < 0.5:
            tokens = self.prompts[self.rng.integers(uid)]
        else:
            tokens = self.rng.integers(3, 200, self.rng.integers(1, 30)).astype(np.int32)
        self.prompts.append(tokens)
        self.sizes.append(int(self.rng.integers(1, 24)))
        sampling = SamplingParams(seed=1, max_tokens=self.sizes[uid], ignore_eos=True)
        self.engine.add(Admit(uid, tokens.size, sampling, b"", 0), tokens)

    def cycle(self) -> None:
        """As ``Engine.step``, with a point between any two parts of it."""
        self.planner.complete_transfers(self.executor.take_acks())
        plan = self.planner.plan()
        self.point("planned")
        if plan is not None:
            self.flying.append((plan, self.executor.submit(plan)))
            self.point("launched")
        elif not self.flying:
            self.planner.complete_transfers(self.executor.take_acks(1.0))
        if self.flying and (plan is None or len(self.flying) > self.depth):
            result = self.flying[0][1].result()
            while self.planner.awaits_acks:
                self.planner.complete_transfers(self.executor.take_acks(1.0))
            self.point("verified")
            self.flying.popleft()
            self.planner.commit(result)
            self.point("committed")

    def point(self, name: str) -> None:
        """Aborts one of those in the state that was aborted least here: always for the first time, later now and then."""
        check_pages(self.planner, self.cache)
        by_state = self.by_state()
        state = min(by_state, key=lambda state: self.seen[name, state], default=None)
        if state is None or (self.seen[name, state] and self.rng.random() >= ABORT_RATE):
            return
        uid = int(self.rng.choice(by_state[state]))
        self.seen[name, state] += 1
        self.aborted.add(uid)
        self.planner.abort([uid])
        check_pages(self.planner, self.cache)

    def by_state(self) -> dict[str, list[int]]:
        rows, states = self.planner._rows, dict[str, list[int]]()
        verifying = {row for plan, _ in self.flying for row in plan.rows[plan.num_draft > 0].tolist()}
        for row in rows.active.tolist():
            if row in self.planner._host_loads._waiting:
                state = "loading"
            elif row in verifying:
                state = "verifying"
            else:
                state = "drafted" if rows.drafted[row] else "prompt"
            states.setdefault(state, []).append(int(rows.uid[row]))
        if preempted := [request.uid for request in self.planner._waiting if request.was_admitted]:
            states["preempted"] = preempted
        return states

    def listen(self, updates: RequestUpdates | None) -> None:
        if updates is None:
            return
        at = 0
        for uid, count, finish in zip(updates.uids, updates.counts, updates.finishes, strict=True):
            assert uid not in self.ends, f"request {uid} speaks after its end"
            self.said.setdefault(uid, []).extend(updates.tokens[at : at + count].tolist())
            at += count
            if finish:
                self.ends[uid] = FinishReason(finish)

    def check_end(self) -> None:
        """Everybody was told all, or of the abort; nothing is held, and every page can be had."""
        assert set(self.ends) == set(range(NUM_REQUESTS))
        for uid, (prompt, size) in enumerate(zip(self.prompts, self.sizes, strict=True)):
            said = self.said.get(uid, [])
            expected = oracle(prompt, min(size, MAX_LEN - prompt.size))
            if self.ends[uid] is FinishReason.ABORT:
                assert uid in self.aborted
                assert said == expected[: len(said)]
            else:
                assert said == expected, f"request {uid}"
        assert not self.cache.locks.prefix_locks
        assert (
            self.cache.device.pages.num_free + self.cache.device.num_evictable == self.cache.device.pages.num_pages - 1
        )


@pytest.mark.parametrize(
    ("num_seeds", "depth", "overlaps_loads"),
    [
        (12, 0, False),
        (12, 1, True),
        *[pytest.param(400, *case, marks=pytest.mark.long) for case in itertools.product((0, 1), (False, True))],
    ],
)
def test_an_abort_at_any_point_of_a_speculative_cycle_loses_no_page(
    num_seeds: int, depth: int, overlaps_loads: bool
) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for seed in range(num_seeds):
        print("seed", seed)
        cycle = Cycle(seed, depth, overlaps_loads)
        cycle.seen = seen  # what was seldom comes first
        cycle.run()
    possible = {(point, state) for point in POINTS for state in STATES}
    if not depth:  # one step at a time
        possible -= {("idle", "verifying"), ("planned", "verifying"), ("committed", "verifying")}
    assert possible <= seen.keys(), possible - seen.keys()
