"""Layers against transformers' modules of the same name."""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hiserve.kernels import reference
from hiserve.kernels.ops import Ops, ops_for
from hiserve.layers import Embedding, GatedMLP, Linear, RMSNorm, Rotary, can_pack
from hiserve.models.frequencies import rotary_frequencies
from hiserve.models.rope import RopeConfig


def rotary(theta: float, dtype: torch.dtype) -> Rotary:
    return Rotary(rotary_frequencies(RopeConfig(theta=theta), 64, 8192), dtype, reference)


@pytest.mark.parametrize("theta", [10_000.0, 100_000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation_equals_transformers_at_far_positions(theta: float, dtype: torch.dtype) -> None:
    config = LlamaConfig(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": theta})
    positions = torch.tensor([0, 1, 17, 1000, 8191])
    heads = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0), dtype=dtype)
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    rotation = rotary(theta, dtype)(positions)
    got = reference.rope(heads, rotation.cos, rotation.sin)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected[0].transpose(0, 1), atol=1e-6, rtol=0)


def test_rotation_of_a_sixteen_bit_model_happens_in_float32() -> None:
    assert rotary(1e4, torch.bfloat16)(torch.arange(3)).cos.dtype == torch.float32
    assert rotary(1e4, torch.float64)(torch.arange(3)).cos.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_linear_projects_no_rows_too(dtype: torch.dtype) -> None:
    """A step in which no row samples has no logits."""
    linear = Linear(torch.eye(4, dtype=dtype)[:3], reference)
    x = torch.arange(8, dtype=dtype).view(2, 4)
    assert torch.equal(linear(x), x[:, :3])
    assert linear(x[:0]).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_linear_adds_its_bias_packed_or_not(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(4)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((6, 4), (6,), (rows, 4)))
    got = Linear(weight.to(dtype), reference, bias.to(dtype))(x.to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.float(), x @ weight.t() + bias, atol=0.1 if dtype == torch.bfloat16 else 1e-5, rtol=0
    )


def test_mlp_gates_then_projects_down() -> None:
    gate, up, down = (torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(9))
    mlp = GatedMLP(gate_up=Linear(torch.cat((gate, up)), reference), down=Linear(down, reference))
    expected = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    torch.testing.assert_close(mlp(x), expected, atol=1e-5, rtol=0)


def test_norm_and_embedding_hold_what_they_are_given() -> None:
    assert torch.equal(Embedding(torch.eye(3))(torch.tensor([2, 0], dtype=torch.int32)), torch.eye(3)[[2, 0]])
    torch.testing.assert_close(
        RMSNorm(torch.full((2,), 3.0), 0.0, reference)(torch.tensor([[5.0, -5.0]])), torch.tensor([[3.0, -3.0]])
    )


@pytest.mark.parametrize("rows", [0, 1, 3, 17])
def test_packed_products_equal_plain_ones(rows: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(48, 32, generator=generator), torch.randn(rows, 40, generator=generator)[:, :32]
    assert can_pack(weight)
    torch.testing.assert_close(Linear(weight, reference)(x), x @ weight.t(), atol=1e-4, rtol=0)


def test_only_float32_weights_on_the_cpu_are_packed() -> None:
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float64))
    assert not can_pack(torch.zeros(4, 4, device="meta"))


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_set_of_operations_has_all_of_them(device: str, is_exact: bool) -> None:
    found = ops_for(torch.device(device), is_exact=is_exact)
    wanted = {name for name in (*vars(Ops), *Ops.__annotations__) if not name.startswith("_")}
    assert "norm_inputs" in wanted and wanted <= set(dir(found))
    assert found.is_exact == is_exact
    module = {"cpu": "reference", "cuda": "fused"}[device]
    assert found.rms_norm is importlib.import_module(f"hiserve.kernels.{module}").rms_norm
    others = {"cpu": "exact_reference", "cuda": "exact"}[device] if is_exact else module
    assert found.mix_experts is importlib.import_module(f"hiserve.kernels.{others}").mix_experts
