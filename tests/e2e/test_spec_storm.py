"""Drafts of a trained head over a tiny pool: everything leaves for the host and comes back, and no token differs."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve import LLM
from tests.helpers.dialogues import trained
from tests.helpers.storm import (
    Load,
    Outcome,
    check_acceptance,
    check_hits,
    dialogues,
    load_whatever_it_costs,
    settings,
    weather,
)
from tests.helpers.tiered import check_whole, engine_of

SEED = 17
SHORT = Load(num_requests=14, num_running=3, num_forewords=4, kv_pages=18)
LONG = Load(num_requests=300, num_running=8, num_forewords=40, kv_pages=40)
EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_batched_tokens": 192, "max_model_len": 192}


@pytest.mark.parametrize(
    ("kind", "steps", "load"),
    [
        ("eagle3", 3, SHORT),
        *[pytest.param("eagle3", steps, LONG, marks=pytest.mark.long) for steps in (3, "auto")],
        *[pytest.param("mtp", steps, LONG, marks=pytest.mark.long) for steps in (1, 3)],
    ],
)
@pytest.mark.wide  # in every run: the storm of test_spec_matrix.py
def test_a_storm_changes_no_token_and_no_acceptance(kind: str, steps: int | str, load: Load) -> None:
    spec: dict[str, Any] = {"spec": trained(kind), "spec_steps": steps}
    endless, small = {"kv_pages": 20 * load.num_requests}, {"kv_pages": load.kv_pages, "host_cache_gib": 0.1}
    with LLM(**settings(load, **EXACT, **endless, host_cache_gib=0, disable_prefix_cache=True)) as llm:
        requests = dialogues(llm, load, SEED)
        expected = weather(llm, requests, load, SEED)
    with LLM(**settings(load, **EXACT, **endless, **spec, host_cache_gib=0)) as llm:
        calm = weather(llm, requests, load, SEED + 1)
        assert not engine_of(llm).stats().evicted_pages
    runs: list[Outcome] = []
    for options in (spec, {}):
        with LLM(**settings(load, **EXACT, **small, **options, overlap=1)) as llm:
            load_whatever_it_costs(llm)
            runs.append(weather(llm, requests, load, SEED + 2))
            stats = engine_of(llm).stats()
            print(stats.preemptions, stats.evicted_pages, stats.cache.loads, stats.drafts.chosen_steps)
            assert stats.evicted_pages > load.num_requests
            assert stats.cache.loads.num_fulfilled > load.num_requests // 2
            check_whole(llm)
    storm, plain = runs
    assert storm.tokens == plain.tokens == calm.tokens == expected.tokens
    check_acceptance(storm, calm, is_auto=steps == "auto")
    check_hits(storm, plain)
