"""The eager runner: a layer reads its keys and values no earlier than it says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import torch

from hiserve.core.transfers import CopyAck, CopyKind, PageCopy
from hiserve.engine.executor import Executor
from hiserve.engine.tier_transfers import TierTransfers
from hiserve.runners.dispatch import Dispatch
from hiserve.runners.inputs import build_inputs
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import HandPlanner, int32

NUM_LAYERS = 3
PROMPT = list(range(7, 47))


def prefilled(folder: Path) -> tuple[Engine, HandPlanner]:
    """An engine whose pool holds two pages of a prompt."""
    engine, planner = Engine(folder), HandPlanner(16, 64)
    planner.admit(1, PROMPT)
    engine.executor.submit(planner.step({1: 32})).result()
    return engine, planner


@torch.inference_mode()
def test_what_is_on_its_way_to_a_layer_may_arrive_right_before_it(tmp_path: Path) -> None:
    save_llama(tmp_path)
    logits = []
    for arrives in (False, True):
        engine, planner = prefilled(tmp_path)
        plan = planner.step({1: 8})
        engine.rows.apply(plan)
        inputs = build_inputs(plan, engine.rows).forward
        storage = engine.pool.storage("kv")
        saved, order = storage.clone(), []

        def bring(layer: int) -> None:
            order.append(layer)  # noqa: B023
            storage[layer] = saved[layer]  # noqa: B023

        if arrives:
            storage.fill_(7.0)
            inputs = dataclasses.replace(inputs, before_layer=bring)
        logits.append(engine.runner.run(inputs).logits)
        assert order == (list(range(NUM_LAYERS)) if arrives else [])
    assert torch.equal(*logits)


class Waited:
    """Transfers of which only the waits matter."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int | None]] = []
        self.by_layer: dict[int, bool] = {}

    def start(self, copy: PageCopy, *, by_layer: bool = False) -> None:
        self.by_layer[copy.op] = by_layer

    def launch_begins(self) -> None:
        pass

    def launch_ends(self) -> None:
        pass

    def forward_done(self, step_id: int) -> None:
        pass

    def poll(self, wait_s: float = 0.0) -> list[CopyAck]:
        return []

    def wait(self, op: int, layer: int | None = None) -> None:
        self.waits.append((op, layer))

    def close(self) -> None:
        pass


def test_a_step_waits_layer_by_layer_for_the_loads_that_it_reads_and_for_no_others(tmp_path: Path) -> None:
    save_llama(tmp_path)
    engine, planner = prefilled(tmp_path)
    transfers, host = Waited(), SimpleNamespace(prefault=SimpleNamespace(throttle=SimpleNamespace(step=lambda: None)))
    executor = Executor(
        Dispatch(engine.rows, engine.runner), engine.rows, tier_transfers=TierTransfers(transfers, host)
    )  # type: ignore[arg-type]
    loads = tuple(PageCopy(op, CopyKind.LOAD, int32([op]), int32([op]), 0) for op in (40, 41, 42))
    plan = dataclasses.replace(planner.step({1: 8}), copies=loads, waits=(40, 42))
    executor.submit(plan).result()
    assert transfers.by_layer == {40: True, 41: False, 42: True}
    assert transfers.waits == [(op, layer) for layer in range(NUM_LAYERS) for op in (40, 42)]
    executor.submit(planner.step({1: 1})).result()
    assert len(transfers.waits) == 2 * NUM_LAYERS
