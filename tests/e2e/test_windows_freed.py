"""Layers with a window have pages of their own: freed while rows run, and the same tokens as if all were kept.

Exact, in float64, against an engine that keeps all pages; pages that nobody holds are NaN (``WindowPool``).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.engine.loop import Engine
from hiserve.errors import ConfigError
from hiserve.llm.outputs import RequestOutput
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.tiered import engine_of
from tests.helpers.widening import some
from tests.helpers.window_models import SETTINGS, VOCAB, WINDOW, WindowPool, save_with_heads

NUM_NEW = 12
PAGE = int(SETTINGS["page_size"])
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=NUM_NEW, ignore_eos=True)
LENGTHS = range(WINDOW + 2, WINDOW + 2 + 2 * PAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_with_heads(tmp_path_factory.mktemp("windows"))


def prompts_of(seed: int = 0) -> list[list[int]]:
    """Prompts that share beginnings of any length and repeat themselves."""
    rng = np.random.default_rng(seed)
    base = rng.integers(7, VOCAB, 60).tolist()
    return [
        base[: int(rng.integers(0, 60))] + rng.integers(7, VOCAB, int(rng.integers(1, 9))).tolist() * 3
        for _ in range(8)
    ]


def told(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def converse(llm: LLM, sampling: SamplingParams) -> tuple[list[list[int]], list[RequestOutput]]:
    """First turns; then each again, and its next turn. Returns all tokens, and the later outputs."""
    prompts = prompts_of()
    first = llm.generate(prompts, sampling)
    again = llm.generate(prompts, sampling)
    turns = [[*prompt, *reply, 8, 9] for prompt, reply in zip(prompts, told(first), strict=True)]
    later = [*again, *llm.generate(turns, sampling)]
    return told(first) + told(later), later


@lru_cache
def expected(folder: Path, sampling: SamplingParams) -> list[list[int]]:
    """Of an engine that keeps all pages, and reuses none."""
    kept = {"window_pages": 0, "disable_prefix_cache": True}
    with LLM(model=str(folder), **SETTINGS | kept) as llm:
        assert engine_of(llm)._planner._cache.windows is None
        return converse(llm, sampling)[0]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages of one token": {"page_size": 1, "kv_pages": 600, "window_pages": 300},
    "pages longer than the window": {"page_size": 16},
    "chunks of a few tokens": {"max_batched_tokens": 5},
    "few tails": {"window_pages": 44},
    "reference attention": {"attention_backend": "reference"},
    "preemption": {"kv_pages": 45, "max_model_len": 128},
    "overlap": {"overlap": 1},
    "drafts": {"spec": "ngram", "spec_steps": 3},
    "drafts, overlap, preemption, few tails": {
        "spec": "ngram",
        "spec_steps": 3,
        "overlap": 1,
        "kv_pages": 45,
        "max_model_len": 128,
        "window_pages": 48,
    },
    "drafts of an EAGLE-3 head, pages of one token": {
        "spec": "eagle3",
        "spec_steps": 3,
        "page_size": 1,
        "kv_pages": 600,
        "window_pages": 300,
    },
    "drafts of an EAGLE-3 head, overlap, preemption": {
        "spec": "eagle3",
        "spec_steps": 2,
        "overlap": 1,
        "kv_pages": 45,
        "max_model_len": 128,
    },
    "graphs": {"graphs": "all"},
    "graphs, drafts, overlap": {"graphs": "all", "spec": "ngram", "spec_steps": 2, "overlap": 1},
}

COMBINED = {"pages of one token", "few tails", "preemption", "overlap", "drafts"}  # wide: others have them together


@pytest.mark.parametrize(
    ("case", "how"),
    some(
        product(CASES, ("greedy", "drawn")),
        *(pair for pair in zip(CASES, cycle(["greedy", "drawn"])) if pair[0] not in COMBINED),
        ("reference attention", "greedy"),
    ),
)
def test_tokens_depend_neither_on_freed_pages_nor_on_hits(
    case: str, how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H1, H2, H5, H12 and, with graphs, H13: a graph crosses windows and pages and equals the eager engine."""
    sampling = GREEDY if how == "greedy" else DRAWN
    wanted = expected(folder, sampling)  # before its engine would be recorded too
    options, pools = SETTINGS | CASES[case], WindowPool(monkeypatch)
    executors = allow_recording(monkeypatch) if "graphs" in options else []
    with LLM(model=str(folder), **options) as llm:
        engine = pools.watch(llm)
        tokens, later = converse(llm, sampling)
        assert tokens == wanted
        stats, windows = engine.stats(), engine._planner._cache.windows
        assert stats.stale_rows == 0 and (stats.preemptions > 0) == ("preemption" in case)
        assert windows is not None and sum(output.cached.num_tokens for output in later) > 0
        for executor in executors:
            assert sum(executor.gate_counts().get("replay", {}).values()) > 10
        engine.flush()
        assert windows.num_tails == 0 and windows.num_free == windows.num_pages - 1


