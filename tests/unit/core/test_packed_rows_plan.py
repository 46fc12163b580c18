"""Packed rows in the memory plan and in the cache's identity, and their refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hiserve.cache.storage.cache_identity import identify
from hiserve.config.options import make_options
from hiserve.core.kv_groups import Space
from hiserve.core.resolve import resolve
from hiserve.engine.build import _check_capability
from hiserve.errors import ConfigError
from hiserve.launch import Launch, prepare
from hiserve.models.builtin_shapes import shape_config
from hiserve.models.draft_config import page_groups, read_draft
from hiserve.models.model_config import read_model_config
from tests.helpers.compressed_models import add_stream_head, save_compressed
from tests.helpers.latent_models import save_with_mtp
from tests.helpers.model_facts import LAPTOP, NANO


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_compressed(tmp_path_factory.mktemp("model"))
    add_stream_head(folder)
    return folder


def prepared(folder: Path, **given: Any) -> Launch:
    return prepare(make_options(model=str(folder), kv_rows="packed", kv_pages=64, max_model_len=256, **given))


def test_a_row_of_v4_has_584_bytes_and_a_key_of_its_index_132() -> None:
    shape = shape_config("v4-flash-like")
    groups = {group.name: group for group in shape.cache_plan("bfloat16", frees_windows=True, packs_rows=True).groups}
    sizes = {name: group.slot_bytes // group.num_layers for name, group in groups.items() if group.codec == "packed"}
    assert sizes == {"swa": 584, "csa": 584, "csa_index": 132, "hca": 584}
    plain = shape.cache_plan("bfloat16", frees_windows=True)
    packed = shape.cache_plan("bfloat16", frees_windows=True, packs_rows=True)
    assert (packed.layers, packed.beside, packed.row_bytes) == (plain.layers, plain.beside, plain.row_bytes)
    assert packed.page_bytes(Space.HISTORY, 128) < 0.57 * plain.page_bytes(Space.HISTORY, 128)


def test_a_key_of_an_index_beside_latents_has_132_bytes_and_latents_stay_plain() -> None:
    shape = shape_config("v3.2-like")
    plan = shape.cache_plan("bfloat16", frees_windows=False, packs_rows=True)
    sizes = {group.name: (group.codec, group.slot_bytes // group.num_layers) for group in plan.groups}
    assert sizes == {"kv": ("latent", 1152), "index": ("packed", 132)}


@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_the_memory_plan_counts_packed_keys(spec: str, tmp_path: Path) -> None:
    save_with_mtp("deepseek_v32", tmp_path)
    launch = prepared(tmp_path, spec=spec)
    settings, parts = launch.resolved.settings, launch.resolved.memory.parts
    groups = page_groups(settings, launch.model, read_draft(settings, launch.folder, launch.model))
    assert {group.name: group.codec for group in groups}["index"] == "packed"
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


def test_packed_and_plain_rows_share_no_pages(folder: Path) -> None:
    model, found = read_model_config(folder), []
    for kv_rows in ("plain", "packed"):
        cache = msgspec.structs.replace(prepared(folder, spec="off").resolved.settings.cache, kv_rows=kv_rows)
        settings = msgspec.structs.replace(prepared(folder, spec="off").resolved.settings, cache=cache)
        found.append(identify(settings, folder, model).cache_identity)
    assert found[0].namespace != found[1].namespace and found[0].page_bytes > found[1].page_bytes


def test_other_models_and_shapes_are_refused(tmp_path: Path) -> None:
    save_compressed(tmp_path, partial_rotary_factor=4 / 32)
    for refused in (lambda: resolve(make_options(kv_rows="packed"), NANO, LAPTOP), lambda: prepared(tmp_path)):
        with pytest.raises(ConfigError, match="--kv-rows is packed, but rows of this model cannot be") as caught:
            refused()
        assert caught.value.param == "kv_rows"


def test_a_gpu_without_instructions_for_8_bits_is_refused(folder: Path) -> None:
    settings = prepared(folder, spec="off").resolved.settings
    for capability in ((8, 9), (9, 0)):
        _check_capability(settings, capability)
    with pytest.raises(ConfigError, match=r"of compute capability 8.9 or later, but this one has 8.6") as caught:
        _check_capability(settings, (8, 6))
    assert caught.value.param == "kv_rows"
    plain = msgspec.structs.replace(settings.cache, kv_rows="plain")
    _check_capability(msgspec.structs.replace(settings, cache=plain), (8, 0))
