"""Which engine copies for each device, and how many bytes of stores may wait with each size of its pool."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from hiserve.engine import transfer_factory
from tests.helpers.transfers import GROUPS, THREAD, TransferBench

GIB = 1 << 30


@pytest.mark.parametrize(
    ("device", "pool_gib", "queued_gib"), [("cuda", 1, 1), ("cuda", 16, 2), ("cuda", 100, 4), ("cpu", 100, 0.25)]
)
def test_stores_that_wait_lock_an_eighth_of_the_device_pool_or_what_a_long_order_takes(
    monkeypatch: pytest.MonkeyPatch, device: str, pool_gib: int, queued_gib: float
) -> None:
    told: dict[str, Any] = {}

    def make(pool: object, host: object, **options: Any) -> object:
        told.update(options)
        return object()

    monkeypatch.setattr(transfer_factory.importlib, "import_module", lambda name: SimpleNamespace(Engine=make))
    monkeypatch.setitem(transfer_factory._ENGINES, device, ("anywhere", "Engine"))
    transfer_factory.make_transfers(device, SimpleNamespace(num_bytes=pool_gib * GIB), object())  # type: ignore[arg-type]
    assert told["max_queued_bytes"] == queued_gib * GIB


@pytest.mark.parametrize("device", transfer_factory._ENGINES)
def test_the_engine_of_each_device_exists(device: str) -> None:
    module, name = transfer_factory._ENGINES[device]
    assert callable(getattr(importlib.import_module(module), name))


def test_a_pool_knows_its_bytes() -> None:
    bench = TransferBench(THREAD)
    slots = bench.num_pages * bench.host.layout.page_size
    assert bench.device.num_bytes == slots * sum(group.slot_bytes for group in GROUPS)
    bench.close()
