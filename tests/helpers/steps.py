"""A planner in the hands of a test: plans and commits one at a time, and what was reported."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import numpy as np

from hiserve.core.plan import BatchPlan, Scores, StepResult
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.engine.queue import Request
from tests.helpers.engines import echo_engine


class Steps:
    """Drives a planner against the echo executor.

    Args:
        sizes: As ``echo_engine`` takes them; no token ends a reply unless ``eos`` says so.

    Attributes:
        said: Tokens reported of each request.
        ends: How each request ended.
        cached: Cached prompt tokens of each request; told once.
        scores: Packed scores reported of each request.
        told: Every report's (uid, new tokens, score words), in order.
    """

    def __init__(self, **sizes: object) -> None:
        _, self.planner, self.executor, self.cache = echo_engine(**{"eos": (), **sizes})  # type: ignore[arg-type]
        self.rows = self.planner._rows
        self.said: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.cached: dict[int, int] = {}
        self.scores: dict[int, bytes] = {}
        self.told: list[tuple[int, int, int]] = []
        self._in_flight: deque[Future[StepResult]] = deque()

    def add(
        self, uid: int, prompt: np.ndarray, max_tokens: int | None = None, tenant: bytes = b"", **sampling: object
    ) -> SamplingParams:
        params = SamplingParams(seed=1, max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        self.planner.add(Request(uid, prompt, prompt.size, params, tenant, choice=0))
        return params

    def row(self, uid: int) -> int:
        """The row of a running request."""
        (row,) = [row for row in self.rows.active.tolist() if self.rows.uid[row] == uid]
        return row

    def running(self) -> list[int]:
        """Running requests, longest tenancy first."""
        return self.rows.uid[self.rows.active].tolist()

    def plan(self) -> BatchPlan:
        """Plans a step and lets the executor run it; the result waits for ``commit``."""
        plan = self.planner.plan()
        assert plan is not None, "there is nothing to plan"
        self._in_flight.append(self.executor.submit(plan))
        return plan

    def commit(self) -> None:
        self.planner.commit(self._in_flight.popleft().result())
        self.take_report()

    def step(self) -> BatchPlan:
        plan = self.plan()
        self.commit()
        return plan

    def emit(self, plan: BatchPlan, *runs: list[int], rejected: int = 0, scores: Scores | None = None) -> None:
        """Commits a plan that was kept from the executor: one run of tokens per sampling row, then what was not."""
        width = 1 + int(plan.num_draft.max())
        tokens = np.array([run + [rejected] * (width - len(run)) for run in runs], dtype=np.int32)
        counts = np.array([len(run) for run in runs], dtype=np.int32)
        self.planner.commit(StepResult(plan.step_id, counts, tokens, scores))
        self.take_report()

    def finish(self) -> None:
        """Runs until nothing is left."""
        for _ in range(2_000):
            if self._in_flight:
                self.commit()
            elif not self.planner.has_work:
                return
            elif (plan := self.planner.plan()) is not None:
                self._in_flight.append(self.executor.submit(plan))
            else:
                self.take_report()
        raise AssertionError("the requests do not end")

    def take_report(self) -> None:
        self.rows.check()
        updates = self.planner.take_report()
        if updates is None:
            return
        at = score_at = 0
        columns = (updates.uids, updates.counts, updates.finishes, updates.cached, updates.score_words)
        for uid, count, finish, cached, words in zip(*columns, strict=True):
            assert uid not in self.ends, f"request {uid} speaks after its end"
            self.told.append((uid, count, words))
            self.scores[uid] = self.scores.get(uid, b"") + updates.scores[score_at : score_at + 4 * words]
            score_at += 4 * words
            self.said.setdefault(uid, []).extend(updates.tokens[at : at + count].tolist())
            at += count
            if cached is not None:
                assert uid not in self.cached, f"request {uid} was told its cached tokens twice"
                self.cached[uid] = cached.num_tokens
            if finish:
                self.ends[uid] = FinishReason(finish)
        assert (at, score_at) == (updates.tokens.size, len(updates.scores))
        assert not updates.failed
