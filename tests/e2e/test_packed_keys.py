"""An index beside latents whose keys are packed: logits of rounded keys, tokens that do not depend on how they are computed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve import LLM, SamplingParams
from hiserve.core.row_shapes import PackedPages, packed_key
from hiserve.engine.host_loads import LoadCostModel
from hiserve.kernels import reference
from hiserve.kernels.row_codecs import load_packed, store_packed
from hiserve.models.model_config import NANO, find_model
from tests.helpers.compressed_models import PoisonedPool, poison
from tests.helpers.compressed_oracle import SETTINGS, prompts_of
from tests.helpers.latent_models import save_latent
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.tiered import rest

PAGE, VOCAB = 8, 4096  # tokens of the tokenizer
ON: dict[str, Any] = {
    "spec": "ngram",
    "spec_steps": 2,
    "overlap": 1,
    "page_size": 16,
    "kv_pages": 12,
    "host_cache_gib": 0.01,
    "max_batched_tokens": 40,
    "disable_prefix_cache": False,
}


def logits_of(folder: Path, prompts: list[list[int]], *, packs_rows: bool, chunk: int) -> list[Tensor]:
    engine = Engine(folder, dtype="float64", attention="auto", page_size=PAGE, max_len=128, packs_rows=packs_rows)
    poison(engine.pool)
    found = engine.logits(HandPlanner(PAGE, 64, shuffle_seed=chunk), dict(enumerate(prompts, start=1)), chunk)
    return list(found.values())


def round_keys(patch: pytest.MonkeyPatch) -> None:
    """Rounds keys that are not packed as they are stored."""
    store = reference.store_index_keys

    def store_rounded(key, weight, bias, eps, cos, sin, pool, slots, packed=None):  # type: ignore[no-untyped-def]
        assert packed is None and pool.dtype != torch.uint8
        store(key, weight, bias, eps, cos, sin, pool, slots)
        shape = packed_key(key.shape[1])
        assert shape is not None
        alone, place = torch.zeros(len(slots), shape.row_bytes, dtype=torch.uint8), torch.arange(len(slots))
        store_packed(alone, place, pool[slots], PackedPages(shape, 1))
        pool[slots] = load_packed(alone, place, PackedPages(shape, 1)).to(pool.dtype)

    patch.setattr(reference, "store_index_keys", store_rounded)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_logits_are_those_of_rounded_keys(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in pages against keys one by one, in other chunks; rounding exchanges some of the chosen tokens."""
    torch.set_num_threads(1)
    save_latent(family, tmp_path)
    prompts = [[token % 320 for token in prompt] for prompt in prompts_of(70, 33)]
    packed = logits_of(tmp_path, prompts, packs_rows=True, chunk=9)
    plain = logits_of(tmp_path, prompts, packs_rows=False, chunk=70)
    round_keys(monkeypatch)
    for ours, whole in zip(packed, logits_of(tmp_path, prompts, packs_rows=False, chunk=70), strict=True):
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-10)
    changed = torch.cat([(ours - other).abs().amax(-1) for ours, other in zip(packed, plain, strict=True)]) > 1e-6
    assert 0 < changed.sum() < 0.9 * len(changed)


def test_tokens_do_not_depend_on_chunks_pages_hits_drafts_and_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    save_latent("glm_moe_dsa", tmp_path, vocab_size=VOCAB)
    shutil.copy(find_model(NANO) / "tokenizer.json", tmp_path)
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *measures: True)
    base, long, *others = prompts_of(40, 110, 3, 9)
    prompts = [base[:length] + other for length, other in zip((37, 40), others, strict=True)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    told = []
    for options in ({}, ON):
        pools = PoisonedPool(monkeypatch)
        with LLM(model=str(tmp_path), **SETTINGS | {"kv_dtype": "fp8", "page_size": PAGE} | options) as llm:
            engine = pools.watch(llm)
            first = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling)]
            turns = [[*prompt, *reply] for prompt, reply in zip(prompts, first, strict=True)]
            if options:  # pages of other requests take the place of these, which are on the host by then
                rest(llm)
                llm.generate([long], sampling)
            later = llm.generate(turns, sampling)
            told.append([first, [list(each.outputs[0].token_ids) for each in later]])
            assert (sum(each.cached.host for each in later) > 0) == bool(options) and engine.stats().stale_rows == 0
            assert pools.made[-1].storage("index").dtype == torch.uint8
    assert told[0] == told[1]
    assert len({token for reply in told[0][0] for token in reply}) > 8
