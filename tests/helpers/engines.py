"""Engines without a model, for tests of the planning half."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hiserve.cache.index.prefix_cache import HostAdmission, PrefixCache, TailSizes
from hiserve.core.window_pool import WindowLimits
from hiserve.engine.host_loads import LoadCostModel
from hiserve.engine.kv_event_sender import KvEventSender
from hiserve.engine.loop import Engine, EngineFacts, StepTimer
from hiserve.engine.planner import Planner
from hiserve.engine.row_ends import Retainer
from hiserve.spec.adaptive import DraftController
from hiserve.spec.history import ReplyHistory
from tests.helpers.echo import EchoExecutor
from tests.helpers.echo_host import FRAMES, EchoHost
from tests.helpers.echo_states import EchoStates


def echo_engine(
    *,
    num_pages: int,
    page_size: int = 4,
    max_rows: int = 6,
    max_len: int = 96,
    budget: int = 16,
    depth: int = 0,
    num_draft: int = 0,
    eos: tuple[int, ...] = (0, 1, 2),
    threaded: bool = False,
    seed: int = 0,
    kv_events: KvEventSender | None = None,
    num_host_pages: int = 0,
    host_admission: HostAdmission = HostAdmission.WRITE_THROUGH,
    overlaps_loads: bool = False,
    fail_rate: float = 0.0,
    defer_rate: float = 0.0,
    fault_rate: float = 0.0,
    costs: LoadCostModel | None = None,
    controller: DraftController | None = None,
    history: ReplyHistory | None = None,
    timer: StepTimer | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    num_snapshot_slots: int = 0,
    tail_every: int = 0,
    window: int = 0,
) -> tuple[Engine, Planner, EchoExecutor, PrefixCache]:
    """Makes an engine that reads no clock, so that its arguments decide every step.

    Unless given, ``costs`` finds that each step takes a second, which makes loads worth it, and ``timer`` that none takes any
    time, so that no plan waits for a load. Window pages are those of two rows, and beside snapshots alone.
    """
    limits = WindowLimits(
        window=window,
        page_size=page_size,
        num_draft=num_draft,
        depth=depth,
        max_batched_tokens=budget,
        tail_every=tail_every,
        has_snapshots=num_snapshot_slots > 0,
    )
    cache = PrefixCache(
        num_pages=num_pages,
        page_size=page_size,
        namespace=b"echo",
        listener=kv_events,
        num_host_pages=num_host_pages,
        host_admission=host_admission,
        tails=TailSizes(
            window_pages=limits.most_pages(2) if window else 0,
            snapshot_slots=num_snapshot_slots,
            frames_per_snapshot=FRAMES,
        ),
    )
    planner = Planner(
        cache=cache,
        max_rows=max_rows,
        max_len=max_len,
        max_batched_tokens=budget,
        eos_token_ids=eos,
        num_draft=num_draft,
        overlaps_loads=overlaps_loads,
        costs=costs or LoadCostModel(budget, clock=itertools.count().__next__),
        controller=controller,
        history=history,
        retainer=Retainer(cache, clock),
        windows=limits if num_snapshot_slots else None,
    )
    executor = EchoExecutor(
        num_pages=num_pages,
        page_size=page_size,
        max_rows=max_rows,
        max_len=max_len,
        threaded=threaded,
        defer_rate=defer_rate,
        fault_rate=fault_rate,
        seed=seed,
    )
    if num_host_pages:
        executor.host = EchoHost(executor.pool, page_size, num_host_pages, fail_rate=fail_rate, seed=seed)
    if num_snapshot_slots:
        executor.states = EchoStates(max_rows, num_snapshot_slots)
        if executor.host is not None:
            executor.host.slots = executor.states.slots
    facts = EngineFacts(max_rows, max_len, num_pages - 1, page_size, b"echo", {})
    timer = timer or StepTimer(clock=lambda: 0.0)
    return Engine(planner, executor, depth, facts, kv_events=kv_events, timer=timer), planner, executor, cache
