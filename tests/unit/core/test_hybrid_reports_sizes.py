"""Reported failures of hybrid caches as test cases, by number: sizes of pages and pools (see ``tests/e2e``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hiserve.config.options import Options, make_options
from hiserve.core.kv_groups import Space
from hiserve.core.machine import Machine
from hiserve.core.resolve import Resolved, resolve
from hiserve.models.draft_config import model_facts, page_groups, read_draft
from hiserve.models.model_config import ModelConfig, read_model_config
from tests.helpers.latent_models import save_with_mtp
from tests.helpers.model_facts import GIB
from tests.helpers.window_models import add_mtp, save_windows

MACHINE = Machine(cores=4, memory_bytes=16 * GIB, cuda_memory_bytes=())


def options_of(folder: Path, **settings: Any) -> Options:
    return make_options(model=str(folder), device="cpu", host_cache_gib=0, **settings)


def planned(folder: Path, model: ModelConfig, **settings: Any) -> Resolved:
    options = options_of(folder, **settings)
    return resolve(options, model_facts(options, folder, model), MACHINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return add_mtp(save_windows(tmp_path))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_hb_05_pages_stay_as_long_as_they_are_whatever_other_layers_store(folder: Path, page_size: int) -> None:
    """Each space has pages of its own: those of one grow with no bytes of another."""
    model = read_model_config(folder)
    found = planned(folder, model, page_size=page_size, kv_pages=1000, max_model_len=400, spec="off")
    assert found.settings.cache.page_size == page_size and found.settings.cache.window_pages > 0
    element = {"float32": 4}[found.settings.model.dtype]
    slot = 2 * model.num_kv_heads * model.head_dim * element  # of one layer
    assert found.memory.page_bytes == page_size * slot, "one layer of three has no window"
    assert found.memory.parts["KV pool of windows"] == found.settings.cache.window_pages * page_size * 2 * slot
    wide = msgspec.structs.replace(model, windows=(None, *(300,) * 2))
    assert (
        planned(folder, wide, page_size=page_size, kv_pages=1000, max_model_len=400).settings.cache.page_size
        == page_size
    )


def test_hb_10_a_draft_head_takes_one_layer_of_the_cache(folder: Path, tmp_path: Path) -> None:
    """It lies in the pages of the prompt, has none of its own, and limits no hit."""
    latents = save_with_mtp("deepseek_v3", tmp_path / "latents")
    for path in (folder, latents):
        model, options = read_model_config(path), options_of(path, spec="mtp")
        draft = read_draft(options, path, model)
        assert draft is not None
        settings = planned(path, model, spec="mtp", kv_pages=1000, max_model_len=400).settings
        groups = {group.name: group for group in page_groups(settings, model, draft, frees_windows=True)}
        layer = groups["kv"].slot_bytes // groups["kv"].num_layers
        assert groups["draft"].slot_bytes == layer and groups["draft"].space is Space.HISTORY
        with_head, without = (
            planned(path, model, spec=spec, kv_pages=1000, max_model_len=400) for spec in ("mtp", "off")
        )
        assert with_head.settings.cache.kv_pages == without.settings.cache.kv_pages
        assert with_head.memory.page_bytes - without.memory.page_bytes <= 16 * layer + 8 * model.hidden_size


def test_hb_22_the_share_of_windows_follows_the_model(folder: Path) -> None:
    """By the bytes of a tail against those of history, within bounds; no fraction is fixed for a size of window."""
    model = read_model_config(folder)
    shares = []
    for window in (16, 700, 20_000):
        wide = msgspec.structs.replace(model, windows=(None, window, window), context_length=30_000)
        found = planned(folder, wide, page_size=16, spec="off", max_running_requests=64)
        windows, pages = found.memory.parts["KV pool of windows"], found.memory.parts["KV pool"]
        shares.append(windows / (windows + pages))
    assert shares == pytest.approx([1 / 8, 2 * 704 / (2 * 704 + 1500), 2 / 3], abs=0.01)
