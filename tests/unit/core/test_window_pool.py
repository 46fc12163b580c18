"""The size of the pool of layers with a window: its share of memory, and sizes that are refused."""

from __future__ import annotations

import pytest

from hiserve.config.options import make_options
from hiserve.core.machine import Machine
from hiserve.core.resolve import resolve
from hiserve.core.window_pool import (
    LEAST_SHARE,
    MOST_SHARE,
    NO_WINDOW_POOL,
    TAIL_TOKENS,
    WindowLimits,
    WindowPool,
    plan_windows,
)
from hiserve.errors import ConfigError, ResourceError
from hiserve.models.builtin_shapes import shape_config
from hiserve.models.draft_config import model_facts
from hiserve.models.model_config import NANO, find_model
from tests.helpers.model_facts import GIB

LIMITS = WindowLimits(window=128, page_size=16, num_draft=3, depth=1, max_batched_tokens=512)
POOL = WindowPool(limits=LIMITS, slot_bytes=24_576)  # of gpt-oss-20b
PAGE_BYTES = 16 * 12_288 * 2  # of its other layers
ROOM = 2**40


@pytest.mark.parametrize("given", ["auto", 0])
def test_obstacles_turn_auto_off(given: int | str) -> None:
    assert not plan_windows(given, ["they have no canary"])  # type: ignore[arg-type]
    assert plan_windows(given, []) == (given == "auto")  # type: ignore[arg-type]


def test_obstacles_refuse_what_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="they have no canary") as caught:
        plan_windows(100, ["they have no canary", "they do not go to the host"])
    assert caught.value.param == "window_pages" and "host" not in caught.value.message
    assert plan_windows(100, [])


def test_no_pool_takes_nothing() -> None:
    assert NO_WINDOW_POOL.page_bytes == NO_WINDOW_POOL.bytes_per_page(PAGE_BYTES) == 0
    assert NO_WINDOW_POOL.size("auto", 100, 100 * PAGE_BYTES, 8, ROOM) == (0, "all layers share their pages")
    assert NO_WINDOW_POOL.size(0, 100, 100 * PAGE_BYTES, 8, ROOM) == (0, "")


@pytest.mark.parametrize("window", [2, 128, 100_000])
def test_windows_get_their_share_of_the_memory_of_both(window: int) -> None:
    """t / (t + 1500 h), with bounds: a window of 128 tokens is the one between them."""
    limits = WindowLimits(window=window, page_size=16, num_draft=0, depth=0, max_batched_tokens=64)
    pool = WindowPool(limits=limits, slot_bytes=24_576)
    beside = pool.bytes_per_page(PAGE_BYTES)
    tail, history = limits.tail_pages * pool.page_bytes, PAGE_BYTES / 16
    asked = tail / (tail + TAIL_TOKENS * history)
    share = {2: LEAST_SHARE, 128: LEAST_SHARE, 100_000: MOST_SHARE}[window]
    assert beside / (beside + PAGE_BYTES) == pytest.approx(share)
    assert (asked < LEAST_SHARE, asked > MOST_SHARE) == (share == LEAST_SHARE, share == MOST_SHARE)


def test_between_the_bounds_the_share_is_that_of_a_tail() -> None:
    limits = WindowLimits(window=1024, page_size=16, num_draft=0, depth=0, max_batched_tokens=64)
    pool = WindowPool(limits=limits, slot_bytes=24_576)
    beside = pool.bytes_per_page(PAGE_BYTES)
    assert beside / (beside + PAGE_BYTES) == pytest.approx(1024 / (1024 + TAIL_TOKENS))


def test_auto_holds_a_row_a_tail_and_a_step_at_least_and_no_more_than_all_could_hold() -> None:
    few = POOL.size("auto", 10, 10 * PAGE_BYTES, 8, ROOM)
    assert few == (LIMITS.least_pages, "beside 10 KV pages")
    many, _ = POOL.size("auto", 10_000, 10_000 * PAGE_BYTES, 8, ROOM)
    assert LIMITS.least_pages < many == int(POOL.bytes_per_page(PAGE_BYTES) * 10_000 / POOL.page_bytes)
    tiny = WindowPool(limits=LIMITS, slot_bytes=2)  # its share would be more pages than there are
    assert tiny.size("auto", 100, 100 * PAGE_BYTES, 8, ROOM)[0] == 100 + LIMITS.most_pages(8)


def test_a_row_can_start_with_a_load_in_the_smallest_pool() -> None:
    for_rows = LIMITS.least_pages - 1 - LIMITS.step_pages
    assert for_rows == LIMITS.promised_pages(10_000) + LIMITS.tail_pages


