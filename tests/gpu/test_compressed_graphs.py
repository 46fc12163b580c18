"""DeepSeek-V4, DeepSeek-V3.2 and GLM-5 on CUDA: eager steps and graphs, with drafts and cached prefixes, draw the tokens that transformers finds likeliest."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.models.model_config import NANO, find_model
from tests.helpers.compressed_models import RELEASED, add_stream_head, save_compressed
from tests.helpers.compressed_oracle import expected_logits, prompts_of
from tests.helpers.latent_models import INDEXED, save_with_mtp
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner

pytestmark = pytest.mark.gpu

NUM_NEW = 40
NEAR = 2e-3  # of the best logit: what rounding in float32 may exchange
NEAR_PACKED = 5e-2  # likewise, where such a rounding changes a number of 8 bits; logits have a standard deviation of 4
SETTINGS: dict[str, Any] = {
    "in_process": True,
    "device": "cuda",
    "dtype": "float32",
    "page_size": 16,
    "kv_pages": 300,
    "max_model_len": 256,
    "max_running_requests": 8,
    "max_batched_tokens": 96,
    "host_cache_gib": 0,
    "tail_every": 16,
    "tail_share": 0.5,
}
DRAFTS: dict[str, dict[str, Any]] = {
    "off": {"spec": "off"},
    "ngram": {"spec": "ngram", "spec_steps": 3},
    "mtp": {"spec": "mtp", "spec_steps": 2},
}


@pytest.fixture(scope="module", params=["deepseek_v4", *INDEXED])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp(request.param))


def saved(name: str, folder: Path) -> Path:
    if name != "deepseek_v4":
        save_with_mtp(name, folder, vocab_size=4096, qk_rope_head_dim=16)
        shutil.copy(find_model(NANO) / "tokenizer.json", folder)
        return folder
    save_compressed(folder)
    add_stream_head(folder)
    return folder


def prompts() -> list[list[int]]:
    """Lengths around ratios, windows and pages; one repeats itself, so that n-gram drafts are found."""
    some = prompts_of(1, 3, 4, 5, 11, 12, 15, 16, 17, 33, 100)
    return [*some, some[8][:9] * 5]


def packed_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Returns the logits of a text by the twins, in float64, with packed rows."""
    engine = Engine(folder, dtype="float64", attention="auto", packs_rows=True)
    return engine.logits(HandPlanner(16, 64), {1: tokens}, len(tokens))[1]


@cache
def shortfall(
    folder: Path, prompt: tuple[int, ...], reply: tuple[int, ...], *, packs_rows: bool = False
) -> tuple[float, int]:
    """Returns by how much a token of a reply is less likely than the likeliest one, at most, and its place."""
    logits_of = packed_logits if packs_rows else expected_logits
    logits = logits_of(folder, [*prompt, *reply])[len(prompt) - 1 : -1]
    drawn = logits.gather(1, torch.tensor(reply)[:, None])[:, 0]
    worse, place = (logits.max(-1).values - drawn).max(0)
    return float(worse), int(place)


@pytest.mark.parametrize("graphs", ["off", "decode", "all"])
@pytest.mark.parametrize("spec", DRAFTS)
def test_every_token_is_the_likeliest(folder: Path, spec: str, graphs: str) -> None:
    """Replies cross ratios, pages, windows and the index's saturation; the second time they resume from the cache."""
    check(folder, NEAR, spec=spec, graphs=graphs)


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v32", "deepseek_v3"])
@pytest.mark.parametrize(("graphs", "spec"), [("off", "off"), ("all", "off"), ("all", "mtp")])
def test_every_token_is_the_likeliest_with_packed_rows(
    tmp_path_factory: pytest.TempPathFactory, name: str, spec: str, graphs: str
) -> None:
    """Without logits of transformers, which has no such rows; prefixes come back from the host, too."""
    folder = saved(name, tmp_path_factory.mktemp("packed"))
    check(folder, NEAR_PACKED, spec=spec, graphs=graphs, kv_dtype="fp8", host_cache_gib=0.02, kv_pages=40)


@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_long_replies_with_released_ratios(tmp_path: Path, spec: str) -> None:
    """4,086 tokens and 500 more, and 5,200: one graph crosses 4,096, where the index has 1,024 rows, beside an index that saturates."""
    add_stream_head(save_compressed(tmp_path, **RELEASED))
    asked, num_new = prompts_of(4086, 5200, 2040), (500, 40, 40)
    sampling = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in num_new]
    sizes = {"page_size": 128, "max_model_len": 5376, "max_running_requests": 4, "max_batched_tokens": 2048}
    with LLM(str(tmp_path), **SETTINGS | DRAFTS[spec] | sizes | {"graphs": "all"}) as llm:
        replies = [tuple(each.outputs[0].token_ids) for each in llm.generate(asked, sampling)]
    for prompt, reply in zip(asked, replies, strict=True):
        worse, place = shortfall(tmp_path, tuple(prompt), reply)
        assert worse < NEAR, f"prompt of {len(prompt)} tokens, token {place}"


def check(folder: Path, near: float, *, spec: str, **settings: Any) -> None:
    packs_rows = settings.get("kv_dtype") == "fp8"
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(str(folder), **SETTINGS | DRAFTS[spec] | settings) as llm:
        told = [[list(each.outputs[0].token_ids) for each in llm.generate(prompts(), sampling)] for _ in range(2)]
        cached = llm.generate(prompts()[-1:], sampling)[0].cached.num_tokens
    assert cached > 0
    replies = {(tuple(prompt), tuple(reply)) for each in told for prompt, reply in zip(prompts(), each, strict=True)}
    for prompt, reply in replies:
        worse, place = shortfall(folder, prompt, reply, packs_rows=packs_rows)
        assert worse < near, f"prompt of {len(prompt)} tokens, token {place}"
