"""Reported races between forwards and copies as test cases, by number: a real engine whose steps overlap.

TC-22, 23, 25, 26 and 29 are in ``test_reported_bugs_index.py``; TC-20 and TC-21 on CUDA streams in ``tests/gpu``.

- TC-24 (staging pages freed early): we have no staging pages of their own; what a prefetch fills is the op's until its
  end, and what an upload reads stays (TC-42, INV-26).
- TC-27 (a lock returned that nobody took, in write-back): there is no write-back; every receipt is released exactly
  once, and every hold is in one table (INV-11).
- TC-28 (a page sent elsewhere before its load ended): there is no such sender; who reads off the forwards' stream is
  an upload, which begins after the ack of the store (INV-27).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.plan import BatchPlan
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.ipc.messages import Admit
from tests.helpers.small_model import small_model
from tests.helpers.transfers import hold_copies

PAGE = 16
SEED = 5
STEP_S = 0.004  # longer than planning takes, so that steps are in flight when copies are ordered


class Watch:
    """Follows which pages the forwards in flight touch, by the plans alone, and looks when a copy begins.

    Copies are sent off when a plan is submitted, as to a device with streams; the fences alone keep them back.

    Attributes:
        num_early: By kind: copies that were ordered while a forward in flight could touch (load) or write (store) their
            device pages.
        wrong: Copies that began all the same.
    """

    def __init__(self, llm: LLM) -> None:
        executor = llm._backend.engine._executor  # type: ignore[attr-defined]
        runners = executor._runners
        self._submit, self._forward = executor.submit, runners.run
        executor.submit, runners.run = self.submit, self.forward
        copier, transfers = executor._tier_transfers, executor._tier_transfers._transfers
        self._start, copier.start = copier.start, lambda plan: None
        hold_copies(transfers, self.hold)
        self._table = np.zeros((8, 64), dtype=np.int64)
        self._touched: dict[int, set[int]] = {}
        self._written: dict[int, set[int]] = {}
        self._carrier: dict[int, int] = {}
        self._lock = threading.Lock()
        self.num_early = dict.fromkeys(CopyKind, 0)
        self.wrong: list[str] = []

    def submit(self, plan: BatchPlan) -> Any:
        with self._lock:
            self._table[plan.table.rows, plan.table.indices] = plan.table.pages
            touched, written = set(), set()
            for row, end, num_new in zip(plan.rows.tolist(), plan.max_len.tolist(), plan.num_new.tolist(), strict=True):
                pages = self._table[row, : -(-end // PAGE)].tolist()
                touched |= set(pages)
                written |= set(pages[(end - num_new) // PAGE :])
            self._carrier |= {copy.op: plan.step_id for copy in plan.copies}
            for copy in plan.copies:
                self.num_early[copy.kind] += bool(self._conflicts(copy))
            self._touched[plan.step_id], self._written[plan.step_id] = touched, written
        self._start(plan)
        return self._submit(plan)

    def forward(self, plan: BatchPlan, *rest: Any) -> Any:
        time.sleep(STEP_S)
        outcome = self._forward(plan, *rest)
        with self._lock:
            del self._touched[plan.step_id], self._written[plan.step_id]
        return outcome

    def hold(self, copy: PageCopy) -> None:
        with self._lock:
            if steps := self._conflicts(copy):
                self.wrong.append(f"{copy.kind.name} {copy.op} began before the forwards of steps {steps} were done")

    def _conflicts(self, copy: PageCopy) -> list[int]:
        pages, carrier = set(copy.device_pages.tolist()), self._carrier[copy.op]
        by_step = self._touched if copy.kind is CopyKind.LOAD else self._written
        return [step for step, others in by_step.items() if step < carrier and not pages.isdisjoint(others)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        model=small_model(),
        in_process=True,
        spec="off",
        dtype="float64",
        overlap=1,
        page_size=PAGE,
        max_model_len=512,
        kv_pages=44,
        max_running_requests=4,
        max_batched_tokens=48,
        cpu_threads=1,
        host_cache_gib=0.1,
        log_level="warning",
    ) as made:
        yield made


@pytest.fixture(scope="module")
def watch(llm: LLM) -> Watch:
    """Prompts come back to pages of a request that was aborted while a forward of it was in flight."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(7, 4096, size).tolist() for size in (96, 113, 130, 97, 160, 144)]
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, seed=0)
    watch = Watch(llm)
    first = [one.outputs[0].token_ids for one in llm.generate(prompts, greedy)]
    assert len({token for tokens in first for token in tokens}) >= 20
    for uid, prompt in enumerate(2 * prompts):
        add(llm, 1000 + uid, rng.integers(7, 4096, 320).tolist(), msgspec.structs.replace(greedy, max_tokens=90))
        engine = llm._backend.engine  # type: ignore[attr-defined]
        for _ in range(12):
            engine.step()
        engine.abort([1000 + uid])
        add(llm, 2000 + uid, prompt, greedy)
        assert answer(llm, 2000 + uid) == first[uid % len(prompts)]
    return watch


def add(llm: LLM, uid: int, prompt: list[int], sampling: SamplingParams) -> None:
    engine = llm._backend.engine  # type: ignore[attr-defined]
    engine.add(Admit(uid, len(prompt), sampling, b"", 0), np.array(prompt, dtype=np.int32))


def answer(llm: LLM, uid: int) -> list[int]:
    engine, said = llm._backend.engine, []  # type: ignore[attr-defined]
    while engine.has_work:
        report = engine.step()
        if report is not None:
            ends = np.cumsum(report.counts)
            for each, end, count in zip(report.uids, ends.tolist(), report.counts, strict=True):
                said += report.tokens[end - count : end].tolist() if each == uid else []
    return said


def test_tc_20_a_store_begins_when_the_forward_that_wrote_its_pages_is_done(llm: LLM, watch: Watch) -> None:
    assert llm._backend.engine.stats().cache.offloads.num_fulfilled > 20  # type: ignore[attr-defined]
    assert not [each for each in watch.wrong if each.startswith("STORE")]


def test_tc_21_a_load_waits_for_the_forwards_that_may_touch_its_pages(llm: LLM, watch: Watch) -> None:
    assert llm._backend.engine.stats().cache.loads.num_fulfilled > 20  # type: ignore[attr-defined]
    assert watch.num_early[CopyKind.LOAD] > 0, "no load was ordered into pages of a forward in flight"
    assert not [each for each in watch.wrong if each.startswith("LOAD")]
