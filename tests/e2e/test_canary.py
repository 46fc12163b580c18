"""The canary: pages that hold what they should not stop the engine before anybody reads them, on whatever tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.kv_groups import CANARY
from hiserve.core.transfers import CopyKind, PageCopy
from hiserve.engine.loop import Engine
from hiserve.errors import InvariantError
from tests.helpers.small_model import small_model
from tests.helpers.tiers import squeeze
from tests.helpers.waiting import PATIENCE_S

PAGE = 16
SETTINGS: dict[str, Any] = {
    "model": small_model(),
    "in_process": True,
    "page_size": PAGE,
    "max_model_len": 256,
    "kv_pages": 40,
    "max_running_requests": 2,
    "max_batched_tokens": 64,
    "spec_steps": 2,
    "cpu_threads": 1,
    "host_cache_gib": 0.05,
    "log_level": "warning",
}
PROMPT = list(range(100, 170))
NUM_FULL = len(PROMPT) // PAGE
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@pytest.fixture(params=[0, 1], ids=["depth 0", "depth 1"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """The prompt is on the device and on the host."""
    with LLM(overlap=request.param, kv_canary=True, **SETTINGS) as made:
        made.generate([PROMPT], GREEDY)
        until_stored(made, NUM_FULL)
        yield made


def engine_of(llm: LLM) -> Engine:
    engine: Engine = llm._backend.engine  # type: ignore[attr-defined]
    return engine


def until_stored(llm: LLM, num_pages: int) -> None:
    """Steps until the host, whose memory is made ready meanwhile, has so many pages."""
    engine, end = engine_of(llm), time.monotonic() + PATIENCE_S
    while engine.stats().cache.offloads.num_fulfilled < num_pages:
        assert time.monotonic() < end
        engine.step()
    assert not engine.has_work


def pools_of(llm: LLM) -> tuple[Any, Any]:
    transfers = engine_of(llm)._executor._tier_transfers._transfers  # type: ignore[attr-defined]
    return transfers._device, transfers._host


def leave_device(llm: LLM) -> None:
    """Evicts from the device what the host has too."""
    squeeze(engine_of(llm)._planner._cache)


def num_cached(llm: LLM) -> int | None:
    (result,) = llm.generate([PROMPT], GREEDY)
    return result.num_cached_tokens


def test_a_page_of_each_tier_passes(llm: LLM) -> None:
    assert num_cached(llm) == NUM_FULL * PAGE
    leave_device(llm)
    assert num_cached(llm) == NUM_FULL * PAGE
    assert engine_of(llm).stats().cache.loads.num_fulfilled == NUM_FULL


def test_a_garbled_device_page_stops_the_engine(llm: LLM) -> None:
    device, _ = pools_of(llm)
    for group in ("kv", CANARY.name):
        storage = device.storage(group)
        storage.view(torch.uint8).bitwise_xor_(0x80)
    with pytest.raises(InvariantError, match=r"row \d, page \d+: position 0 holds token .* not token 100"):
        num_cached(llm)


def test_a_garbled_host_page_stops_the_engine(llm: LLM) -> None:
    _, host = pools_of(llm)
    leave_device(llm)
    host.span(1, host.num_pages)[:, 7::8] ^= 0x80
    with pytest.raises(InvariantError, match=r"row \d, page \d+: position \d+ holds token .* of position"):
        num_cached(llm)


def swapped(copy: PageCopy) -> PageCopy:
    """Two pages of a load change places."""
    pages = copy.host_pages.copy()
    pages[[0, 1]] = pages[[1, 0]]
    return replace(copy, host_pages=pages)


def shifted(copy: PageCopy) -> PageCopy:
    """Each page goes where the one after it belongs."""
    return replace(copy, host_pages=np.roll(copy.host_pages, 1))


def short(copy: PageCopy) -> PageCopy:
    """The last page is forgotten; what was in its place stays."""
    return replace(copy, device_pages=copy.device_pages[:-1], host_pages=copy.host_pages[:-1])


@pytest.mark.parametrize("change", [swapped, shifted, short])
def test_a_load_that_brings_pages_to_the_wrong_places_stops_the_engine(
    llm: LLM, change: Callable[[PageCopy], PageCopy]
) -> None:
    transfers = engine_of(llm)._executor._tier_transfers._transfers  # type: ignore[attr-defined]
    device, _ = pools_of(llm)
    leave_device(llm)
    device.storage(CANARY.name).zero_()
    honest = transfers._execute
    transfers._execute = lambda copy: honest(change(copy) if copy.kind is CopyKind.LOAD else copy)
    where = NUM_FULL * PAGE - PAGE if change is short else 0
    with pytest.raises(InvariantError, match=rf"position {where} holds"):
        num_cached(llm)


def test_a_store_that_reads_the_wrong_pages_is_noticed_when_they_come_back(llm: LLM) -> None:
    transfers = engine_of(llm)._executor._tier_transfers._transfers  # type: ignore[attr-defined]
    honest = transfers._execute
    transfers._execute = lambda copy: honest(swapped(copy) if copy.kind is CopyKind.OFFLOAD else copy)
    prompt = PROMPT[::-1]
    llm.generate([prompt], GREEDY)
    until_stored(llm, 2 * NUM_FULL)
    leave_device(llm)
    with pytest.raises(InvariantError, match="position 0 holds"):
        llm.generate([prompt], GREEDY)


def test_the_debug_group_is_part_of_what_keeps_caches_apart() -> None:
    found = set()
    for is_on in (False, True):
        with LLM(kv_canary=is_on, **SETTINGS) as llm:
            _, host = pools_of(llm)
            found.add((engine_of(llm).facts.namespace, host.layout.page_bytes))
            assert [group.name for group in host.layout.groups] == ["kv", "draft", "boundary", "canary"][: 3 + is_on]
            assert (engine_of(llm)._executor._runners._canary is not None) is is_on  # type: ignore[attr-defined]
    assert len({namespace for namespace, _ in found}) == 2
    small, large = sorted(size for _, size in found)
    assert large - small == PAGE * CANARY.slot_bytes
