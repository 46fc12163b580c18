"""Latent attention and experts in groups against transformers: logits, tokens in float64, through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.attention.latent import MIN_EXPANDED
from hiserve.layers import MoE
from hiserve.models.latent_attention import LatentSelfAttention
from hiserve.models.loading import load_decoder
from hiserve.models.model_config import read_model_config
from tests.helpers.latent_models import YARN, save_latent
from tests.helpers.models import Engine, load_transformers
from tests.helpers.oracle import NUM_NEW, Subject, continuation, engine_of, generate
from tests.helpers.plans import HandPlanner

MAX_LOGIT_DIFFERENCE = 1e-4  # transformers casts norms and routers to float32, in float64 models too
NUM_PAGES, PAGE_SIZE, MIN_DISTINCT = 200, 4, 20
LENGTHS = (3, 16, 33, MIN_EXPANDED + 4)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek_v3", {}),
    "glm": ("glm4_moe_lite", {}),
    "queries in one step": ("deepseek_v3", {"q_lora_rank": None}),
    "rope by halves": ("glm4_moe_lite", {"rope_interleave": False, "rope_parameters": YARN}),
    "dense layers by name": ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "two shared experts": ("deepseek_v3", {"n_shared_experts": 2, "norm_topk_prob": False}),
}


def prompts_of(vocab_size: int = 320) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(3)
    return {
        row: torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        for row, length in enumerate(LENGTHS, 1)
    }


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    """In ragged chunks over scattered pages, absorbed; and in chunks that are expanded, the last behind a prefix."""
    torch.set_num_threads(1)
    family, overrides = CASES[case]
    save_latent(family, tmp_path, **overrides)
    oracle, prompts = load_transformers(tmp_path, torch.float32), prompts_of()
    with torch.inference_mode():
        expected = {row: oracle(torch.tensor([prompt])).logits[0] for row, prompt in prompts.items()}
    for attention, chunk in (("cpu", 9), ("reference", MIN_EXPANDED), ("cpu", MIN_EXPANDED)):
        engine = Engine(tmp_path, attention=attention, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        logits = engine.logits(HandPlanner(PAGE_SIZE, NUM_PAGES, shuffle_seed=5), prompts, chunk=chunk)
        for row in prompts:
            assert (logits[row] - expected[row]).abs().max().item() <= MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize(("family", "chunk", "depth"), [("deepseek_v3", 7, 1), ("glm4_moe_lite", 140, 0)])
def test_tokens_are_those_of_transformers(tmp_path: Path, family: str, chunk: int, depth: int) -> None:
    """Continuous batches in chunks, and once more over what the first pass left in the cache."""
    torch.set_num_threads(1)
    save_latent(family, tmp_path)
    oracle, prompts = load_transformers(tmp_path, torch.float64), prompts_of()
    greedy = {row: continuation(oracle, prompt) for row, prompt in prompts.items()}
    assert len({token for tokens in greedy.values() for token in tokens}) >= MIN_DISTINCT
    subject = Subject(tmp_path, prompts, greedy, sampled={})
    engine = engine_of(subject, chunk=chunk, depth=depth, page_size=PAGE_SIZE, kv_pages=250)
    assert generate(engine, prompts) == greedy
    assert generate(engine, prompts) == greedy
    cached = sum((len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE for prompt in prompts.values())
    assert engine.stats().cached_tokens == cached > 0
    assert NUM_NEW > PAGE_SIZE  # decoding crosses pages
    engine.close()


@pytest.mark.parametrize(
    "save", [{"save_original_format": False}, {"max_shard_size": "40KB"}], ids=["fused", "sharded"]
)
def test_experts_are_read_in_every_spelling(tmp_path: Path, save: dict[str, Any]) -> None:
    folder = save_latent("deepseek_v3", tmp_path, save=save)
    prompts = {1: list(range(5, 25))}
    logits = Engine(folder, num_pages=NUM_PAGES).logits(HandPlanner(16, NUM_PAGES), prompts, chunk=9)
    with torch.inference_mode():
        expected = load_transformers(folder, torch.float32)(torch.tensor([prompts[1]])).logits[0]
    assert (logits[1] - expected).abs().max().item() <= MAX_LOGIT_DIFFERENCE


def test_a_token_stores_one_row_a_layer_and_experts_keep_a_wide_bias(tmp_path: Path) -> None:
    config = read_model_config(save_latent("glm4_moe_lite", tmp_path))
    (group,) = config.kv_groups("bfloat16")
    assert group.slot_bytes == 3 * (32 + 8) * 2 == config.facts().slot_elements * 2
    model = load_decoder(tmp_path, config, dtype="bfloat16", device="cpu", load_format="auto")
    assert all(isinstance(layer.attention, LatentSelfAttention) for layer in model._layers)
    assert [isinstance(layer.mlp, MoE) for layer in model._layers] == [False, True, True]
    experts = model._layers[1].mlp
    assert isinstance(experts, MoE) and experts.groups is not None
    assert experts.groups.bias.dtype == torch.float32
    assert not torch.equal(experts.groups.bias, experts.groups.bias.bfloat16().float())


def test_the_count_of_parameters_is_that_of_transformers(tmp_path: Path) -> None:
    for number, (family, overrides) in enumerate(CASES.values()):
        folder = save_latent(family, tmp_path / str(number), **overrides)
        model = load_transformers(folder, torch.float32)
        experts = [name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias")]
        num_params = sum(each.numel() for each in model.parameters()) + 8 * len(experts)
        assert read_model_config(folder).num_params == num_params
