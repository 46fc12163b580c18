"""DeepSeek-V4 with packed rows: logits near those of transformers, tokens that do not depend on how they are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve import LLM, SamplingParams
from hiserve.core.row_shapes import PackedPages, packed_key, packed_row
from hiserve.engine.host_loads import LoadCostModel
from hiserve.kernels import compressed_reference
from hiserve.kernels.row_codecs import load_packed, store_packed
from hiserve.kernels.union_rows import RangeRows
from tests.helpers.compressed_cases import slots_at_ends
from tests.helpers.compressed_models import SHAPE, PoisonedPool, add_stream_head, poison, save_compressed
from tests.helpers.compressed_oracle import PAGE, SETTINGS, expected_logits, prompts_of
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.tiered import rest

# Of the standard deviation of logits, 1: what rounding to three bits of mantissa changes in the mean of all, and at most.
MEAN, MOST = 0.05, 0.5
ON: dict[str, Any] = {
    "spec": "mtp",
    "spec_steps": 2,
    "overlap": 1,
    "page_size": 32,
    "kv_pages": 6,
    "host_cache_gib": 0.01,
    "max_batched_tokens": 40,
    "disable_prefix_cache": False,
    "tail_share": 0.6,
}
CARRIED = {"csa_inputs", "csa_index_inputs", "hca_inputs"}
ROW = packed_row(SHAPE["head_dim"], 8)
KEY = packed_key(SHAPE["index_head_dim"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = save_compressed(tmp_path_factory.mktemp("packed"))
    add_stream_head(folder)
    return folder


def logits_of(folder: Path, prompts: list[list[int]], *, packs_rows: bool, chunk: int) -> list[Tensor]:
    engine = Engine(folder, dtype="float64", attention="auto", page_size=PAGE, max_len=128, packs_rows=packs_rows)
    poison(engine.pool)
    found = engine.logits(HandPlanner(PAGE, 64, shuffle_seed=chunk), dict(enumerate(prompts, start=1)), chunk)
    return list(found.values())


def rounded(rows: Tensor) -> Tensor:
    """Returns rows as they are after they were packed, alone in their pages."""
    shape = ROW if rows.shape[1] == SHAPE["head_dim"] else KEY
    assert shape is not None
    pages, slots = PackedPages(shape, 1), torch.arange(rows.shape[0])
    pool = torch.zeros(rows.shape[0], shape.row_bytes, dtype=torch.uint8)
    store_packed(pool, slots, rows, pages)
    return load_packed(pool, slots, pages).to(rows.dtype)


def round_rows(patch: pytest.MonkeyPatch) -> None:
    """Rounds rows that are not packed as they are stored."""
    store_rows, compress = compressed_reference.store_rows, compressed_reference.compress

    def store_rounded(heads, row, norm, eps, cos, sin, pool, slots, packed=None):  # type: ignore[no-untyped-def]
        made = store_rows(heads, row, norm, eps, cos, sin, pool, slots, packed)
        pool[slots] = rounded(pool[slots])
        return made

    def compress_rounded(values, scores, how, carried, tokens, target: RangeRows, turns):  # type: ignore[no-untyped-def]
        compress(values, scores, how, carried, tokens, target, turns)
        ends = slots_at_ends(target)
        ends = ends[ends > 0]
        target.pool[ends] = rounded(target.pool[ends])

    patch.setattr(compressed_reference, "store_rows", store_rounded)
    patch.setattr(compressed_reference, "compress", compress_rounded)


def test_logits_are_those_of_rounded_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of a row lies where it is read: rows in pages against rows one by one, in other chunks."""
    prompts = prompts_of(70, 33)
    packed = logits_of(folder, prompts, packs_rows=True, chunk=9)
    round_rows(monkeypatch)
    for prompt, ours, whole in zip(
        prompts, packed, logits_of(folder, prompts, packs_rows=False, chunk=70), strict=True
    ):
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-10, msg=f"a prompt of {len(prompt)} tokens")


def test_logits_are_near_those_of_transformers(tmp_path: Path) -> None:
    """In a model that chooses neither rows nor experts: where it does, rounding may exchange them, and there is no bound."""
    save_compressed(tmp_path, index_topk=512, num_experts_per_tok=8)
    prompts = prompts_of(70, 33)
    for prompt, ours in zip(prompts, logits_of(tmp_path, prompts, packs_rows=True, chunk=9), strict=True):
        expected = expected_logits(tmp_path, prompt)
        error = (ours - expected).abs() / expected.std()
        assert 1e-3 < error.mean() < MEAN and error.max() < MOST, (error.mean(), error.max())


def test_tokens_do_not_depend_on_chunks_pages_hits_drafts_and_tiers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of a head, a pool so small that prefixes come back from the host, larger pages and chunks; and nothing of it."""
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *measures: True)
    base, long, *others = prompts_of(40, 110, 3, 9)
    prompts = [base[:length] + other for length, other in zip((37, 40), others, strict=True)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    told = []
    for options in ({}, ON):
        pools = PoisonedPool(monkeypatch)
        with LLM(model=str(folder), **SETTINGS | {"kv_dtype": "fp8"} | options) as llm:
            engine = pools.watch(llm)
            first = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling)]
            turns = [[*prompt, *reply] for prompt, reply in zip(prompts, first, strict=True)]
            if options:  # pages of other requests take the place of these, which are on the host by then
                rest(llm)
                llm.generate([long], sampling)
            later = llm.generate(turns, sampling)
            told.append([first, [list(each.outputs[0].token_ids) for each in later]])
            assert (sum(each.cached.host for each in later) > 0) == bool(options) and engine.stats().stale_rows == 0
            types = {name: each.dtype for name, each in pools.made[-1]._storages.items()}
            assert {name for name, dtype in types.items() if dtype != torch.uint8} <= {"boundary", *CARRIED}, types
    assert told[0] == told[1]
    assert len({token for reply in told[0][0] for token in reply}) > 8
