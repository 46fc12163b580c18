"""The memory of what rows carry along and of its snapshots: shares, fewer rows, refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hiserve.config.options import DTYPE_BYTES
from hiserve.core.kv_groups import CarriedBytes
from hiserve.core.machine import GIB, Machine
from hiserve.core.resolve import Resolved, resolve
from hiserve.core.window_pool import LEAST_SLOTS, MOST_SHARE, NO_WINDOW_POOL, TAIL_TOKENS, WindowLimits, WindowPool
from tests.helpers.model_facts import LARGE
from tests.helpers.settings import make_options

MIB = 1 << 20
SERVER = Machine(cores=32, memory_bytes=512 * GIB, cuda_memory_bytes=(80 * GIB,), shm_bytes=256 * GIB)


def planned(state_bytes: int, draft_bytes: int = 0, **given: Any) -> Resolved:
    sizes = {"row": state_bytes, "draft": draft_bytes, "snapshot": state_bytes}
    carried = CarriedBytes(**{name: dict.fromkeys(DTYPE_BYTES, size) for name, size in sizes.items()})
    return resolve(make_options(**given), msgspec.structs.replace(LARGE, carried=carried), SERVER)


def test_rows_and_snapshots_are_items_of_the_plan() -> None:
    resolved = planned(10 * MIB)
    memory, rows = resolved.memory, resolved.settings.scheduler.max_running_requests
    assert rows == 256 and memory.parts["states of requests"] == 257 * 10 * MIB
    assert memory.parts["snapshots of states"] == memory.snapshot_slots * 10 * MIB
    assert sum(memory.parts.values()) <= 80 * GIB


def test_snapshots_get_their_share_of_the_memory_of_tails() -> None:
    """t / (t + 1500 h), with bounds: here the share is between them."""
    resolved = planned(64 * MIB, max_running_requests=8)
    memory = resolved.memory
    history, snapshots = memory.parts["KV pool"], memory.parts["snapshots of states"]
    asked = 64 * MIB / (64 * MIB + TAIL_TOKENS * memory.page_bytes / resolved.settings.cache.page_size)
    assert snapshots / (history + snapshots) == pytest.approx(asked, abs=0.01) == pytest.approx(memory.tail_share)
    assert resolved.settings.cache.tail_every > 0


def test_fewer_requests_run_at_once_if_what_they_carry_takes_more_than_a_quarter() -> None:
    resolved = planned(200 * MIB)
    room = 80 * GIB - resolved.memory.parts["weights"]
    rows = resolved.settings.scheduler.max_running_requests
    assert rows < 256 and (rows + 1) * 200 * MIB <= room / 4 < (2 * rows + 1) * 200 * MIB
    assert any(
        "--max-running-requests auto" in line and "carries 0.20 GiB along" in line for line in resolved.decisions
    )
    given = planned(200 * MIB, max_running_requests=128)
    assert given.settings.scheduler.max_running_requests == 128, "what was given stays"


def test_drafts_lengthen_the_rings_of_rows() -> None:
    plain, drafts = (planned(MIB, MIB, spec=spec, spec_steps=5).memory.parts for spec in ("off", "ngram"))
    assert drafts["states of requests"] == 6 * plain["states of requests"]


def test_with_a_store_there_are_as_many_slots_as_without() -> None:
    plain, stored = (planned(10 * MIB, **options).settings.cache for options in ({}, {"store": "file:/tmp/x"}))
    assert stored.snapshot_slots == plain.snapshot_slots > 0


def test_windows_and_snapshots_share_as_a_tail_does() -> None:
    limits = WindowLimits(window=128, page_size=128, num_draft=0, depth=0, max_batched_tokens=128)
    pool = WindowPool(limits=limits, slot_bytes=2_000, snapshot_bytes=3 * 256_000, page_size=128)
    page_bytes = 12_800
    assert pool.page_bytes == 256_000 and limits.tail_pages == 1
    assert pool.tail_share(page_bytes) == MOST_SHARE
    num_bytes = 3 * GIB
    pages = pool.pages_beside("auto", num_bytes, page_bytes)
    windows, _ = pool.size("auto", pages, pages * page_bytes, 8, num_bytes)
    slots = pool.size_slots(pages, pages * page_bytes, num_bytes)
    assert windows * pool.page_bytes / (slots * pool.snapshot_bytes) == pytest.approx(1 / 3, rel=0.01)
    assert 0.99 * num_bytes < pages * page_bytes + windows * pool.page_bytes + slots * pool.snapshot_bytes <= num_bytes


def test_a_model_without_states_has_no_slots() -> None:
    assert NO_WINDOW_POOL.size_slots(100, 100, GIB) == 0


def test_the_smallest_pool_has_room_for_a_row_and_a_load() -> None:
    pool = WindowPool(limits=None, slot_bytes=0, snapshot_bytes=10**6, page_size=16)
    assert pool.size_slots(10, 10 * 64, 10**9) == LEAST_SLOTS
    assert pool.pages_beside("auto", LEAST_SLOTS * 10**6 + 640, 64) == 10