@pytest.mark.parametrize(
    "options", [{}, {"spec": "ngram", "spec_steps": 3, "spec_history": 0, "overlap": 1}], ids=["plain", "drafts"]
)
def test_drafts_shorten_no_hit(options: dict[str, Any], folder: Path) -> None:
    """H9: a repeated prompt of L tokens has floor_P(L - 1), a next turn floor_P(settled)."""
    rng = np.random.default_rng(1)
    with LLM(model=str(folder), **SETTINGS | {"window_pages": 400} | options) as llm:
        for shortest in range(1, 3 * PAGE + WINDOW, 4):  # side by side, as many as there are rows
            lengths = range(shortest, min(shortest + 4, 3 * PAGE + WINDOW))
            prompts = [rng.integers(7, VOCAB, length).tolist() for length in lengths]
            replies = told(llm.generate(prompts, GREEDY))
            again = llm.generate(prompts, GREEDY)
            assert [each.cached.num_tokens for each in again] == [(length - 1) // PAGE * PAGE for length in lengths]
            asked = [[*prompt, *reply, 8, 9] for prompt, reply in zip(prompts, replies, strict=True)]
            settled = [length + NUM_NEW - 1 for length in lengths]  # of the last token nothing was computed
            turns = llm.generate(asked, GREEDY)
            assert [each.cached.num_tokens for each in turns] == [length // PAGE * PAGE for length in settled]


def poison_below(engine: Engine, pools: WindowPool, prompt: list[int], position: int) -> None:
    """Makes the window layers' keys and values of a cached prompt NaN up to a position."""
    cache, storage = engine._planner._cache, pools.made[-1].storage("swa")
    match = cache.match(b"", np.array(prompt, dtype=np.int32).tobytes())
    assert match.tail is not None
    first = match.num_tokens // PAGE - match.tail.pages.size
    for index, page in enumerate(match.tail.pages.tolist(), start=first):
        count = max(0, min(PAGE, position + 1 - index * PAGE))
        storage[:, :, page * PAGE : page * PAGE + count] = torch.nan


@pytest.mark.parametrize("length", some(LENGTHS, *LENGTHS[::2]))
def test_a_tail_suffices_and_one_row_less_does_not(length: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H4: [B - w + 1, B) of the window layers, and nothing below."""
    pools = WindowPool(monkeypatch)
    prompt = np.random.default_rng(length).integers(7, VOCAB, length).tolist()
    with LLM(model=str(folder), **SETTINGS) as llm:
        engine = engine_of(llm)
        expected_tokens = told(llm.generate([prompt], GREEDY))
        boundary = (length - 1) // PAGE * PAGE
        poison_below(engine, pools, prompt, boundary - WINDOW)
        (again,) = llm.generate([prompt], GREEDY)
        assert again.cached.num_tokens == boundary and told([again]) == expected_tokens
        poison_below(engine, pools, prompt, boundary - WINDOW + 1)
        assert told(llm.generate([prompt], GREEDY)) != expected_tokens


def test_a_branch_gets_a_tail_when_it_is_missed(folder: Path) -> None:
    """The first prompt that leaves another one midway computes the rest; the next has the shared part from the cache."""
    rng = np.random.default_rng(2)
    shared = rng.integers(7, VOCAB, 40).tolist()
    asked = [shared + rng.integers(7, VOCAB, 30).tolist() for _ in range(3)]
    with LLM(model=str(folder), **SETTINGS | {"window_pages": 400}) as llm:
        cached = [llm.generate([prompt], GREEDY)[0].cached for prompt in asked]
    assert [each.num_tokens for each in cached] == [0, 0, 40]
    assert (cached[1].miss, cached[1].miss_at) == ("no_tail", 0)


def test_a_prompt_waits_for_the_tail_of_the_row_ahead(folder: Path) -> None:
    rng = np.random.default_rng(3)
    shared = rng.integers(7, VOCAB, 60).tolist()
    asked = [shared + rng.integers(7, VOCAB, 30).tolist() for _ in range(4)]
    with LLM(model=str(folder), **SETTINGS | {"window_pages": 400, "max_batched_tokens": 128}) as llm:
        cached = [output.cached.num_tokens for output in llm.generate(asked, GREEDY)]
    assert cached == [0, 60, 60, 60]


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"kv_canary": True}, "they have no canary, and --kv-canary is given. Leave --window-pages out"),
    ({"window_pages": 9}, "a row, a tail and the tokens of a step take 16"),
)


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_window_pages_cannot_do_is_refused(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(model=str(folder), **SETTINGS | options)
    assert caught.value.param == "window_pages"


def test_a_model_with_one_kind_of_layer_has_no_window_pages() -> None:
    with pytest.raises(ConfigError, match="the model has not both layers with a window and layers without"):
        LLM(model="hiserve-nano", **SETTINGS)


@pytest.mark.parametrize("has_canary", [False, True])
def test_auto_frees_windows_where_there_is_no_canary(has_canary: bool, folder: Path, tmp_path: Path) -> None:
    more = {"kv_canary": True} if has_canary else {"store": f"file:{tmp_path / 'store'}", "host_cache_gib": 0.05}
    with LLM(model=str(folder), **SETTINGS | {"window_pages": "auto"} | more) as llm:
        assert (engine_of(llm)._planner._cache.windows is None) == has_canary
        assert len(told(llm.generate(prompts_of(), GREEDY))) == 8


def test_what_windows_hold_is_counted_and_shown(folder: Path) -> None:
    """Pages of rows and of tails, tails that made room, misses for lack of one, and each row's pages."""
    with LLM(model=str(folder), **SETTINGS | CASES["few tails"]) as llm:
        engine = engine_of(llm)
        shown: list[int] = []
        step = engine.step

        def watched() -> Any:
            updates = step()
            windows, (_, rows, _) = engine._planner._cache.windows, engine.watch("rows", 0.0)
            assert windows is not None
            counts = engine.stats().cache.windows
            shown.extend(row.num_window_pages for row in rows)
            held = counts.num_pages - counts.num_free - counts.num_evictable
            assert held == sum(row.num_window_pages for row in rows) - len(shared_by_rows(engine))
            return updates

        engine.step = watched  # type: ignore[method-assign]
        converse(llm, GREEDY)
        counts = engine.stats().cache
    windows = counts.windows
    assert max(shown) > WINDOW // PAGE and windows.num_pages == 43
    assert windows.num_free + windows.num_evictable == windows.num_pages, "no row runs"
    assert windows.num_tails > 0 and windows.num_evicted_tails > 0 and windows.num_evicted > 0
    assert counts.misses["no_tail"] > 0


def shared_by_rows(engine: Engine) -> list[int]:
    """Window pages that several rows hold, once for each row beyond the first."""
    rows = engine._planner._rows
    assert rows.windows is not None
    pages = [
        rows.windows.tables.pages[row, rows.windows.first[row] : rows.windows.tables.num_pages[row]].tolist()
        for row in rows.active.tolist()
    ]
    held = [page for row in pages for page in row]
    return held[len(set(held)) :]
