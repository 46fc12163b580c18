"""Graphs of models with compressed rows and several streams: transformers' tokens, from steps of every kind.

All memory is NaN that no row, page, tail or transfer holds.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve import LLM, SamplingParams
from hiserve.runners import capture
from tests.helpers.compressed_models import (
    HEAVY,
    RELEASED,
    SPARSE,
    WINDOW,
    PoisonedPool,
    add_stream_head,
    save_compressed,
)
from tests.helpers.compressed_oracle import SETTINGS, check_replies, expected_logits, prompts_of
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.widening import some

CASES: dict[str, dict[str, Any]] = {
    "off": {"spec": "off"},
    "mtp": {"spec": "mtp", "spec_steps": 2, "overlap": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    kinds = {"layer_types": [SPARSE, WINDOW, HEAVY], "mlp_layer_types": ["moe", "moe", "hash_moe"]}
    folder = save_compressed(tmp_path_factory.mktemp("graphs"), num_hidden_layers=3, **kinds)
    add_stream_head(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_graphs_give_the_tokens_of_transformers(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H13: replies cross 128 tokens, ratios, pages, windows and the index's saturation, beside prompts that begin and end.

    The second time, prompts resume from snapshots that graphs have stored.
    """
    monkeypatch.setattr(capture, "_ROWS", (2, 3))
    monkeypatch.setattr(capture, "_MIXED_TOKENS", (4, 24))
    pools, executors = PoisonedPool(monkeypatch), allow_recording(monkeypatch)
    prompts, num_new = prompts_of(117, 17, 9, 1), (14, 16, 6, 4)
    sampling = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in num_new]
    options = {"graphs": "all", "max_model_len": 144, "max_batched_tokens": 24, "max_running_requests": 3}
    options |= {"disable_prefix_cache": False, "kv_pages": 200, "tail_share": 0.9}
    with LLM(model=str(folder), **SETTINGS | options | CASES[case]) as llm:
        engine = pools.watch(llm)
        replies = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling)]
        assert [list(each.outputs[0].token_ids) for each in llm.generate(prompts[:2], sampling[2:])] == [
            reply[: each.max_tokens] for reply, each in zip(replies, sampling[2:], strict=False)
        ]
        assert engine.stats().stale_rows == 0 and engine.stats().cached_tokens == 112 + 16
    check_replies(folder, prompts, replies)
    counts = Counter[str]()
    for executor in executors:
        for action, reasons in executor.gate_counts().items():
            counts.update({f"{action}/{reason}": count for reason, count in reasons.items()})
    print(counts)
    assert (
        counts["replay/mixed"] > 5
        and not counts["replay/piecewise"]
        and counts["replay/decode" if case == "off" else "replay/verify"] > 10
    )


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = save_compressed(tmp_path_factory.mktemp("released"), **RELEASED)
    add_stream_head(folder)
    return folder


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "case"),
    some(
        [(2040, 14, "mtp"), (4086, 14, "off"), (4086, 500, "off"), (4086, 500, "mtp"), (5200, 14, "mtp")],
        (2040, 14, "mtp"),
    ),
)
def test_replies_cross_the_lengths_at_which_others_change_their_kernels(
    num_prompt: int, num_new: int, case: str, released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies of one graph: the index saturates at 2,048 tokens, and has 1,024 rows at 4,096, where antirez/ds4's went wrong.

    Both lengths end a page and a row of ratio 128. In float32, which chooses between tokens as likely as each other.
    """
    executors = allow_recording(monkeypatch)
    (prompt,) = prompts_of(num_prompt)
    options = {"graphs": "decode", "dtype": "float32", "page_size": 128, "kv_pages": 60, "max_running_requests": 1}
    options |= {"max_model_len": num_prompt + num_new + 8, "max_batched_tokens": 1024}
    with LLM(model=str(released), **SETTINGS | options | CASES[case]) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        reply = list(llm.generate([prompt], sampling)[0].outputs[0].token_ids)
    logits = expected_logits(released, prompt + reply, torch.float32)[num_prompt - 1 : -1]
    drawn = logits.gather(1, torch.tensor(reply)[:, None])[:, 0]
    assert (logits.max(-1).values - drawn).max().item() < 1e-3
    assert len(set(reply)) > 6
    (executor,) = executors
    replayed = executor.gate_counts()["replay"]["decode" if case == "off" else "verify"]
    assert replayed > num_new // 4, replayed
