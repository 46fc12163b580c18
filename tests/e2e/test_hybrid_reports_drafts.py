"""Reported failures of hybrid caches as test cases, by number: drafts, graphs and tiers beside layers that forget.

``test_hybrid_reports_hits.py`` has those of hits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.engine.executor import Executor
from hiserve.llm.outputs import RequestOutput
from hiserve.models.model_config import NANO, find_model
from tests.helpers.latent_models import save_with_mtp
from tests.helpers.models import save_family
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.tiered import check_whole, engine_of, leave_device
from tests.helpers.widening import some
from tests.helpers.window_models import SETTINGS, VOCAB, WINDOW, WindowPool, add_mtp, save_windows

PAGE = int(SETTINGS["page_size"])
NUM_NEW = 12
STEPS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
MTP: dict[str, Any] = {"spec": "mtp", "spec_steps": STEPS, "window_pages": 400}
LATENT: dict[str, Any] = {"window_pages": "auto"}


def save_latents(folder: Path) -> Path:
    save_with_mtp("deepseek_v3", folder, vocab_size=VOCAB)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return folder


MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "windows": (lambda folder: add_mtp(save_windows(folder)), {}),
    "latents": (save_latents, LATENT),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return {name: save(tmp_path_factory.mktemp(name)) for name, (save, _) in MODELS.items()}


def drawn(seed: int, length: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(7, VOCAB, length).tolist()
    return found


def told(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def plain(folder: Path, prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """The tokens of an engine without drafts, graphs and hits that keeps every page."""
    kept = {"disable_prefix_cache": True, "window_pages": 0}
    with LLM(model=str(folder), **SETTINGS | kept) as llm:
        return told(llm.generate(prompts, sampling))


def num_refused(outputs: list[RequestOutput]) -> int:
    """Drafts that were not accepted."""
    drafts = [output.outputs[0].drafts for output in outputs]
    return sum(each.proposed - each.accepted for each in drafts if each is not None)


def replays(executors: list[Executor]) -> dict[str, int]:
    """Replayed steps of the last engine, by reason."""
    return dict(executors[-1].gate_counts().get("replay", {}))


@pytest.mark.parametrize("model", some(MODELS, "latents"))
def test_hb_03_a_head_takes_no_page_from_a_repeated_prompt(model: str, folders: dict[str, Path]) -> None:
    with LLM(model=str(folders[model]), **SETTINGS | MTP | MODELS[model][1]) as llm:
        for length in (PAGE + 1, 2 * PAGE, 40, 43, 81):
            prompt = drawn(length, length)
            first, again = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
            assert again.cached.num_tokens == (length - 1) // PAGE * PAGE, length
            assert told([again]) == told([first])


@pytest.mark.parametrize("model", some(MODELS, "windows"))
def test_hb_04_a_head_takes_no_page_from_the_next_turn(model: str, folders: dict[str, Path]) -> None:
    """Each turn has the whole pages of all that the one before has computed."""
    with LLM(model=str(folders[model]), **SETTINGS | MTP | MODELS[model][1]) as llm:
        for seed in range(4):
            history, settled = drawn(seed, 17 + seed), 0
            for turn in range(4):
                (output,) = llm.generate([history], GREEDY)
                assert output.cached.num_tokens == settled // PAGE * PAGE, (seed, turn)
                settled = len(history) + NUM_NEW - 1
                history = [*history, *told([output])[0], *drawn(10 + turn, 3)]


@pytest.mark.parametrize("model", some(MODELS, "windows"))
def test_hb_14_a_prompt_as_long_as_a_token_and_its_drafts_is_no_verify_step(
    model: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1 to k + 2 tokens: graphs are chosen by drafts, and by no number of tokens."""
    prompts = [drawn(length, length) for length in range(1, STEPS + 3)]
    expected = plain(folders[model], prompts)
    executors = allow_recording(monkeypatch)
    with LLM(model=str(folders[model]), **SETTINGS | MTP | MODELS[model][1] | {"graphs": "all"}) as llm:
        one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        assert [told(llm.generate([prompt], one))[0] for prompt in prompts] == [each[:1] for each in expected]
        assert replays(executors).get("verify", 0) == 0
        assert [told(llm.generate([prompt], GREEDY))[0] for prompt in prompts] == expected
        assert replays(executors)["verify"] > 0


