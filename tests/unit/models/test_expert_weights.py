"""Experts that stay packed: what they stand for, their bytes, and every scale that makes no sense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiserve.core.packed_experts import unpacks_in_tiles
from hiserve.distributed.shard import WHOLE, Shard
from hiserve.errors import ModelError
from hiserve.kernels.packed_weights import PackedWeights
from hiserve.models import expert_weights, staging
from hiserve.models.compressed_names import table_of
from hiserve.models.model_config import read_model_config
from hiserve.models.shards import local_config
from hiserve.models.weights import load_parameters
from tests.helpers.block_scaled import quantize
from tests.helpers.latent_models import save_latent
from tests.helpers.models import Engine, save_family
from tests.helpers.packed_models import pack_gpt_oss, save_released
from tests.helpers.plans import HandPlanner
from tests.helpers.quantized import values_of

FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def packs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_weights, "unpacks_in_tiles", lambda device, dtype: True)


def save_gpt_oss(folder: Path) -> Path:
    """Rows of one group and of two, of which none fills a block."""
    pack_gpt_oss(save_family("gpt_oss", folder, intermediate_size=32))
    return folder


def save_eights(folder: Path) -> Path:
    """DeepSeek-V3 in FP8, experts of two blocks by one, whose second blocks end early."""
    folder = save_latent("deepseek_v3", folder, moe_intermediate_size=136)
    quantize(folder, torch.bfloat16)
    return folder


CUDA = torch.device("cuda")
CASES: dict[str, tuple[Callable[[Path], Path], dict[str, str]]] = {
    "gpt-oss": (save_gpt_oss, {"experts_gate_up": "e2m1", "experts_down": "e2m1"}),
    "v4": (
        save_released,
        {"experts_gate_up": "e2m1", "experts_down": "e2m1", "shared_gate_up": "e4m3", "shared_down": "e4m3"},
    ),
    "v3": (save_eights, dict.fromkeys(("experts_gate_up", "experts_down", "shared_gate_up", "shared_down"), "e4m3")),
}


def load(
    folder: Path, dtype: torch.dtype = torch.bfloat16, load_format: str = "auto", shard: Shard = WHOLE
) -> dict[str, Any]:
    return load_parameters(folder, read_model_config(folder), dtype, torch.device("cpu"), load_format, shard)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp(name)) for name, (save, _) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_packed_parameters_stand_for_those_that_are_unpacked(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders[name]
    found = load(folder)
    monkeypatch.setattr(staging, "MAX_STAGED_BYTES", 1)
    again = load(folder)
    monkeypatch.setattr(expert_weights, "unpacks_in_tiles", unpacks_in_tiles)
    expected = load(folder)
    assert found.keys() == expected.keys()
    kinds = {}
    for each, theirs in expected.items():
        ours = found[each]
        if isinstance(ours, PackedWeights):
            kinds[each.rpartition(".")[2]] = ours.kind
            assert torch.equal(ours.codes, again[each].codes) and torch.equal(ours.scales, again[each].scales)
            ours = ours.unpacked(torch.bfloat16).view(theirs.shape)
        assert torch.equal(values_of(ours, torch.bfloat16), values_of(theirs, torch.bfloat16)), each
    assert kinds == CASES[name][1]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_has_its_part_of_packed_numbers_and_their_scales(tmp_path: Path, name: str) -> None:
    """Gates, ups and columns of each expert; blocks of 128 and groups of 32 are whole, in half the memory."""
    if name == "gpt-oss":
        pack_gpt_oss(save_family("gpt_oss", tmp_path, intermediate_size=256))
    elif name == "v4":
        save_released(tmp_path, moe_intermediate_size=256, o_lora_rank=128)
    else:
        save_latent(
            "deepseek_v3", tmp_path, moe_intermediate_size=256, hidden_size=136, intermediate_size=256, v_head_dim=64
        )
        quantize(tmp_path, torch.bfloat16)
    whole, *shares = (load(tmp_path, torch.float32, shard=shard) for shard in (WHOLE, Shard(0, 2), Shard(1, 2)))
    for shard, share in zip((Shard(0, 2), Shard(1, 2)), shares, strict=True):
        planned = local_config(read_model_config(tmp_path), shard).facts().packed_experts.num_bytes
        packed = [each for each in share.values() if isinstance(each, PackedWeights)]
        assert planned == sum(each.codes.nbytes + each.scales.nbytes for each in packed)
    for last in CASES[name][1]:
        parameter = whole["layers.1." + last]
        values = parameter.unpacked(torch.float32)
        is_down = last.endswith("down")
        parts = values.chunk(2, -1) if is_down else values.unflatten(-2, (2, 2, -1)).unbind(-3)
        for part, share in zip(parts, shares, strict=True):
            its = share["layers.1." + last]
            found = its.unpacked(torch.float32)
            assert torch.equal(found if is_down else found.unflatten(-2, (2, -1)), part), last
            assert 2 * (its.codes.nbytes + its.scales.nbytes) == parameter.codes.nbytes + parameter.scales.nbytes


@pytest.mark.parametrize("name", CASES)
def test_the_plan_counts_the_bytes_that_packed_parameters_take(folders: dict[str, Path], name: str) -> None:
    facts = read_model_config(folders[name]).facts()
    packed = [each for each in load(folders[name]).values() if isinstance(each, PackedWeights)]
    assert facts.packed_experts.num_bytes == sum(each.codes.nbytes + each.scales.nbytes for each in packed)
    assert facts.packed_experts.num_params == sum(torch.Size(each.shape).numel() for each in packed)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_unpacked_experts(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where the order of sums does not show; the attention of all families, and experts of all kinds."""
    torch.set_num_threads(1)
    prompts, found = {1: list(range(5, 25))}, []
    page_size = 32 if name == "v4" else 16
    for is_packed in (True, False):
        monkeypatch.setattr(expert_weights, "unpacks_in_tiles", lambda device, dtype, packs=is_packed: packs)
        engine = Engine(folders[name], dtype="float64", attention="auto", page_size=page_size)
        found.append(engine.logits(HandPlanner(page_size, 64), prompts, chunk=9)[1])
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_drawn_parameters_have_the_spread_of_others(folders: dict[str, Path], name: str) -> None:
    drawn = load(folders[name], load_format="dummy")
    packed = [each for each in drawn.values() if isinstance(each, PackedWeights)]
    assert {each.kind for each in packed} == set(CASES[name][1].values())
    for each in packed:
        assert 0.015 < each.unpacked(torch.float32).std() < 0.03


