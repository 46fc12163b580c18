"""The benchmark of the cache finds long prefixes on the host in models with windows too, and loads their tails with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cache import (
    DURING_LOAD,
    FULL,
    REPLAYED,
    SHAPES,
    TINY,
    Bench,
    measure_hit,
    measure_write_through,
    show,
    sizes_of,
)
from tests.helpers.models import save_family

PREFIX = 128  # tokens


@pytest.mark.wide
def test_a_prefix_without_a_regular_tail_comes_whole_from_the_host(tmp_path: Path) -> None:
    """As that of Gemma-3, which is shorter than the distance of two tails: the first prompt that shares it leaves one."""
    settings = TINY.settings | {
        "model": str(save_family("gpt_oss", tmp_path)),
        "max_model_len": 256,
        "tail_every": 1024,
    }
    settings |= {"kv_pages": 40}
    bench = Bench(replace(TINY, settings=settings, prefix=PREFIX, repeats=1, row_output=17))
    try:
        host = bench.host.settings.cache
        assert host.window_pages > 0
        hit, stored = measure_hit(bench), measure_write_through(bench)
    finally:
        bench.close()
    (loaded,), (rest,) = hit["samples"]["hits"], hit["samples"]["rests"]
    assert loaded["host_tokens"] == rest["device_tokens"] == PREFIX
    history = PREFIX * bench.host.memory["KV pool"] // host.kv_pages // host.page_size
    assert loaded["load_bytes"] > history, "the tail is loaded too"
    assert stored["stored_pages"] > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_changes_its_own_sizes_alone(shape: str) -> None:
    sizes = sizes_of(shape)
    assert sizes.settings["shape"] == shape
    assert (sizes.prefix, sizes.suffix) == (FULL.prefix, FULL.suffix)
    assert sizes.settings["kv_pages"] * sizes.settings["page_size"] > sizes.prefix + sizes.suffix


def test_times_are_to_be_short_and_replays_and_conversations_many() -> None:
    bad = {
        "others": {"ratios": {REPLAYED: 0.97, DURING_LOAD: 1.2}},
        "conversations": {"ratios": {"conversations": 2.9}},
    }
    good = {
        "others": {"ratios": {REPLAYED: 1.0, DURING_LOAD: 1.0}},
        "conversations": {"ratios": {"conversations": 4.0}},
    }
    assert sorted(show(bad)) == sorted([REPLAYED, DURING_LOAD, "conversations"])
    assert show(good) == show({"others": {"ratios": {DURING_LOAD: None}}, "same_tokens": {}}) == []
