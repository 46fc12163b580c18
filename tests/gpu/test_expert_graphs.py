"""Experts on CUDA in graphs: who computes a token is decided on the device, in each replay anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.layers import StackedExperts
from tests.helpers.cuda import generate, graph_engine, prompts_of
from tests.helpers.models import save_family
from tests.helpers.scripted import check_graphs

pytestmark = pytest.mark.gpu

MODELS = ("mixtral", "qwen3_moe")


@pytest.mark.parametrize("name", MODELS)
def test_experts_in_graphs_compute_what_the_reference_does(tmp_path: Path, name: str) -> None:
    """Decode and verify steps, mixed steps and pieces."""
    save_family(name, tmp_path, head_dim=64)
    counts = check_graphs(tmp_path)
    assert counts.get("replay/mixed", 0) + counts.get("replay/piecewise", 0) > 0


def test_a_replay_routes_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, other tokens each time: the experts that a replay chooses differ from those of its capture."""
    save_family("qwen3_moe", tmp_path, head_dim=64)
    chosen: list[torch.Tensor] = []
    call = StackedExperts.__call__

    def watch(self: Any, x: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        chosen.append(experts)
        return call(self, x, shares, experts)

    monkeypatch.setattr(StackedExperts, "__call__", watch)
    subject = graph_engine(tmp_path, "decode", "float32", max_rows=4)
    in_graphs = [each for each in chosen if each.shape[0] == 4][-1:]  # of the last capture of four rows
    generate(subject, prompts_of([5, 9, 17, 30], seed=3, vocab=320), 3)
    seen = []
    for seed in range(4):
        generate(subject, prompts_of([5, 9, 17, 30], seed=seed, vocab=320), 3)
        seen.append(in_graphs[0].tolist())
    subject.executor.close()
    assert len({str(each) for each in seen}) > 1, seen
