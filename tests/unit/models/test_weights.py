"""Checkpoints, whole and broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.models.model_config import read_model_config
from hiserve.models.names import parameter_table
from hiserve.models.weights import load_parameters
from tests.helpers.models import FAMILIES, save_family, save_llama, save_qwen3

CPU = torch.device("cpu")
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path)


def load(folder: Path, load_format: str = "auto", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_parameters(folder, read_model_config(folder), dtype, CPU, load_format)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def shard(folder: Path) -> None:
    """Splits the single file in two, as large checkpoints are."""
    tensors = load_file(folder / FILE)
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in halves.items():
        save_file({name: tensors[name] for name in chosen}, folder / file)
    weight_map = {name: file for file, chosen in halves.items() for name in chosen}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / FILE).unlink()


def test_query_key_and_value_are_one_matrix_in_this_order(llama: Path) -> None:
    tensors, parameters = load_file(llama / FILE), load(llama)
    stacked = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(parameters["layers.1.qkv"], torch.cat(stacked))
    stacked = [tensors[f"model.layers.2.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(parameters["layers.2.gate_up"], torch.cat(stacked))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_counted(tmp_path: Path, family: str) -> None:
    folder = save_family(family, tmp_path)
    total = sum(parameter.numel() for parameter in load(folder).values())
    assert total == read_model_config(folder).num_params


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_of_every_spelling_and_in_shards_are_the_same(tmp_path: Path, family: str) -> None:
    each = load(save_family(family, tmp_path / "each"))
    for name, save in {"fused": {"save_original_format": False}, "shards": {"max_shard_size": "20KB"}}.items():
        folder = save_family(family, tmp_path / name, save=save)
        assert (folder / INDEX).is_file() == (name == "shards")
        for parameter, tensor in load(folder).items():
            assert torch.equal(tensor, each[parameter]), parameter


def test_rows_of_experts_are_gate_then_up_expert_after_expert(tmp_path: Path) -> None:
    folder = save_family("mixtral", tmp_path)
    tensors, parameters = load_file(folder / FILE), load(folder)
    names = [
        f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight"
        for expert in range(6)
        for name in ("w1", "w3")
    ]
    assert torch.equal(parameters["layers.1.experts_gate_up"], torch.cat([tensors[name] for name in names]))


def test_a_missing_expert_is_named_as_the_checkpoint_spells_it(tmp_path: Path) -> None:
    folder = save_family("mixtral", tmp_path)
    edit(folder, lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"))
    with pytest.raises(ModelError, match=r"lacks tensor model\.layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight"):
        load(folder)


def test_biases_are_stacked_like_the_rows_they_belong_to(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path, attention_bias=True, mlp_bias=True)
    tensors, parameters = load_file(folder / FILE), load(folder)
    stacks = {
        "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
        "out": ("self_attn", ("o_proj",)),
        "gate_up": ("mlp", ("gate_proj", "up_proj")),
        "down": ("mlp", ("down_proj",)),
    }
    for ours, (block, names) in stacks.items():
        stacked = torch.cat([tensors[f"model.layers.2.{block}.{name}.bias"] for name in names])
        assert torch.equal(parameters[f"layers.2.{ours}_bias"], stacked)
        assert stacked.any()


def test_shards_load_as_one_file_does(llama: Path) -> None:
    whole = load(llama)
    shard(llama)
    for name, parameter in load(llama).items():
        assert torch.equal(parameter, whole[name])


def test_weights_are_converted_to_the_wanted_type(llama: Path) -> None:
    assert {parameter.dtype for parameter in load(llama, dtype=torch.float64).values()} == {torch.float64}


def test_a_missing_tensor_is_named(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(llama)


def test_many_missing_tensors_are_counted(llama: Path) -> None:
    edit(llama, lambda tensors: [tensors.pop(name) for name in list(tensors) if "mlp" in name])
    with pytest.raises(ModelError, match="and 4 more"):
        load(llama)


def test_an_unexpected_tensor_is_named(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}))
    with pytest.raises(ModelError, match=r"has tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(llama)


def test_a_layer_too_many_is_unexpected(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.layers.3.input_layernorm.weight": torch.zeros(64)}))
    with pytest.raises(ModelError, match=r"model\.layers\.3\.input_layernorm\.weight"):
        load(llama)


def test_rotary_frequencies_are_ignored(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(llama)


def test_a_tied_head_may_be_stored_and_an_untied_one_must_be(llama: Path, tmp_path: Path) -> None:
    tied = save_qwen3(tmp_path / "tied")
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(320, 64)}))
    assert "head" not in load(tied)
    edit(llama, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load(llama)


def test_a_wrong_shape_is_named_with_both_shapes(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[63\]; config\.json asks for \[64\]"):
        load(llama)


def test_integers_are_refused_as_quantized(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight holds I8, and floating-point numbers, or F8_E4M3 .* are supported there"
    ):
        load(llama)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(llama: Path, keep: int) -> None:
    data = (llama / FILE).read_bytes()
    (llama / FILE).write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors in .* is damaged"):
        load(llama)


def test_a_garbled_header_is_damage(llama: Path) -> None:
    data = bytearray((llama / FILE).read_bytes())
    data[8:40] = b"\xff" * 32
    (llama / FILE).write_bytes(data)
    with pytest.raises(ModelError, match="is damaged"):
        load(llama)


def test_what_is_missing_is_named_before_anything_is_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(llama, lambda tensors: tensors.pop("model.norm.weight"))
    monkeypatch.setattr(torch, "empty", lambda *_args, **_named: pytest.fail("memory was allocated"))
    with pytest.raises(ModelError, match=r"lacks tensor model\.norm\.weight"):
        load(llama)


def test_a_missing_shard_is_named(llama: Path) -> None:
    shard(llama)
    (llama / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors is missing"):
        load(llama)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_damage(llama: Path, text: str) -> None:
    shard(llama)
    (llama / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json in .* is damaged"):
        load(llama)


def test_a_folder_without_safetensors_is_refused(llama: Path) -> None:
    (llama / FILE).rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only safetensors are read"):
        load(llama)


def test_dummy_weights_need_no_file_and_repeat(llama: Path) -> None:
    (llama / FILE).unlink()
    first, second = load(llama, "dummy"), load(llama, "dummy")
    assert set(first) == set(parameter_table(read_model_config(llama)))
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])
    assert first["norm"].unique().tolist() == [1.0]
    assert first["embedding"].std().item() == pytest.approx(0.02, rel=0.05)
