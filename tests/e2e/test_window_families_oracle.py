"""Gemma-3 and gpt-oss against transformers: logits in float32, tokens in float64, over windows, spellings, rotations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiserve.models.model_config import read_model_config
from hiserve.models.weights import load_parameters
from tests.helpers.models import Engine, load_transformers, save_family
from tests.helpers.oracle import NUM_NEW, NUM_PAGES, Subject, check_logits, check_tokens, continuation, generate
from tests.helpers.packed_models import pack_gpt_oss
from tests.helpers.window_models import WindowPool

WINDOW = 12

LINEAR = {"rope_type": "linear", "factor": 2.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False}
THETAS = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 500.0}}
GEMMA: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped, own head": {"final_logit_softcapping": 8.0, "tie_word_embeddings": False},
    "linear": {
        "rope_parameters": {
            "full_attention": LINEAR | THETAS["full_attention"],
            "sliding_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 300.0},
        }
    },
    "no window reached": {
        "sliding_window": 512,
        "rope_parameters": {name: {"rope_type": "default"} | given for name, given in THETAS.items()},
    },
}


def prompts_around(window: int) -> dict[int, list[int]]:
    """Prompts that end around the window and its double, and others that reach them while they are decoded."""
    generator = torch.Generator().manual_seed(6)
    lengths = (window - 1, window, window + 1, 2 * window + 1, 3, 70)
    return {row: torch.randint(0, 320, (n,), generator=generator).tolist() for row, n in enumerate(lengths, 1)}


def check(
    folder: Path, patch: pytest.MonkeyPatch, chunk: int, depth: int, page_size: int, spec: str, window_pages: int
) -> None:
    """Logits; tokens while window pages are freed and NaN; then next turns, which go on at the end of what was computed."""
    torch.set_num_threads(1)
    prompts = prompts_around(WINDOW)
    oracle = load_transformers(folder, torch.float32)
    for attention in ("cpu", "reference"):
        check_logits(oracle, Engine(folder, attention=attention, num_pages=NUM_PAGES), prompts)
    oracle = oracle.double()
    greedy = {row: continuation(oracle, prompt) for row, prompt in prompts.items()}
    engine = check_tokens(
        Subject(folder, prompts, greedy, sampled={}),
        chunk,
        depth,
        page_size=page_size,
        window_pages=window_pages,
        spec=spec,
        watch=WindowPool(patch).watch_engine if window_pages else lambda engine: None,
    )
    windows, before = engine._planner._cache.windows, engine.stats().cached_tokens
    assert (windows is None) == (window_pages == 0)
    turns = {row: [*prompts[row], *greedy[row], 5, 6] for row in (2, 6)}
    assert generate(engine, turns) == {row: continuation(oracle, turn) for row, turn in turns.items()}
    settled = [len(prompts[row]) + NUM_NEW - 1 for row in turns]
    assert engine.stats().cached_tokens - before == sum(each // page_size * page_size for each in settled)
    engine.close()


@pytest.mark.parametrize(
    ("case", "chunk", "depth", "page_size", "spec", "window_pages"),
    [
        pytest.param("plain", 7, 0, 4, "off", 200, marks=pytest.mark.wide),
        ("plain", 64, 1, 16, "ngram", 200),
        ("capped, own head", 13, 1, 2, "off", 200),
        ("linear", 64, 0, 4, "off", 200),
        ("no window reached", 64, 1, 4, "off", 0),
    ],
)
def test_gemma3_gives_the_logits_and_tokens_of_transformers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    chunk: int,
    depth: int,
    page_size: int,
    spec: str,
    window_pages: int,
) -> None:
    save_family("gemma3_text", tmp_path, **GEMMA[case])
    check(tmp_path, monkeypatch, chunk, depth, page_size, spec, window_pages)


def test_gemma3_in_the_spelling_of_released_files(tmp_path: Path) -> None:
    """``rope_theta`` beside ``rope_local_base_freq``, and a pattern in place of the types of layers."""
    rope = {name: {"rope_type": "default"} | given for name, given in THETAS.items()}
    rope["full_attention"] |= LINEAR
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    save_family("gemma3_text", tmp_path, rope_parameters=rope, layer_types=types)
    expected = read_model_config(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["rope_parameters"], raw["layer_types"]
    raw |= {"rope_theta": 1e5, "rope_local_base_freq": 500.0, "rope_scaling": LINEAR, "sliding_window_pattern": 2}
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw))
    assert read_model_config(tmp_path) == expected
    check_logits(
        load_transformers(tmp_path, torch.float32), Engine(tmp_path, num_pages=NUM_PAGES), prompts_around(WINDOW)
    )


@pytest.mark.parametrize("names", ["released", "transformers"])
def test_the_text_model_of_a_multimodal_checkpoint_is_read(tmp_path: Path, names: str) -> None:
    """Its fields are nested, its tensors have a prefix, and those of images are not read."""
    save_family("gemma3_text", tmp_path)
    oracle = load_transformers(tmp_path, torch.float32)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    raw = json.loads(path.read_text())
    outside = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "dtype": raw.pop("dtype")}
    path.write_text(
        json.dumps(outside | {"eos_token_id": [1, 106], "text_config": raw, "vision_config": {"hidden_size": 8}})
    )
    root, of_images = ("language_model.model.", "") if names == "released" else ("model.language_model.", "model.")
    tensors = {name.replace("model.", root, 1): tensor for name, tensor in load_file(weights).items()}
    tensors[of_images + "vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.ones(2, 2)
    tensors[of_images + "multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(2)
    save_file(tensors, weights)
    assert read_model_config(tmp_path).eos_token_ids == (1, 106)
    check_logits(oracle, Engine(tmp_path, num_pages=NUM_PAGES), prompts_around(WINDOW))


GPT_OSS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_parameters": YARN | {"rope_theta": 1.5e5}},
    "no rope scaling, all experts": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e3},
        "num_experts_per_tok": 6,
        "swiglu_limit": 0.7,
        "swiglu_alpha": 1.2,
    },
    "full layers first": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize(
    ("case", "chunk", "depth", "page_size", "spec", "window_pages"),
    [
        pytest.param("yarn", 7, 0, 4, "off", 200, marks=pytest.mark.wide),
        ("yarn", 64, 1, 16, "ngram", 200),
        ("no rope scaling, all experts", 13, 1, 2, "off", 200),
        ("full layers first", 64, 0, 4, "off", 0),
    ],
)
def test_gpt_oss_gives_the_logits_and_tokens_of_transformers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    chunk: int,
    depth: int,
    page_size: int,
    spec: str,
    window_pages: int,
) -> None:
    save_family("gpt_oss", tmp_path, **GPT_OSS[case])
    check(tmp_path, monkeypatch, chunk, depth, page_size, spec, window_pages)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_packed_experts_are_those_that_transformers_unpacks(tmp_path: Path, is_sharded: bool) -> None:
    """Blocks and scales of one tensor may lie in different files."""
    save_family("gpt_oss", tmp_path)
    pack_gpt_oss(tmp_path, is_sharded)
    oracle = load_transformers(tmp_path / "plain", torch.float32)
    check_logits(oracle, Engine(tmp_path, num_pages=NUM_PAGES), prompts_around(WINDOW))
    config, device = read_model_config(tmp_path), torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float64):
        ours, theirs = (load_parameters(each, config, dtype, device, "auto") for each in (tmp_path, tmp_path / "plain"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_gpt_oss_in_the_spelling_of_released_files(tmp_path: Path) -> None:
    save_family("gpt_oss", tmp_path, rope_parameters=YARN | {"rope_theta": 1.5e5})
    expected = read_model_config(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "experts_per_token": 2,
        "initial_context_length": 128,
    }
    raw["torch_dtype"] = raw.pop("dtype")
    del raw["layer_types"]
    raw.pop("swiglu_alpha", None)  # transformers 5.17 does not write it
    path.write_text(json.dumps(raw))
    assert read_model_config(tmp_path) == expected
