"""Reported failures of hybrid caches as test cases, by number: which prefixes are found, and what stays cached for how long.

``test_hybrid_reports_drafts.py`` has those of drafts and graphs, ``tests/unit`` those of sizes and kernels;
``docs/invariants.md`` lists all.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.cache.index.prefix_cache import PrefixLock, TailPool
from hiserve.engine.loop import Engine
from hiserve.engine.planner import Planner
from hiserve.models.model_config import NANO, find_model
from tests.helpers.latent_models import save_latent
from tests.helpers.models import save_family
from tests.helpers.tiered import engine_of
from tests.helpers.window_models import SETTINGS, VOCAB, WINDOW, WindowPool, save_windows

PAGE = int(SETTINGS["page_size"])
NUM_NEW = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
ROOMY: dict[str, Any] = {"window_pages": 400}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_windows(tmp_path_factory.mktemp("windows"))


def drawn(seed: int, length: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(7, VOCAB, length).tolist()
    return found


def ask(llm: LLM, prompt: list[int], num_new: int = NUM_NEW) -> tuple[list[int], int]:
    """Returns the reply and the cached tokens of the prompt."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    (output,) = llm.generate([prompt], sampling)
    return list(output.outputs[0].token_ids), output.cached.num_tokens


def whole(num_tokens: int) -> int:
    """The tokens of whole pages."""
    return num_tokens // PAGE * PAGE


def planner_of(llm: LLM) -> Planner:
    return engine_of(llm)._planner


def windows_of(llm: LLM) -> TailPool:
    windows = planner_of(llm)._cache.windows
    assert windows is not None
    return windows


def test_hb_01_a_hit_reads_its_window_from_the_cache_and_from_no_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row has had other requests in between, and pages that nobody holds are NaN."""
    prompts = [drawn(seed, 30 + seed) for seed in range(4)]
    with LLM(model=str(folder), **SETTINGS | {"window_pages": 0, "disable_prefix_cache": True}) as llm:
        expected = [ask(llm, prompt)[0] for prompt in prompts]
    pools = WindowPool(monkeypatch)
    with LLM(model=str(folder), **SETTINGS | ROOMY) as llm:
        pools.watch(llm)
        llm.generate(prompts, GREEDY)
        llm.generate([drawn(90 + seed, 25) for seed in range(8)], GREEDY)
        assert [ask(llm, prompt) for prompt in reversed(prompts)] == [
            (tokens, whole(len(prompt) - 1)) for prompt, tokens in zip(prompts[::-1], expected[::-1], strict=True)
        ]


FAMILIES = ("gemma3_text", "gpt_oss", "deepseek_v3", "glm4_moe_lite")


@pytest.mark.parametrize("family", FAMILIES)
def test_hb_02_a_prompt_of_one_page_and_a_token_is_a_hit_in_every_family(family: str, tmp_path: Path) -> None:
    """Pages are aligned to nothing but themselves: not to the window, and not to several kinds of layers together."""
    if family in ("gemma3_text", "gpt_oss"):
        save_family(family, tmp_path, vocab_size=VOCAB)
        options: dict[str, Any] = {}
    else:
        save_latent(family, tmp_path, vocab_size=VOCAB)
        options = {"window_pages": "auto"}
    shutil.copy(find_model(NANO) / "tokenizer.json", tmp_path)
    with LLM(model=str(tmp_path), **SETTINGS | options) as llm:
        for length in (PAGE + 1, 2 * PAGE, 2 * PAGE + 1, WINDOW, WINDOW + PAGE + 2):
            prompt = drawn(length, length)
            first, again = ask(llm, prompt, 2), ask(llm, prompt, 2)
            assert again == (first[0], whole(length - 1)), length


def test_hb_06_a_chat_keeps_the_boundaries_that_can_come_back_and_no_others(folder: Path) -> None:
    """Two a turn: its prompt's end and its own, and none of the pages between them."""
    with LLM(model=str(folder), **SETTINGS | ROOMY) as llm:
        windows, history = windows_of(llm), drawn(1, 20)
        assert planner_of(llm)._rows.windows is not None
        for turn in range(1, 6):
            history += ask(llm, history)[0] + drawn(100 + turn, 9)
            assert 0 < windows.num_tails <= 2 * turn


def test_hb_07_a_long_chat_keeps_its_front_and_its_last_turn_when_tails_are_short(folder: Path) -> None:
    """The tail that was used least goes alone: the history before it stays, and each turn continues the one before."""
    with LLM(model=str(folder), **SETTINGS | {"window_pages": 24}) as llm:
        history, settled = drawn(1, 20), 0
        for turn in range(6):
            reply, num_cached = ask(llm, history)
            assert num_cached == whole(settled), turn
            settled = len(history) + NUM_NEW - 1
            history += reply + drawn(100 + turn, 5)
            ask(llm, drawn(200 + turn, 20), 2)
        cache, key = planner_of(llm)._cache, np.array(history, dtype=np.int32).tobytes()
        assert cache.match(b"", key).num_history_tokens == whole(settled)
        assert planner_of(llm)._cache.device.num_evicted == 0


