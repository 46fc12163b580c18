"""Keys and values in 8 bits on CUDA: stored as the twins store them; tokens that the twins find likeliest, with graphs and tiers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.core.forward import LayerKV
from hiserve.core.row_shapes import scale_words
from hiserve.errors import ConfigError
from hiserve.kernels import fused, reference
from hiserve.models.model_config import NANO, find_model
from tests.helpers.cuda import decisions
from tests.helpers.models import Engine, save_family
from tests.helpers.plans import HandPlanner
from tests.helpers.tiered import check_whole, engine_of, leave_device, rest
from tests.helpers.window_models import SETTINGS, VOCAB

pytestmark = pytest.mark.gpu

NUM_SLOTS, NUM_TOKENS, PAGE, WINDOW = 64, 40, 16, 40
NEAR = 0.02  # deviations of logits: of a few numbers that round to the other neighbour
SIZES: dict[str, Any] = SETTINGS | {
    "page_size": PAGE,
    "max_model_len": 320,
    "kv_pages": 400,
    "window_pages": "auto",
    "max_running_requests": 8,
    "max_batched_tokens": 64,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (3, 1, 64), (8, 3, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_and_values_are_stored_as_the_twin_stores_them(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Values and scales bit by bit; of keys those few differ whose rotation rounds otherwise."""
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(NUM_TOKENS, heads + 2 * kv_heads, head_dim, generator=generator)
    qkv = (qkv * 2.0 ** torch.randint(-9, 10, (*qkv.shape[:2], 1), generator=generator)).to(dtype)
    positions, slots = torch.arange(NUM_TOKENS), torch.randperm(NUM_SLOTS, generator=generator)[:NUM_TOKENS]
    cos, sin = reference.rotations(positions, torch.linspace(1, 1e-3, head_dim // 2), 1.0, torch.float32)
    made = []
    for ops, device in ((fused, "cuda"), (reference, "cpu")):
        bits = torch.full((2, NUM_SLOTS, kv_heads, head_dim), 255, dtype=torch.uint8, device=device)
        scales = torch.full((NUM_SLOTS, scale_words(kv_heads)), -1, dtype=torch.int32, device=device)
        kv = LayerKV(*bits, scales=scales)
        given = (each.to(device) for each in (cos, sin))
        _, *stored = ops.rotate_and_store(qkv.clone().to(device), None, 1e-6, *given, kv, slots.to(device))
        made.append([each.cpu() for each in (bits[0], bits[1], scales, *stored)])
    (k, v, scales, near_k, near_v), (twin_k, twin_v, twin_scales, twin_near_k, twin_near_v) = made
    assert torch.equal(v, twin_v) and torch.equal(near_v, twin_near_v)
    assert (scales != twin_scales).float().mean() < 1e-2 and (k != twin_k).float().mean() < 1e-2
    torch.testing.assert_close(near_k, twin_near_k, rtol=0.13, atol=float(near_k.abs().max()) / 448)


def save(family: str, folder: Path) -> Path:
    save_family(family, folder, vocab_size=VOCAB, sliding_window=WINDOW, head_dim=64)
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return folder


def ask(folder: Path, prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Asks twice, the second time from the host if there is one; returns the tokens, and the gate's decisions."""
    fixed = {"model": str(folder), "kv_dtype": "fp8", "spec": "off"}
    with LLM(**SIZES | fixed | settings) as llm:
        told = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY)]
        has_host = llm.settings.cache.host_cache_gib > 0
        if has_host:
            rest(llm)
            leave_device(llm)
        again = llm.generate(prompts, GREEDY)
        told += [list(each.outputs[0].token_ids) for each in again]
        assert not has_host or sum(each.cached.host for each in again) > 0
        check_whole(llm)
        return told, decisions(engine_of(llm)._executor)  # type: ignore[attr-defined]


def shortfall(folder: Path, prompt: list[int], reply: list[int]) -> float:
    """Returns by how much a token is less likely than the likeliest, at most, in deviations of the logits of the twins."""
    engine = Engine(folder, dtype="float64", attention="reference", packs_rows=True)
    tokens = [*prompt, *reply]
    logits = engine.logits(HandPlanner(PAGE, 64), {1: tokens}, len(tokens))[1][len(prompt) - 1 : -1]
    engine.executor.close()
    drawn = logits.gather(1, torch.tensor(reply)[:, None])[:, 0]
    return float((logits.amax(1) - drawn).max() / logits.std())


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "qwen3"])
def test_every_token_is_the_likeliest(family: str, tmp_path: Path) -> None:
    """Eagerly, and with graphs, drafts, steps planned ahead, and prefixes from the host."""
    folder = save(family, tmp_path)
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(7, VOCAB, (40,), generator=generator).tolist()
    drawn = [torch.randint(7, VOCAB, (9 + 17 * row,), generator=generator).tolist() for row in range(4)]
    prompts = [shared[: 10 * row] + each * 2 for row, each in enumerate(drawn)]
    cases: tuple[dict[str, Any], ...] = (
        {"host_cache_gib": 0, "graphs": "off"},
        {"host_cache_gib": 0.05, "graphs": "all", "overlap": 1, "spec": "ngram", "spec_steps": 3},
    )
    for more in cases:
        told, gate = ask(folder, prompts, dtype="float32", device="cuda", attention_backend="triton", **more)
        assert more["graphs"] == "off" or any(name.startswith("replay") for name in gate), gate
        for prompt, reply in zip(prompts * 2, told, strict=True):
            assert (worse := shortfall(folder, prompt, reply)) < NEAR, (worse, more, len(prompt))


def test_other_kernels_are_refused_and_auto_takes_ours(tmp_path: Path) -> None:
    folder = save("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=r"has no keys and values in 8 bits|needs the package"):
        ask(folder, [[9, 8, 7]], dtype="bfloat16", device="cuda", attention_backend="flashinfer", host_cache_gib=0)
    told, _ = ask(folder, [[9, 8, 7]], dtype="bfloat16", device="cuda", host_cache_gib=0)
    assert len(told[0]) == GREEDY.max_tokens
