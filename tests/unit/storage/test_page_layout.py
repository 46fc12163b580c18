"""Where the pieces of a page lie off the device."""

from __future__ import annotations

import pytest

from hiserve.cache.storage.segment import ALIGNMENT, PageLayout
from hiserve.core.kv_groups import CacheGroupSpec


def group(name: str, layers: int = 3, heads: int = 2, dim: int = 8, dtype: str = "float32") -> CacheGroupSpec:
    return CacheGroupSpec(name=name, num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=dtype)


def test_keys_and_values_of_a_layer_follow_each_other() -> None:
    layout = PageLayout([group("kv")], page_size=4)
    assert layout.piece_bytes(group("kv")) == 4 * 2 * 8 * 4
    assert layout.offsets["kv"].tolist() == [[0, 256], [512, 768], [1024, 1280]]
    assert layout.page_bytes == 4 * group("kv").slot_bytes


def test_a_row_that_is_key_and_value_lies_there_once() -> None:
    latent = CacheGroupSpec(
        name="kv", num_layers=3, num_kv_heads=1, head_dim=10, dtype="float32", codec="latent", value_dim=6
    )
    layout = PageLayout([latent], page_size=4)
    assert layout.offsets["kv"].tolist() == [[0], [160], [320]]
    assert latent.slot_bytes == 3 * 10 * 4
    assert layout.page_bytes == 512  # 480, aligned


def test_groups_begin_aligned_and_do_not_overlap() -> None:
    odd = group("odd", layers=1, heads=1, dim=3, dtype="float16")
    tail = group("tail", layers=1, heads=1, dim=5, dtype="float64")
    layout = PageLayout([odd, group("kv"), tail], page_size=1)
    assert layout.offsets["kv"][0, 0] == ALIGNMENT
    assert layout.offsets["tail"][0, 0] == ALIGNMENT + group("kv").slot_bytes
    assert layout.page_bytes == layout.offsets["tail"][0, 0] + 2 * ALIGNMENT
    assert layout.page_bytes % ALIGNMENT == 0


def test_two_groups_of_one_name_are_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="'kv'"):
        PageLayout([group("kv"), group("kv")], page_size=4)
