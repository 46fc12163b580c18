"""Plots are written in each format, whatever the run was like; matplotlib is an extra."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from hiserve.bench.cache_summary import Held
from hiserve.bench.plot import Plotter, draw_cache
from hiserve.bench.summary import Round, Spread
from hiserve.bench.workload import Run
from hiserve.errors import ConfigError
from tests.helpers.samples import run_of, sample

RUNS = {
    "usual": run_of(sample(0.0, 0.1, 0.15, 0.2), sample(0.5, 0.9, 1.0, 3.0)),
    "one chunk": run_of(sample(0.0, 0.1)),
    "wide": run_of(sample(0.0, 0.1, 0.1, 0.1001, 90.0)),
    "several tokens a chunk, uncounted": run_of(sample(0.0, 0.1, 0.2, tokens=[-1, -1], num_output=9)),
    "only failures": run_of(sample(0.0, error="timeout", end_s=1.0)),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_run_can_be_drawn(tmp_path: Path, name: str) -> None:
    path = tmp_path / "deep" / "run.png"
    run: Run = RUNS[name]
    Plotter(path).draw_run("a title", run)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_the_ending_chooses_the_format_and_the_text_is_there(tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    Plotter(path).draw_run("nano under load", RUNS["usual"])
    text = path.read_text()
    for words in ("nano under load", "Time to first token", "median 250", "milliseconds", "tokens/s"):
        assert f"<!-- {words}" in text or words in text, words


def rounds(cached: int | None) -> list[Round]:
    ttft = Spread(count=2, mean=3.0, median=3.0, p90=4.0, p99=5.0)
    made = (number for number in range(1, 4))
    return [
        Round(number=number, num_ok=2, ttft_ms=ttft, num_prompt=100, num_cached=cached, num_known=60) for number in made
    ]


@pytest.mark.parametrize("cached", [50, None])
def test_rounds_can_be_drawn(tmp_path: Path, cached: int | None) -> None:
    path = tmp_path / "rounds.png"
    Plotter(path).draw_rounds("chats", rounds(cached))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_missing_library_is_told_with_its_remedy_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match=r"pip install hiserve\[bench\]"):
        Plotter(tmp_path / "run.png")


def test_a_file_that_cannot_be_drawn_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end with \.png, \.svg, \.pdf"):
        Plotter(tmp_path / "run.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write --plot"):
        Plotter(tmp_path / "file" / "run.png")


HOST = {"device": 2, "host": 6, "store": 0}
CACHE_RUNS = {
    "usual": run_of(sample(0.0, 0.1), sample(0.5, 3.0, num_cached=8, cached_by_tier=HOST), sample(9.0, 9.01)),
    "one request": run_of(sample(0.0, 0.1)),
    "nothing told": run_of(sample(0.0, 0.1, num_cached=-1, num_prompt=-1)),
    "only failures": run_of(sample(0.0, error="timeout", end_s=1.0)),
}


@pytest.mark.parametrize("name", CACHE_RUNS)
def test_the_cache_of_every_run_can_be_drawn(tmp_path: Path, name: str) -> None:
    path, run = tmp_path / "run.svg", CACHE_RUNS[name]
    draw_cache(Plotter(path), "a cache", run, [Held(most=8, least=4)] * len(run.samples))
    text = path.read_text()
    for words in ("a cache", "Prompt tokens from the cache", "endless cache, at most"):
        assert f"<!-- {words}" in text, words
    assert ("<!-- from the host: 1" in text) == (name == "usual")
