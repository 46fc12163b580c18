"""Packed rows and heads in the memory plan and in the cache's identity, who asks for them, and their refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hiserve.cache.storage.cache_identity import identify
from hiserve.config.options import make_options
from hiserve.core.kv_groups import Space
from hiserve.engine.executing_half import _check_capability
from hiserve.errors import ConfigError
from hiserve.launch import Launch, prepare
from hiserve.models.builtin_shapes import shape_config
from hiserve.models.draft_config import page_groups, read_draft
from hiserve.models.model_config import read_model_config
from tests.helpers.compressed_models import add_stream_head, save_compressed
from tests.helpers.latent_models import save_latent, save_with_mtp
from tests.helpers.models import save_family


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_compressed(tmp_path_factory.mktemp("model"))
    add_stream_head(folder)
    return folder


def prepared(folder: Path, **given: Any) -> Launch:
    return prepare(
        make_options(**{"model": str(folder), "kv_dtype": "fp8", "kv_pages": 64, "max_model_len": 256} | given)
    )


def test_a_row_of_v4_has_584_bytes_and_a_key_of_its_index_132() -> None:
    shape = shape_config("v4-flash-like")
    groups = {group.name: group for group in shape.cache_plan("bfloat16", frees_windows=True, packs_rows=True).groups}
    sizes = {name: group.slot_bytes // group.num_layers for name, group in groups.items() if group.codec == "packed"}
    assert sizes == {"swa": 584, "csa": 584, "csa_index": 132, "hca": 584}
    plain = shape.cache_plan("bfloat16", frees_windows=True)
    packed = shape.cache_plan("bfloat16", frees_windows=True, packs_rows=True)
    assert (packed.layers, packed.beside, packed.row_bytes) == (plain.layers, plain.beside, plain.row_bytes)
    assert packed.page_bytes(Space.HISTORY, 128) < 0.57 * plain.page_bytes(Space.HISTORY, 128)


def test_a_latent_has_656_bytes_and_a_key_of_an_index_beside_it_132() -> None:
    shape = shape_config("v3.2-like")
    plan = shape.cache_plan("bfloat16", frees_windows=False, packs_rows=True)
    sizes = {group.name: (group.codec, group.slot_bytes // group.num_layers) for group in plan.groups}
    assert sizes == {"kv": ("packed", 656), "index": ("packed", 132)}
    assert plan.layers == shape.cache_plan("bfloat16", frees_windows=False).layers
    (group,) = shape_config("glm-4.7-flash").kv_groups("bfloat16", packs_rows=True)
    assert (group.codec, group.slot_bytes // group.num_layers) == ("packed", 656)


@pytest.mark.parametrize(
    ("family", "spec", "names"),
    [
        ("deepseek_v32", "off", {"kv", "index"}),
        ("deepseek_v32", "mtp", {"kv", "index", "draft"}),
        ("deepseek_v3", "mtp", {"kv", "draft"}),
    ],
)
def test_the_memory_plan_counts_packed_latents_and_keys(
    family: str, spec: str, names: set[str], tmp_path: Path
) -> None:
    save_with_mtp(family, tmp_path)
    launch = prepared(tmp_path, spec=spec)
    settings, parts = launch.resolved.settings, launch.resolved.memory.parts
    groups = page_groups(settings, launch.model, read_draft(settings, launch.folder, launch.model))
    assert {group.name for group in groups if group.codec == "packed"} == names
    held = sum(num_bytes for item, num_bytes in parts.items() if item.startswith("KV pool"))
    assert held == sum(64 * group.page_bytes(settings.cache.page_size) for group in groups)


@pytest.mark.parametrize(
    "given", [{"window_pages": 0}, {}, {"spec": "mtp"}, {"window_pages": 0, "spec": "mtp"}], ids=str
)
def test_the_memory_plan_counts_packed_rows(folder: Path, given: dict[str, Any]) -> None:
    launch = prepared(folder, **{"spec": "off"} | given)
    settings, parts = launch.resolved.settings, launch.resolved.memory.parts
    frees = settings.cache.frees_windows
    assert frees == ("window_pages" not in given)
    draft = read_draft(settings, launch.folder, launch.model)
    groups = page_groups(settings, launch.model, draft, frees_windows=frees)
    assert {group.codec for group in groups} <= {"packed", "inputs", "boundary"}
    pages = {Space.HISTORY: 64, Space.WINDOW: settings.cache.window_pages, Space.ROW: 0}
    held = sum(num_bytes for item, num_bytes in parts.items() if item.startswith("KV pool"))
    assert held == sum(pages[group.space] * group.page_bytes(settings.cache.page_size) for group in groups)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("qwen3", {"spec": "draft:hiserve-nano"}),
        ("gpt_oss", {}),
        ("gpt_oss", {"window_pages": 0}),
        ("qwen3_5_text", {}),
    ],
)
def test_the_memory_plan_counts_packed_heads(tmp_path: Path, family: str, given: dict[str, Any]) -> None:
    """Of the model, of windows with pages of their own, beside states, and of drafts; a token takes little more than half."""
    save_family(family, tmp_path, vocab_size=4096, head_dim=64)
    launch = prepared(tmp_path, **{"spec": "off", "dtype": "bfloat16"} | given)
    settings, parts = launch.resolved.settings, launch.resolved.memory.parts
    frees = settings.cache.frees_windows
    assert frees == (family == "gpt_oss" and not given)
    draft = read_draft(settings, launch.folder, launch.model)
    groups = page_groups(settings, launch.model, draft, frees_windows=frees)
    names = {"kv": "heads", "kv_scales": "scales"} | ({"swa": "heads", "swa_scales": "scales"} if frees else {})
    names |= {"draft": "heads", "draft_scales": "scales"} if draft else {}
    codecs = {group.name: group.codec for group in groups if group.space is not Space.ROW}
    assert {name: codec for name, codec in codecs.items() if codec != "boundary"} == names
    pages = {Space.HISTORY: 64, Space.WINDOW: settings.cache.window_pages, Space.ROW: 0}
    held = sum(num_bytes for item, num_bytes in parts.items() if item.startswith("KV pool"))
    assert held == sum(pages[group.space] * group.page_bytes(settings.cache.page_size) for group in groups)
    plain = launch.model.cache_plan("bfloat16", frees_windows=frees)
    packed = launch.model.cache_plan("bfloat16", frees_windows=frees, packs_rows=True)
    assert (packed.layers, packed.beside, packed.row_bytes) == (plain.layers, plain.beside, plain.row_bytes)
    assert plain.page_bytes(Space.HISTORY, 16) / packed.page_bytes(Space.HISTORY, 16) >= 1.93


def test_a_token_of_llama_8b_takes_half_of_its_bytes() -> None:
    shape = shape_config("llama-8b")
    (plain,), packed = shape.kv_groups("bfloat16"), shape.kv_groups("bfloat16", packs_rows=True)
    sizes = {group.name: group.slot_bytes // group.num_layers for group in packed}
    assert sizes == {"kv": 2 * 8 * 128, "kv_scales": 16} and plain.slot_bytes / sum(g.slot_bytes for g in packed) > 1.98


@pytest.mark.parametrize(
    ("scheme", "is_packed"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, True),
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, False),
        ({"kv_cache_scheme": None}, False),
        ({"kv_cache_quant_algo": "NVFP4"}, False),
    ],
    ids=str,
)
def test_auto_is_what_the_checkpoint_was_made_for(tmp_path: Path, scheme: dict[str, Any], is_packed: bool) -> None:
    save_family("qwen3", tmp_path, head_dim=64)
    path = tmp_path / "config.json"
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method | scheme}))
    found = prepared(tmp_path, spec="off", kv_dtype="auto").resolved
    assert found.settings.cache.kv_dtype == ("fp8" if is_packed else "bf16")
    assert any("kv-dtype auto -> fp8: the checkpoint was made for it" in each for each in found.decisions) == is_packed
    assert prepared(tmp_path, spec="off", kv_dtype="bf16").resolved.settings.cache.kv_dtype == "bf16"


def test_heads_that_cannot_be_packed_stay_wide_whatever_the_checkpoint_was_made_for(tmp_path: Path) -> None:
    save_family("qwen3", tmp_path, head_dim=24)
    path = tmp_path / "config.json"
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "kv_cache_quant_algo": "FP8"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": scheme}))
    found = prepared(tmp_path, spec="off", kv_dtype="auto").resolved
    assert found.settings.cache.kv_dtype == "bf16"
    assert any(
        "auto -> bf16: the checkpoint was made for fp8, which its rows do not fit" in each for each in found.decisions
    )
    with pytest.raises(ConfigError, match="this model cannot have it"):
        prepared(tmp_path, spec="off")


def test_packed_and_plain_rows_share_no_pages(folder: Path) -> None:
    model, found = read_model_config(folder), []
    for kv_dtype in ("bf16", "fp8"):
        cache = msgspec.structs.replace(prepared(folder, spec="off").resolved.settings.cache, kv_dtype=kv_dtype)
        settings = msgspec.structs.replace(prepared(folder, spec="off").resolved.settings, cache=cache)
        found.append(identify(settings, folder, model).cache_identity)
    assert found[0].namespace != found[1].namespace and found[0].page_bytes > found[1].page_bytes


def test_other_models_and_shapes_are_refused(tmp_path: Path) -> None:
    save_compressed(tmp_path / "rows", partial_rotary_factor=4 / 32)
    save_family("qwen3", tmp_path / "heads", head_dim=24)
    save_latent("deepseek_v3", tmp_path / "latents", kv_lora_rank=24)
    save_latent("deepseek_v32", tmp_path / "keys", index_head_dim=24)
    for refused in (
        lambda: prepared(tmp_path / "latents"),
        lambda: prepared(tmp_path / "keys"),
        lambda: prepared(tmp_path / "rows"),
        lambda: prepared(tmp_path / "heads"),
    ):
        with pytest.raises(ConfigError, match="--kv-dtype is fp8, but this model cannot have it") as caught:
            refused()
        assert caught.value.param == "kv_dtype"


def test_a_gpu_without_instructions_for_8_bits_is_refused(folder: Path) -> None:
    settings = prepared(folder, spec="off").resolved.settings
    for capability in ((8, 9), (9, 0)):
        _check_capability(settings, capability)
    with pytest.raises(ConfigError, match=r"of compute capability 8.9 or later, but this one has 8.6") as caught:
        _check_capability(settings, (8, 6))
    assert caught.value.param == "kv_dtype"
    plain = msgspec.structs.replace(settings.cache, kv_dtype="bf16")
    _check_capability(msgspec.structs.replace(settings, cache=plain), (8, 0))
