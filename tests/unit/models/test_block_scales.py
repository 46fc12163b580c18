"""FP8 weights with a scale for each block of 128 by 128: exact products, and every way to be incomplete."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.models.model_config import read_model_config
from hiserve.models.weights import load_parameters
from tests.helpers.block_scaled import quantize
from tests.helpers.latent_models import save_latent
from tests.helpers.models import Engine, save_llama
from tests.helpers.plans import HandPlanner
from tests.helpers.quantized import values_of
from tests.helpers.widening import some

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Widths above one block, none a multiple of it."""
    save_llama(tmp_path, hidden_size=160, intermediate_size=300, num_hidden_layers=1, vocab_size=64)
    quantize(tmp_path, torch.float32)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def load(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the values of every parameter, also of those that stay in FP8."""
    found = load_parameters(folder, read_model_config(folder), dtype, torch.device("cpu"), "auto")
    return {name: values_of(each, dtype) for name, each in found.items()}


def product(tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """Every element times the scale at the place of its block."""
    weight, scales = tensors[name].double(), tensors[name + "_scale_inv"].float().double()
    rows, columns = (torch.arange(size) // 128 for size in weight.shape)
    found = weight * scales[rows[:, None], columns]
    return found.float().to(dtype) if dtype != torch.float64 else found


@pytest.mark.parametrize(
    ("scale_type", "dtype"),
    some(
        itertools.product(
            (torch.float32, torch.bfloat16, torch.float8_e8m0fnu), (torch.bfloat16, torch.float32, torch.float64)
        ),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float64),
        (torch.float8_e8m0fnu, torch.float32),
    ),
)
def test_each_weight_is_multiplied_by_the_scale_of_its_block(
    folder: Path, dtype: torch.dtype, scale_type: torch.dtype
) -> None:
    quantize(folder, scale_type)
    tensors, parameters = load_file(folder / FILE), load(folder, dtype)
    down = product(tensors, "model.layers.0.mlp.down_proj.weight", dtype)
    assert torch.equal(parameters["layers.0.down"], down)
    stacked = [product(tensors, f"model.layers.0.self_attn.{name}_proj.weight", dtype) for name in "qkv"]
    assert torch.equal(parameters["layers.0.qkv"], torch.cat(stacked))
    assert torch.equal(parameters["norm"], tensors["model.norm.weight"].to(dtype))


def test_long_matrices_are_multiplied_stripe_by_stripe(folder: Path) -> None:
    torch.manual_seed(1)
    name = "model.layers.0.mlp.gate_proj.weight"
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("300", "2200"))
    wide = {name: (2200, 160), name.replace("gate", "up"): (2200, 160), name.replace("gate", "down"): (160, 2200)}

    def widen(tensors: dict[str, Tensor]) -> None:
        for each, (rows, columns) in wide.items():
            tensors[each] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
            tensors[each + "_scale_inv"] = torch.rand(-(-rows // 128), -(-columns // 128))

    edit(folder, widen)
    tensors, parameters = load_file(folder / FILE), load(folder, torch.float32)
    for part, each in zip(torch.split(parameters["layers.0.gate_up"], 2200), list(wide)[:2], strict=True):
        scales = tensors[each + "_scale_inv"]
        blocks = [scales[row // 128].repeat_interleave(128)[:160] for row in range(2200)]
        assert torch.equal(part, tensors[each].float() * torch.stack(blocks))


@pytest.mark.parametrize("family", some(["deepseek_v3", "deepseek_v32"], "deepseek_v32"))
def test_a_model_of_experts_and_latents_computes_with_the_products(tmp_path: Path, family: str) -> None:
    """The same logits as of a checkpoint that holds the products, up to the rounding of sums."""
    folder = save_latent(family, tmp_path / "fp8")
    quantize(folder, torch.float32)
    plain = save_latent(family, tmp_path / "plain")
    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if name + "_scale_inv" in tensors]:
        tensors[name] = product(tensors, name, torch.float32)
        del tensors[name + "_scale_inv"]
    save_file(tensors, plain / FILE)
    prompts = {1: list(range(5, 25))}
    found = [Engine(each).logits(HandPlanner(16, 64), prompts, chunk=9)[1] for each in (folder, plain)]
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            lambda tensors: tensors.pop(QUERY + "_scale_inv"),
            rf"{QUERY} holds F8_E4M3, and .* lacks its scales, {QUERY}_scale_inv",
        ),
        (
            lambda tensors: tensors.update({QUERY + "_scale_inv": torch.ones(1, 1)}),
            rf"{QUERY}_scale_inv holds F32 \[1, 1\]; F32 or BF16 or F8_E8M0 \[1, 2\] is wanted",
        ),
        (
            lambda tensors: tensors.update({QUERY + "_scale_inv": torch.ones(1, 2, dtype=torch.int32)}),
            rf"{QUERY}_scale_inv holds I32 \[1, 2\]",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(160).to(torch.float8_e4m3fn)}),
            r"model.norm.weight holds F8_E4M3 in the shape \[160\]; only matrices",
        ),
        (
            lambda tensors: tensors.update({QUERY: tensors[QUERY].float()}),
            rf"has tensor {QUERY}_scale_inv, which .* has no place for",
        ),
        (
            lambda tensors: tensors.update({QUERY: tensors[QUERY].float().to(torch.float8_e5m2)}),
            rf"{QUERY}_scale_inv, which .* has no place for",
        ),
    ],
    ids=["missing", "blocks", "type", "vector", "not FP8", "e5m2"],
)
def test_what_cannot_be_multiplied_is_refused_by_name(
    folder: Path, change: Callable[[dict[str, Tensor]], object], fact: str
) -> None:
    edit(folder, change)
    with pytest.raises(ModelError, match=fact) as refused:
        load(folder, torch.bfloat16)
    assert refused.value.param == "model"