def test_hb_08_the_passing_window_of_a_long_prompt_flushes_no_cached_prefix(folder: Path) -> None:
    """Its pages are freed as it goes on, and are in no order of eviction meanwhile."""
    cached = [drawn(seed, 20) for seed in range(3)]
    with LLM(model=str(folder), **SETTINGS | {"window_pages": 50, "kv_pages": 400}) as llm:
        windows = windows_of(llm)
        for prompt in cached:
            ask(llm, prompt)
        num_tails = windows.num_tails
        long = drawn(50, 148)
        assert len(long) // PAGE > windows.num_free, "kept as a whole, its window pages would not fit"
        ask(llm, long, 5)
        assert windows.num_tails >= num_tails
        assert [ask(llm, prompt)[1] for prompt in cached] == [whole(19)] * 3


@pytest.mark.parametrize("num_edited", [1, 2, PAGE - 1, PAGE])
def test_hb_09_a_prompt_that_diverges_within_the_last_page_resumes_before_it(folder: Path, num_edited: int) -> None:
    """Also when a turn behind it has tails of its own, and where no row is left that could show the window."""
    with LLM(model=str(folder), **SETTINGS | ROOMY) as llm:
        prompt = drawn(1, 33)
        reply, _ = ask(llm, prompt)
        ask(llm, [*prompt, *reply, *drawn(2, 8)])
        ask(llm, drawn(3, 40))
        edited = [*prompt, *reply][: whole(len(prompt) + NUM_NEW - 1) - num_edited] + drawn(4, 9)
        assert ask(llm, edited)[1] == whole(len(prompt) - 1)  # of the prompt's end: the reply's end lies behind
        assert ask(llm, [*prompt, *reply, *drawn(5, 8)])[1] == whole(len(prompt) + NUM_NEW - 1)


@pytest.mark.parametrize("length", [PAGE, WINDOW - 1, WINDOW, 3 * WINDOW + 1])
def test_hb_20_a_warm_prefix_gives_the_tokens_of_a_cold_one_at_every_boundary_that_was_kept(
    folder: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far tails are apart: here one on each page of a prompt, and a prompt that leaves at each of them."""
    prompt = drawn(1, length + 3 * PAGE)
    asked = [prompt[:end] + drawn(end, 7) for end in range(length, len(prompt), PAGE)]
    with LLM(model=str(folder), **SETTINGS | {"window_pages": 0, "disable_prefix_cache": True}) as llm:
        expected = [ask(llm, each)[0] for each in asked]
    pools = WindowPool(monkeypatch)
    with LLM(model=str(folder), **SETTINGS | ROOMY | {"max_batched_tokens": PAGE}) as llm:
        tails = planner_of(llm)._rows.tails
        assert tails is not None
        pools.watch(llm)
        admit = tails.admit

        def keep_all(row: int, num_known: int, limit: int, lock: PrefixLock, num_history_tokens: int) -> None:
            admit(row, num_known, limit, lock, num_history_tokens)
            for boundary in range(lock.pages.size * PAGE + PAGE, num_known, PAGE):
                tails.want(row, boundary, 0, 0)

        monkeypatch.setattr(tails, "admit", keep_all)
        ask(llm, prompt, 1)
        found = [ask(llm, each) for each in asked]
    assert found == [
        (tokens, whole(end)) for tokens, end in zip(expected, range(length, len(prompt), PAGE), strict=True)
    ]


def test_hb_21_a_prompt_far_longer_than_the_window_pages_runs_in_them_and_evicts_nothing(folder: Path) -> None:
    """A row holds its window and the tokens in flight, whatever its length; the history of others has its own pages."""
    held: list[int] = []

    def note(engine: Engine) -> None:
        rows = engine._planner._rows
        assert rows.windows is not None
        held.extend((rows.windows.tables.num_pages[rows.active] - rows.windows.first[rows.active]).tolist())

    settings = SETTINGS | {"window_pages": 24, "kv_pages": 400, "max_batched_tokens": 16}
    with LLM(model=str(folder), **settings) as llm:
        other = drawn(9, 30)
        ask(llm, other)
        engine = engine_of(llm)
        step = engine.step

        def noted() -> Any:
            updates = step()
            note(engine)
            return updates

        engine.step = noted  # type: ignore[method-assign]
        _, num_cached = ask(llm, drawn(50, 140), 15)
        assert num_cached == 0 and engine.stats().preemptions == 0 and len(held) > 20
        window_and_step = -(-(WINDOW - 1) // PAGE) + 1 + 16 // PAGE
        assert max(held) <= window_and_step
        key = np.array(other, dtype=np.int32).tobytes()
        assert engine._planner._cache.match(b"", key).num_history_tokens == whole(29)
        assert engine._planner._cache.device.num_evicted == 0
