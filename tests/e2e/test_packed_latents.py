"""Latents in 8 bits, and keys of an index beside them: logits of rounded rows, tokens that do not depend on how they are computed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve import LLM, SamplingParams
from hiserve.core.row_shapes import PackedPages, PackedShape, packed_key, packed_latent
from hiserve.engine.host_loads import LoadCostModel
from hiserve.kernels import reference
from hiserve.kernels.row_codecs import load_packed, store_packed
from hiserve.models.model_config import NANO, find_model
from tests.helpers.compressed_models import PoisonedPool, poison
from tests.helpers.compressed_oracle import SETTINGS, prompts_of
from tests.helpers.latent_models import expand_from, save_latent, save_with_mtp
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.tiered import rest

PAGE, VOCAB = 8, 4096  # tokens of the tokenizer
ON: dict[str, Any] = {
    "spec": "mtp",
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


def rounded(rows: Tensor, shape: PackedShape | None) -> Tensor:
    """Returns rows as they are read from 8 bits, one by one."""
    assert shape is not None
    alone, place = torch.zeros(len(rows), shape.row_bytes, dtype=torch.uint8), torch.arange(len(rows))
    store_packed(alone, place, rows, PackedPages(shape, 1))
    return load_packed(alone, place, PackedPages(shape, 1)).to(rows.dtype)


def round_rows(patch: pytest.MonkeyPatch) -> None:
    """Rounds latents and keys that are not packed as they are stored."""
    store, store_latents = reference.store_index_keys, reference.store_latents

    def store_rounded(key, weight, bias, eps, cos, sin, pool, slots, packed=None):  # type: ignore[no-untyped-def]
        assert packed is None and pool.dtype != torch.uint8
        store(key, weight, bias, eps, cos, sin, pool, slots)
        pool[slots] = rounded(pool[slots], packed_key(key.shape[1]))

    def store_rounded_latents(q, row, weight, eps, cos, sin, kv, slots, packed=None):  # type: ignore[no-untyped-def]
        assert packed is None and kv.k.dtype != torch.uint8
        q, rows = store_latents(q, row, weight, eps, cos, sin, kv, slots)
        rows = rounded(rows[:, 0], packed_latent(weight.shape[0], cos.shape[2]))[:, None]
        kv.k[slots] = rows
        return q, rows

    patch.setattr(reference, "store_index_keys", store_rounded)
    patch.setattr(reference, "store_latents", store_rounded_latents)


@pytest.mark.parametrize("family", ["glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"])
def test_logits_are_those_of_rounded_rows(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in pages against rows one by one, in other chunks, some of which are expanded."""
    expand_from(8, monkeypatch)
    torch.set_num_threads(1)
    save_latent(family, tmp_path)
    prompts = [[token % 320 for token in prompt] for prompt in prompts_of(70, 33)]
    packed = logits_of(tmp_path, prompts, packs_rows=True, chunk=9)
    plain = logits_of(tmp_path, prompts, packs_rows=False, chunk=70)
    round_rows(monkeypatch)
    for ours, whole in zip(packed, logits_of(tmp_path, prompts, packs_rows=False, chunk=70), strict=True):
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-10)
    error = (torch.cat(packed) - torch.cat(plain)).norm() / torch.cat(plain).norm()
    assert 1e-3 < error < 0.5, error


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_tokens_do_not_depend_on_chunks_pages_hits_drafts_and_tiers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    expand_from(8, monkeypatch)
    save_with_mtp(family, tmp_path, vocab_size=VOCAB)
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
            assert pools.made[-1].storage("kv").dtype == torch.uint8
    assert told[0] == told[1]
    assert len({token for reply in told[0][0] for token in reply}) > 8
