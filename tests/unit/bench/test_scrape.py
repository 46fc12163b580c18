"""Metrics before and after a run: what grew, by how much, and the page size."""

from __future__ import annotations

import pytest

from hiserve.bench.scrape import increases, page_size_of, total

BEFORE = b"""# HELP hiserve:cached_tokens_total The same by tier.
# TYPE hiserve:cached_tokens_total counter
hiserve:cached_tokens_total{cache_source="device",model_name="m"} 10.0
hiserve:cached_tokens_total{cache_source="host",model_name="m"} 5.0
# TYPE hiserve:engine_steps_total counter
hiserve:engine_steps_total{model_name="m"} 9.0
# TYPE hiserve:worker_restarts_total counter
hiserve:worker_restarts_total{model_name="m"} 1.0
# TYPE hiserve:num_requests_running gauge
hiserve:num_requests_running{model_name="m"} 3.0
# TYPE hiserve:cache_config_info gauge
hiserve:cache_config_info{model_name="m",num_pages="99",page_size="32"} 1.0
"""
AFTER = (
    BEFORE.replace(b"} 10.0", b"} 12.5")
    .replace(b"} 5.0", b"} 6.0")
    .replace(b"} 9.0", b"} 4.0")
    .replace(b"} 3.0", b"} 7.0")
)


def test_what_grew_is_told_by_how_much_and_a_counter_that_fell_began_again() -> None:
    assert increases(BEFORE, AFTER) == {
        'hiserve:cached_tokens_total{cache_source="device"}': 2.5,
        'hiserve:cached_tokens_total{cache_source="host"}': 1.0,
        "hiserve:engine_steps_total{}": 4.0,
    }


def test_series_of_a_metric_are_summed_by_label() -> None:
    grown = increases(BEFORE, AFTER)
    assert total(grown, "cached_tokens_total") == 3.5
    assert total(grown, "cached_tokens_total", cache_source="host") == 1.0
    assert total(grown, "cached_tokens_total", cache_source="store") is None
    assert total(grown, "cached") is None


def test_a_metric_that_was_not_there_before_counts_from_nothing() -> None:
    assert total(increases(b"", BEFORE), "cached_tokens_total") == 15.0


@pytest.mark.parametrize("text", [b"", b"<html>", b"a{b=c} d\n", b"\xff\xfe"])
def test_what_is_no_metrics_has_none(text: bytes) -> None:
    assert increases(text, text) == {}
    assert page_size_of(text) is None


def test_each_engine_tells_its_page_size() -> None:
    assert page_size_of(BEFORE) == 32
    assert page_size_of(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="7"} 1.0\n') == 16
    assert page_size_of(b'vllm:cache_config_info{block_size="auto"} 1.0\n') is None
