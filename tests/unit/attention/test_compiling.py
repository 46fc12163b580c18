"""Compilers side by side, and which libraries FlashInfer is asked for."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from hiserve.attention.base import AttentionShape
from hiserve.attention.flashinfer_libraries import Building
from tests.helpers.waiting import PATIENCE_S

SHAPE = AttentionShape(num_layers=2, num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, dtype=torch.bfloat16)


def test_all_builds_run_at_the_same_time() -> None:
    together = threading.Barrier(5)
    building = Building([lambda: together.wait(PATIENCE_S)] * 5)
    building.wait()
    assert building.is_done
    assert not together.broken


def test_building_is_done_when_the_last_has_ended_and_waits_for_it() -> None:
    may_end = threading.Event()
    ended: list[int] = []

    def slow() -> None:
        assert may_end.wait(PATIENCE_S)
        ended.append(1)

    def fail(text: str) -> None:
        raise RuntimeError(text)

    building = Building([slow, lambda: fail("first"), lambda: fail("second")])
    assert not building.is_done
    may_end.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="first"):
            building.wait()
    assert building.is_done
    assert ended == [1]


def test_nothing_to_build_is_done() -> None:
    building = Building([])
    assert building.is_done
    building.wait()


class Spec:
    """A library on paper."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.is_compiled = arguments[0] == "fa3" and True in arguments

    def build(self, verbose: bool) -> None:
        BUILT.append(self.arguments)


BUILT: list[tuple[Any, ...]] = []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The calls of FlashInfer, without it."""
    library, jit = ModuleType("flashinfer"), ModuleType("flashinfer.jit")
    for name in ("DecodeWithPagedKVCache", "PrefillWithPagedKVCache", "MLAPagedAttention"):
        setattr(library, f"Batch{name}Wrapper", None)
    library.BatchPrefillWithRaggedKVCacheWrapper = library.fast_decode_plan = None  # type: ignore[attr-defined]
    jit.gen_batch_prefill_module = Spec  # type: ignore[attr-defined]
    jit.gen_batch_decode_module = lambda *arguments: Spec("decode", *arguments)  # type: ignore[attr-defined]
    jit.gen_batch_mla_module = lambda *arguments: Spec("mla", *arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    name = "hiserve.attention.flashinfer_calls"
    monkeypatch.delitem(sys.modules, name, raising=False)
    BUILT.clear()
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("changes", "prefill", "wanted"),
    [
        ({}, "fa2", ["fa2"]),
        ({}, "fa3", ["fa2", "fa3"]),
        ({"num_heads": 6}, "fa3", ["fa2", "fa3", "decode"]),
        ({"windows": (None, 64)}, "fa3", ["fa2", "fa3", "fa2"]),  # the fourth is there
        ({"windows": (64, 128)}, "fa2", ["fa2"]),
    ],
    ids=str,
)
def test_each_library_that_is_not_there_is_built_once(
    calls: Any, changes: dict[str, Any], prefill: str, wanted: list[str]
) -> None:
    shape = dataclasses.replace(SHAPE, **changes)
    builds = calls.builds(shape, prefill)
    Building(builds).wait()
    assert sorted(kind for kind, *_ in BUILT) == sorted(wanted)
    assert len(set(BUILT)) == len(BUILT), "two builds write the same files"
    for _, *arguments in BUILT:
        assert arguments[:7] == [*[torch.bfloat16] * 3, torch.int32, 128, 128, 0]


def test_the_library_of_absorbed_queries_is_built_for_their_sizes(calls: Any) -> None:
    Building(calls.absorbed_builds(dataclasses.replace(SHAPE, num_kv_heads=1, head_dim=576))).wait()
    assert [("mla", "fa3", *[torch.bfloat16] * 3, torch.int32, 512, 64, False)] == BUILT
