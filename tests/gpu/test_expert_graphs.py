"""Experts on CUDA in graphs: who computes a token is decided on the device, in each replay anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.core.activation import SILU, Activation
from hiserve.kernels import experts, reference
from hiserve.kernels.expert_products import TILES, tiles_for
from hiserve.layers import StackedExperts
from tests.helpers.cuda import generate, graph_engine, prompts_of
from tests.helpers.models import save_family
from tests.helpers.scripted import check_graphs

pytestmark = pytest.mark.gpu

MODELS = ("mixtral", "qwen3_moe")


@pytest.mark.parametrize("num_tokens", [2, 200, 1200], ids=lambda count: f"{count} tokens")
def test_products_of_each_tile_compute_what_the_reference_does(num_tokens: int) -> None:
    """In bfloat16, of columns that fill no tile: with an expert that computes all tokens, and with biases and a limit."""
    print("seed 4")
    torch.manual_seed(4)
    num, hidden, inner = 8, 320, 328
    assert tiles_for(TILES, 2 * num_tokens, num) == TILES[{2: 0, 200: 1, 1200: 2}[num_tokens]]

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    x, logits = draw(num_tokens, hidden) * hidden**0.5, draw(num_tokens, num) * 3
    gate_up, down = draw(num, 2 * inner, hidden), draw(num, hidden, inner)
    shares, chosen = experts.route(logits, 2, True)
    for both, biases, activation in (
        ((draw(2 * inner, hidden), draw(hidden, inner)), (None, None), SILU),
        (None, (draw(num, 2 * inner), draw(num, hidden)), Activation(slope=1.702, shift=1.0, limit=7.0)),
    ):
        found = experts.mix_experts(x, shares, chosen, gate_up, down, *biases, activation, both)
        one, two = (each if each is None else each.float() for each in biases)
        shared = both and (both[0].float(), both[1].float())
        wanted = reference.mix_experts(
            x.float(), shares, chosen, gate_up.float(), down.float(), one, two, activation, shared
        )
        error = float((found.float() - wanted).abs().max() / wanted.abs().max())
        assert error <= 2e-2, (error, both is None)


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
