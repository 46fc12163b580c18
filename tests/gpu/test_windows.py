"""Sliding windows on CUDA: rows cross them, in prompts and while they are decoded, in graphs as in eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cuda import decisions, generate, graph_engine, prompts_of
from tests.helpers.models import save_family

pytestmark = pytest.mark.gpu

WINDOW, NUM_NEW = 40, 48
LENGTHS = [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 3, 200]
MODELS: dict[str, dict[str, Any]] = {"mistral": {}, "qwen2": {"use_sliding_window": True, "max_window_layers": 1}}


@pytest.mark.parametrize("name", MODELS)
def test_windows_move_in_graphs_as_in_the_reference(tmp_path: Path, name: str) -> None:
    """Where a window starts is computed on the device, in each replay anew."""
    save_family(name, tmp_path, sliding_window=WINDOW, head_dim=64, **MODELS[name])
    prompts = prompts_of(LENGTHS, seed=8, vocab=320)
    reference = graph_engine(tmp_path, "off", "float64", attention="reference")
    expected = generate(reference, prompts, NUM_NEW)
    reference.executor.close()
    for graphs in ("off", "all"):
        subject = graph_engine(tmp_path, graphs, "float32")
        assert generate(subject, prompts, NUM_NEW) == expected, graphs
        counts = decisions(subject)
        subject.executor.close()
        assert graphs == "off" or counts["replay/decode"] == NUM_NEW - 1