@pytest.mark.parametrize("model", some(MODELS, "windows"))
def test_hb_15_a_verify_graph_serves_every_length(
    model: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, pages and slots are read in the graph: one graph goes over the edges of windows and pages."""
    prompts = [drawn(1, WINDOW - 5), drawn(2, 3)]
    sampling = SamplingParams(temperature=0.0, max_tokens=4 * WINDOW, ignore_eos=True)
    expected = plain(folders[model], prompts, sampling)
    executors, pools = allow_recording(monkeypatch), WindowPool(monkeypatch)
    with LLM(model=str(folders[model]), **SETTINGS | MTP | MODELS[model][1] | {"graphs": "all"}) as llm:
        if model == "windows":
            pools.watch(llm)
        assert told(llm.generate(prompts, sampling)) == expected
        found = replays(executors)
        assert found["verify"] > 2 * WINDOW and sum(executors[-1].gate_counts().get("eager", {}).values()) <= 3, found


@pytest.mark.parametrize(("model", "overlap"), some(product(MODELS, (0, 1)), ("windows", 0), ("latents", 1)))
def test_hb_16_the_token_after_a_rejection_is_right_with_graphs(
    model: str, overlap: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [drawn(seed, 9 + seed) for seed in range(4)]
    expected = plain(folders[model], prompts)
    allow_recording(monkeypatch)
    options = SETTINGS | MTP | MODELS[model][1] | {"graphs": "all", "overlap": overlap}
    with LLM(model=str(folders[model]), **options) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert told(outputs) == expected
    assert num_refused(outputs) > 4 * NUM_NEW, "hardly a draft was refused: the test shows nothing"


@pytest.mark.parametrize("model", some(MODELS, "latents"))
def test_hb_17_drafts_and_a_host_tier_together_change_nothing(model: str, folders: dict[str, Path]) -> None:
    """Pages leave the device with what the head keeps in them, and come back with it, while drafts are verified."""
    prompts = [drawn(seed, 60 + seed) for seed in range(4)]
    expected = plain(folders[model], prompts)
    options = SETTINGS | MTP | MODELS[model][1] | {"host_cache_gib": 0.02, "page_size": 8, "kv_pages": 60}
    with LLM(model=str(folders[model]), **options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY)
            assert told(outputs) == expected
            leave_device(llm)
        assert sum(output.cached.host for output in outputs) > 0 and num_refused(outputs) > 0
        check_whole(llm)


@pytest.mark.parametrize("family", some(["gpt_oss", "gemma3_text"], "gpt_oss"))
def test_hb_18_drafts_are_drawn_with_the_noise_of_their_places_at_any_temperature(family: str, tmp_path: Path) -> None:
    """A model that drafts for itself is right each time, although the tokens are drawn; its windows are freed meanwhile."""
    folder = save_family(family, tmp_path, vocab_size=VOCAB)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    num_new = 1 + 6 * (STEPS + 1)
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=num_new, ignore_eos=True)
    options = SETTINGS | {"window_pages": 100, "spec": f"draft:{folder}", "spec_steps": STEPS}
    with LLM(model=str(folder), **options) as llm:
        assert engine_of(llm)._planner._cache.windows is not None
        (output,) = llm.generate([drawn(3, 2 * WINDOW)], sampling)
    drafts = output.outputs[0].drafts
    assert drafts is not None and drafts.accepted == drafts.proposed == 6 * STEPS
    assert len(set(output.outputs[0].token_ids)) > num_new // 2
