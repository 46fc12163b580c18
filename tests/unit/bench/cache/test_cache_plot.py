"""The picture of a cache is written whatever the run was like."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiserve.bench.cache_summary import Held
from hiserve.bench.plot import Plotter, draw_cache
from tests.helpers.samples import run_of, sample

HOST = {"device": 2, "host": 6, "store": 0}
RUNS = {
    "usual": run_of(sample(0.0, 0.1), sample(0.5, 3.0, num_cached=8, cached_by_tier=HOST), sample(9.0, 9.01)),
    "one request": run_of(sample(0.0, 0.1)),
    "nothing told": run_of(sample(0.0, 0.1, num_cached=-1, num_prompt=-1)),
    "only failures": run_of(sample(0.0, error="timeout", end_s=1.0)),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_run_can_be_drawn(tmp_path: Path, name: str) -> None:
    path, run = tmp_path / "run.svg", RUNS[name]
    draw_cache(Plotter(path), "a cache", run, [Held(most=8, least=4)] * len(run.samples))
    text = path.read_text()
    for words in ("a cache", "Prompt tokens from the cache", "endless cache, at most"):
        assert f"<!-- {words}" in text, words
    assert ("<!-- from the host: 1" in text) == (name == "usual")
