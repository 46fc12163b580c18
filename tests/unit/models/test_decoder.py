"""What the decoder tells a device's operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve.core.activation import SILU
from hiserve.kernels import reference
from hiserve.layers import StackedExperts
from hiserve.models.decoder import _moe, attention_shape
from hiserve.models.experts_config import ExpertsConfig, GroupRouting
from hiserve.models.loading import load_decoder
from hiserve.models.model_config import read_model_config
from tests.helpers.draft_heads import MAX_LEN, Paged
from tests.helpers.models import save_llama


@torch.inference_mode()
def test_the_projection_behind_an_attention_is_told_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, told = reference.linear, []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        told.append(options)
        return plain(x, weight, bias, **options)

    monkeypatch.setattr(reference, "linear", linear)
    monkeypatch.setattr(reference, "linear_parts", linear)
    folder = save_llama(tmp_path)
    config = read_model_config(folder)
    model = load_decoder(folder, config, dtype="float64", device="cpu", load_format="auto", max_len=MAX_LEN)
    paged = Paged(config.kv_groups("float64"), attention_shape(config, dtype=torch.float64, page_size=16))
    model.forward(paged.plan([(0, 0, torch.arange(3, 9))]), paged.layers, paged.attention)
    one, other = {"is_after_attention": False}, {"is_after_attention": True}
    # Queries, keys and values; the attention's output; the MLP's, of which the first ends with its activation.
    layer = [one, other, {}, one]
    assert told == [*layer * config.num_layers, one]


@pytest.mark.parametrize("shared_size", [0, 8, 16])
def test_a_shared_expert_of_the_size_of_the_others_joins_their_products_on_a_device(shared_size: int) -> None:
    config = ExpertsConfig(
        num_experts=4,
        num_per_token=2,
        intermediate_size=8,
        is_normalized=True,
        step=1,
        dense_layers=frozenset(),
        routing=GroupRouting(num_groups=2, num_chosen=1, scale=1.0),
        shared_size=shared_size,
    )
    shapes = {
        "experts_gate_up": (64, 6),
        "experts_down": (24, 8),
        "router": (4, 6),
        "shared_gate_up": (2 * shared_size, 6),
        "shared_down": (6, shared_size),
    }
    parameters = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    parameters["choice_bias"] = torch.empty(4, dtype=torch.float32, device="meta")
    moe = _moe(config, SILU, parameters, "", reference)
    assert isinstance(moe.experts, StackedExperts)
    assert (moe.experts.shared is not None, moe.shared is not None) == (shared_size == 8, shared_size == 16)
    assert moe.router._weight.dtype == torch.float32, "groups are chosen among likelihoods of the bias's type"


def test_a_shared_expert_with_a_gate_joins_the_others_too() -> None:
    config = ExpertsConfig(
        num_experts=4,
        num_per_token=2,
        intermediate_size=8,
        is_normalized=True,
        step=1,
        dense_layers=frozenset(),
        has_shared_gate=True,
        shared_size=8,
    )
    shapes = {
        "experts_gate_up": (64, 6),
        "experts_down": (24, 8),
        "router": (4, 6),
        "shared_gate_up": (16, 6),
        "shared_down": (6, 8),
        "shared_gate": (1, 6),
    }
    parameters = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    moe = _moe(config, SILU, parameters, "", reference)
    assert isinstance(moe.experts, StackedExperts) and moe.experts.shared is not None and moe.shared is None
    assert moe.shared_gate is not None and moe.shared_gate.shape == (6,) and not parameters
