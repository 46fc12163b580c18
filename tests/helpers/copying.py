"""An engine on two tiers without a model: every step says one word, and copies end when the test lets them."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from hiserve.cache.index.prefix_cache import PrefixCache, TailSizes
from hiserve.cache.index.tail_pool import NO_TAILS
from hiserve.config.caching import EvictionOrder
from hiserve.core.plan import BatchPlan, StepResult
from hiserve.core.request import SamplingParams
from hiserve.core.transfers import CopyAck, PageCopy, StoreEnds
from hiserve.core.usage import CacheUse
from hiserve.core.window_pool import WindowLimits
from hiserve.engine.host_loads import LoadCostModel
from hiserve.engine.loop import Engine, EngineFacts
from hiserve.engine.planner import Planner
from hiserve.ipc.messages import Admit

FILLER = 1  # what the fake model says; no prompt should have it


class CopyingExecutor:
    """Answers at once.

    Attributes:
        plans: All that were submitted.
        copies: All that were ordered.
        open: Those that were not answered.
        holds: Whether copies stay open.
        fails: Whether those answered from now on have failed.
    """

    def __init__(self, num_host_pages: int) -> None:
        self.num_ready_host_pages = num_host_pages
        self.plans: list[BatchPlan] = []
        self.copies: list[PageCopy] = []
        self.open: dict[int, PageCopy] = {}
        self.holds = False
        self.fails = False

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        self.plans.append(plan)
        self.copies += plan.copies
        self.open |= {copy.op: copy for copy in plan.copies}
        num_sampling = int(plan.samples.sum())
        counts, tokens = np.ones(num_sampling, dtype=np.int32), np.full((num_sampling, 1), FILLER, dtype=np.int32)
        done: Future[StepResult] = Future()
        done.set_result(StepResult(plan.step_id, counts, tokens))
        return done

    def store_stats(self) -> None:
        return None

    def gate_counts(self) -> dict[str, dict[str, int]]:
        return {}

    def take_found(self) -> list[StoreEnds]:
        return []

    def take_acks(self, wait_s: float = 0.0) -> list[CopyAck]:
        if self.holds:
            return []
        ended, self.open = self.open, {}
        return [CopyAck(op, "broken" if self.fails else "") for op in ended]

    def close(self) -> None:
        pass


def copying_engine(
    *,
    num_pages: int,
    num_host_pages: int,
    page_size: int = 4,
    max_rows: int = 4,
    max_len: int = 256,
    budget: int = 64,
    depth: int = 0,
    eviction: EvictionOrder = "lru",
    windows: WindowLimits | None = None,
    tails: TailSizes = NO_TAILS,
) -> tuple[Engine, CopyingExecutor, PrefixCache]:
    cache = PrefixCache(
        num_pages=num_pages,
        page_size=page_size,
        namespace=b"copying",
        eviction=eviction,
        num_host_pages=num_host_pages,
        tails=tails,
    )
    planner = Planner(
        cache=cache,
        max_rows=max_rows,
        max_len=max_len,
        max_batched_tokens=budget,
        eos_token_ids=(),
        costs=LoadCostModel(budget, clock=iter(range(1 << 30)).__next__),  # steps take their time, loads none
        windows=windows,
    )
    executor = CopyingExecutor(num_host_pages)
    facts = EngineFacts(max_rows, max_len, num_pages - 1, page_size, b"copying", {})
    return Engine(planner, executor, depth, facts), executor, cache


def add(engine: Engine, uid: int, prompt: np.ndarray, max_tokens: int = 1, priority: int = 0) -> None:
    admit = Admit(uid, prompt.size, SamplingParams(seed=0, max_tokens=max_tokens), b"", 0, priority)
    engine.add(admit, prompt.astype(np.int32))


def run(engine: Engine, max_turns: int = 10_000) -> dict[int, CacheUse]:
    """Runs until there is nothing to do; returns what each request found in the cache."""
    found: dict[int, CacheUse] = {}
    for _ in range(max_turns):
        if not engine.has_work:
            return found
        updates = engine.step()
        if updates is not None:
            found |= {uid: use for uid, use in zip(updates.uids, updates.cached, strict=True) if use is not None}
    raise AssertionError(f"there is still work after {max_turns} turns")
