"""DeepSeek-V4 against transformers: logits in float32 and float64, tokens through the whole engine, for any ratios.

All memory is NaN until somebody writes it, and again when nobody owns it. transformers computes without a cache: with one it
breaks ties of the index in another order.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.runners.inputs import build_inputs
from tests.helpers.compressed_models import HEAVY, SPARSE, WINDOW, YARN, poison, save_compressed
from tests.helpers.compressed_oracle import PAGE, check_replies, expected_logits, generate, prompts_of
from tests.helpers.models import Engine
from tests.helpers.plans import HandPlanner
from tests.helpers.widening import some

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ratios 2 and 8": {"compress_rates": {SPARSE: 2, HEAVY: 8}, "index_topk": 3},
    "equal ratios, all rows chosen": {"compress_rates": {SPARSE: 4, HEAVY: 4}, "index_topk": 512},
    "windows alone": {"layer_types": [WINDOW] * 5, "mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "hash_moe"]},
    "heavy alone, one stream of experts": {"layer_types": [HEAVY] * 5, "mlp_layer_types": ["moe"] * 5},
    "sparse first, small limit, two streams": {
        "layer_types": [SPARSE, SPARSE, WINDOW, HEAVY, SPARSE],
        "swiglu_limit": 0.05,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 1,
        "routed_scaling_factor": 2.5,
        "sliding_window": 5,
        "o_groups": 4,
        "tie_word_embeddings": True,
    },
    "plain rotation, streams as released": {
        "rope_parameters": {"rope_type": "default"},
        "compress_rope_theta": 500.0,
        "rope_theta": 70.0,
        "hc_sinkhorn_iters": 20,
    },
    "YaRN between": {"rope_parameters": YARN | {"factor": 4.0, "beta_fast": 4}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            made[name] = self[name] = save_compressed(tmp_path_factory.mktemp("model"), **MODELS[name])
            return made[name]

    return Folders()


def engine_of(folder: Path, dtype: str = "float64") -> Engine:
    engine = Engine(folder, dtype=dtype, attention="auto", page_size=PAGE, num_pages=64, max_len=128)
    poison(engine.pool)
    return engine


@pytest.mark.parametrize(
    ("name", "dtype"),
    some(
        product(MODELS, ("float32", "float64")),
        *product(MODELS, ("float64",)),
        ("plain", "float32"),
        ("sparse first, small limit, two streams", "float32"),
    ),
)
def test_logits_are_those_of_transformers(name: str, dtype: str, folders: dict[str, Path]) -> None:
    """Ragged chunks of four prompts, in scattered pages."""
    prompts = dict(enumerate(prompts_of(70, 3, 33, 16), start=1))
    logits = engine_of(folders[name], dtype).logits(HandPlanner(PAGE, 64, shuffle_seed=5), prompts, chunk=9)
    for row, prompt in prompts.items():
        expected = expected_logits(folders[name], prompt, getattr(torch, dtype))
        assert (logits[row] - expected).abs().max().item() <= 1e-4, row


def test_hb_19_rows_do_not_depend_on_chunks(folders: dict[str, Path]) -> None:
    """Token by token, or all at once, or anything between."""
    (prompt,) = prompts_of(60)
    whole, *others = (
        engine_of(folders["plain"]).logits(HandPlanner(PAGE, 64, shuffle_seed=chunk), {1: prompt}, chunk)[1]
        for chunk in (60, 1, 2, 7, 17)
    )
    for each in others:
        assert (each - whole).abs().max().item() <= 1e-12


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.wide),
        {"window_pages": 0, "max_batched_tokens": 7},
        {"page_size": 64, "overlap": 1},
        {"spec": "ngram", "spec_steps": 3, "overlap": 1},
        pytest.param(
            {"spec": "ngram", "spec_steps": 5, "max_batched_tokens": 64, "page_size": 32}, marks=pytest.mark.wide
        ),
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(
    options: dict[str, Any], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(37, 5, 64, 1, 48, 12)
    prompts += [prompts[1] * 6]  # whose continuation can be guessed
    replies = generate(folders["plain"], monkeypatch, prompts, **options)
    check_replies(folders["plain"], prompts, replies)
    assert len({token for reply in replies for token in reply}) > 20


@pytest.mark.parametrize("name", ["ratios 2 and 8", "sparse first, small limit, two streams"])
def test_tokens_of_other_shapes(name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(29, 47)
    check_replies(folders[name], prompts, generate(folders[name], monkeypatch, prompts, spec="ngram", spec_steps=2))


# Around the ends of rows, windows and pages, here; all of them behind ``long``.
LENGTHS = (2, 3, 4, 8, 11, 13, 15, 17, 31, 32)


@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param(range(1, 3 * PAGE + 1), marks=pytest.mark.long)], ids=len)
def test_prompts_of_every_length(
    lengths: tuple[int, ...], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(*lengths)
    replies = generate(folders["plain"], monkeypatch, prompts, max_batched_tokens=11)
    check_replies(folders["plain"], prompts, replies)


@torch.inference_mode()
def test_a_token_sees_the_rows_of_its_prefix_and_no_other(folders: dict[str, Path]) -> None:
    """H8, by mutation: row v of ratio r is seen at position p if v < (p + 1) // r, and one of the window if v > p - 12.

    A row changes before the token is computed; what the token itself writes is what it would be. A longer request in the
    same step sees more rows.
    """
    (prompt,) = prompts_of(50)
    for position in (14, 15, 16, 31, 46):
        engine, planner = engine_of(folders["heavy alone, one stream of experts"]), HandPlanner(PAGE, 64)
        engine.logits(planner, {1: prompt[:position], 2: prompt}, chunk=len(prompt))
        engine.rows.tokens[1, position] = prompt[position]
        plan = planner.step({1: 1, 2: 1})
        engine.rows.apply(plan)
        step = build_inputs(plan, engine.rows)
        storages = engine.pool._storages
        before = {name: storage.clone() for name, storage in storages.items()}
        expected = engine.runner.run(step.forward).logits[0]
        for group, ratio, row in (
            *(("hca", 16, row) for row in range(3)),
            *(("swa", 1, position + offset) for offset in (-13, -12, -11, -1, 0, 1)),
        ):
            for name, storage in storages.items():
                storage.copy_(before[name])
            rows, page = PAGE // ratio, row * ratio // PAGE
            if row < 0 or page >= len(planner.pages[1]):
                continue
            storages[group][:, :, planner.pages[1][page] * rows + row % rows] = 3.0
            is_seen = row < (position + 1) // ratio and (ratio > 1 or row > position - 12)
            is_written = (row + 1) * ratio == position + 1
            has_changed = not torch.equal(engine.runner.run(step.forward).logits[0], expected)
            assert has_changed == (is_seen and not is_written), (position, group, row)
