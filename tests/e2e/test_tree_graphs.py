"""Trees of drafts as graphs: one graph of a width serves every tree and every accepted path.

Exact: float64 on the CPU, where graphs are recorded, against an engine without graphs that guesses nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hiserve import LLM, SamplingParams
from tests.helpers.cache_paths import SETTINGS, answer, host_hits, pool
from tests.helpers.chosen_drafts import choose_in_turn
from tests.helpers.dialogues import held_out_prompts
from tests.helpers.recorded_llm import allow_recording
from tests.helpers.small_model import small_model


@pytest.mark.parametrize(
    ("tree", "graphs", "depth", "temperature"),
    [
        ("auto", "decode", 1, 0.8),
        # Usual is a tree with weights and rows in 8 bits (``test_speed_matrix.py``).
        pytest.param("3x4:15", "all", 1, 0.8, marks=pytest.mark.wide),
        pytest.param("2x3:7", "decode", 0, 0.0, marks=pytest.mark.wide),
    ],
)
def test_graphs_of_trees_change_nothing(
    tree: str, graphs: str, depth: int, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [text[:44] for text in held_out_prompts("services") if len(text) > 100][:3]
    sampling = [SamplingParams(seed=i, temperature=temperature, max_tokens=18 - i, ignore_eos=True) for i in range(3)]
    work = answer(prompts, sampling, model=small_model())
    executors = allow_recording(monkeypatch)
    rows = 4
    if tree == "auto":  # chains and trees in turn, in graphs of many widths
        choose_in_turn(monkeypatch)
        rows = 2
    settings = {
        "model": small_model(),
        "max_running_requests": rows,
        "spec": "eagle3",
        "spec_tree": tree,
        "spec_steps": "auto",
        "kv_canary": False,
    }
    host_hits(work, tmp_path, graphs=graphs, overlap=depth, **settings)
    (executor,) = executors
    counts = executor.gate_counts()["replay"]
    assert counts["verify"] >= 5, counts


def test_as_many_drafts_are_accepted_after_replays_as_after_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposer gets the states of the accepted path from a graph, too."""
    prompts = [text[:48] for text in held_out_prompts("services") if len(text) > 100][:3]
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)

    def uses(**settings: Any) -> list[tuple[list[int], int, int]]:
        settings |= {"spec": "eagle3", "spec_tree": "3x4:15", "spec_steps": "auto", "host_cache_gib": 0, "overlap": 0}
        with LLM(**SETTINGS | pool(16) | settings) as llm:
            outputs = [each.outputs[0] for each in llm.generate(prompts, sampling)]
        return [(each.token_ids, each.drafts.verify_steps, each.drafts.accepted) for each in outputs if each.drafts]

    eager = uses()
    assert len(eager) == len(prompts) and all(accepted > 8 for _, _, accepted in eager)
    executors = allow_recording(monkeypatch)
    assert uses(graphs="decode") == eager
    assert executors[0].gate_counts()["replay"]["verify"] >= 5