@pytest.mark.parametrize("num_pages", [3, 100, 10_000])
def test_both_pools_fit_into_their_memory_and_leave_less_than_a_page(num_pages: int) -> None:
    """In little memory the smallest pool of windows, which a row, its step and a tail take, comes before other pages."""
    num_bytes = num_pages * PAGE_BYTES + LIMITS.least_pages * POOL.page_bytes
    pages = POOL.pages_beside("auto", num_bytes, PAGE_BYTES)
    windows, _ = POOL.size("auto", pages, pages * PAGE_BYTES, 8, ROOM)
    left = num_bytes - pages * PAGE_BYTES - windows * POOL.page_bytes
    assert pages >= 3 and 0 <= left < 2 * (PAGE_BYTES + POOL.page_bytes)
    assert POOL.pages_beside(LIMITS.least_pages, num_bytes, PAGE_BYTES) == num_pages
    assert POOL.pages_beside(10 * num_pages + 10_000, num_bytes, PAGE_BYTES) == 0
    assert NO_WINDOW_POOL.pages_beside("auto", num_bytes, PAGE_BYTES) == num_bytes // PAGE_BYTES


def test_given_pages_stay_from_the_least_on() -> None:
    assert POOL.size(LIMITS.least_pages, 10, 10 * PAGE_BYTES, 8, ROOM) == (LIMITS.least_pages, "")
    with pytest.raises(ConfigError, match=f"take {LIMITS.least_pages}. Raise it, lower --max-batched-tokens") as caught:
        POOL.size(LIMITS.least_pages - 1, 10, 10 * PAGE_BYTES, 8, ROOM)
    assert caught.value.param == "window_pages"


def test_given_pages_that_do_not_fit_name_what_to_lower() -> None:
    assert POOL.size(1000, 10, 10 * PAGE_BYTES, 8, 1000 * POOL.page_bytes) == (1000, "")
    for pages, room in ((1001, 1000 * POOL.page_bytes), (10**9, ROOM), (1000, -5)):
        with pytest.raises(ResourceError, match=rf"^{pages} window pages need .* Lower --window-pages") as caught:
            POOL.size(pages, 10, 10 * PAGE_BYTES, 8, room)
        assert caught.value.param == "window_pages" and "-" not in caught.value.message.split("Lower")[0]


def test_an_image_takes_whole_pages_of_the_host() -> None:
    assert [POOL.image_bytes(size) for size in (PAGE_BYTES, PAGE_BYTES - 1, PAGE_BYTES + 1)] == [
        PAGE_BYTES,
        2 * (PAGE_BYTES - 1),
        PAGE_BYTES + 1,
    ]
    assert NO_WINDOW_POOL.image_bytes(PAGE_BYTES) == 0


def test_a_given_share_and_distance_replace_those_of_auto() -> None:
    half = WindowPool(limits=LIMITS, slot_bytes=24_576, share=0.5)
    assert half.tail_share(PAGE_BYTES) == 0.5 and half.bytes_per_page(PAGE_BYTES) == PAGE_BYTES
    assert POOL.tail_every("auto", PAGE_BYTES) == 8 * 128
    assert [POOL.tail_every(given, PAGE_BYTES) for given in (0, 1, 16, 100)] == [0, 16, 16, 112]
    assert NO_WINDOW_POOL.tail_every(100, PAGE_BYTES) == NO_WINDOW_POOL.tail_share(PAGE_BYTES) == 0


@pytest.mark.parametrize(("shape", "bar"), [("gpt-oss-20b", 1.5), ("gemma-3-27b", 2.0)])
@pytest.mark.parametrize("memory_gib", [80, 141])
def test_the_same_memory_holds_the_history_of_more_tokens_than_with_all_pages_kept(
    shape: str, bar: float, memory_gib: int
) -> None:
    """Of requests as long as each other: by default they are the longest that the pool holds, and take larger tables."""
    machine = Machine(cores=64, memory_bytes=512 * GIB, cuda_memory_bytes=(memory_gib * GIB,))
    pages = []
    for given in ({}, {"window_pages": 0}):
        options = make_options(
            shape=shape, load_format="dummy", device="cuda", max_model_len=32_768, host_cache_gib=0, **given
        )
        found = resolve(options, model_facts(options, find_model(NANO), shape_config(shape)), machine)
        assert found.settings.cache.frees_windows == (not given)
        pages.append(found.settings.cache.kv_pages)
    assert pages[0] >= bar * pages[1]
