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
from tests.helpers.compressed_models import HEAVY, SPARSE, WINDOW, PoisonedPool, add_stream_head, save_compressed
from tests.helpers.compressed_oracle import SETTINGS, check_replies, prompts_of
from tests.helpers.recorded_llm import allow_recording

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
    assert counts["replay/mixed"] > 5 and counts["replay/decode" if case == "off" else "replay/verify"] > 10