def test_other_devices_and_types_unpack(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [unpacks_in_tiles("cuda", dtype) for dtype in ("bfloat16", "float16", "float32")] == [True, True, False]
    assert not unpacks_in_tiles("cpu", "bfloat16")
    monkeypatch.setattr(expert_weights, "unpacks_in_tiles", unpacks_in_tiles)
    for load_format in ("auto", "dummy"):
        found = load(folders["v4"], load_format=load_format)
        assert not any(isinstance(each, PackedWeights) for each in found.values())


def test_experts_that_a_checkpoint_has_in_another_format_do_not_stay_packed(folders: dict[str, Path]) -> None:
    config = read_model_config(folders["v4"])
    found = [
        expert_weights.packed_parameters(table_of(config), config, torch.bfloat16, CUDA, held) for held in (None, {})
    ]
    assert found[0] and not found[1]


def edited(folder: Path, to: Path, name: str, value: float) -> None:
    """Copies a checkpoint, and sets a scale."""
    tensors = load_file(folder / FILE)
    scale = tensors[name]
    if scale.element_size() == 1:
        scale.view(torch.uint8).view(-1)[-1] = int(value)
    else:
        scale.view(-1)[-1] = value
    save_file(tensors, to / FILE)
    (to / "config.json").write_text((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "scale", "value", "fact"),
    [
        (
            "gpt-oss",
            "model.layers.1.mlp.experts.down_proj_scales",
            129,
            r"down_proj_scales has a scale of 2\*\*2, and 2 is",
        ),
        ("gpt-oss", "model.layers.1.mlp.experts.gate_up_proj_scales", 255, "gate_up_proj_scales has a scale of NaN"),
        ("v4", "model.layers.2.ffn.experts.3.w2.scale", 140, r"experts.3.down_proj.*scale_inv has a scale of 2\*\*13"),
        ("v3", "model.layers.2.mlp.experts.3.up_proj.weight_scale_inv", 0.0, "layers.2.mlp.experts.0.gate_proj"),
        ("v3", "model.layers.2.mlp.experts.3.down_proj.weight_scale_inv", float("nan"), "mlp.experts.0.down_proj"),
    ],
)
def test_scales_that_make_no_sense_are_refused(
    folders: dict[str, Path], tmp_path: Path, name: str, scale: str, value: float, fact: str
) -> None:
    edited(folders[name], tmp_path, scale, value)
    with pytest.raises(ModelError, match=fact):
        load(tmp_path)


def test_the_largest_scale_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    edited(folders["gpt-oss"], tmp_path, "model.layers.1.mlp.experts.down_proj_scales", 128)
    assert load(tmp_path)["layers.1.experts_down"].unpacked(torch.bfloat16).abs().max() <= 12
