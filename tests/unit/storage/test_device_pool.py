"""The device pool and its layout."""

from __future__ import annotations

import pytest
import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.core.kv_groups import CacheGroupSpec

PAGE = 4


def group(name: str, layers: int = 3, heads: int = 2, dtype: str = "float32") -> CacheGroupSpec:
    return CacheGroupSpec(name=name, num_layers=layers, num_kv_heads=heads, head_dim=8, dtype=dtype)


def test_every_layer_has_a_key_and_a_value_for_every_slot() -> None:
    layers = DevicePool([group("kv")], num_pages=5, page_size=PAGE, device="cpu").layers("kv")
    assert len(layers) == 3
    for kv in layers:
        assert kv.k.shape == kv.v.shape == (5 * PAGE, 2, 8)


def test_adjacent_pages_are_one_contiguous_view_of_a_layer() -> None:
    kv = DevicePool([group("kv")], num_pages=5, page_size=PAGE, device="cpu").layers("kv")[1]
    assert kv.k[2 * PAGE : 4 * PAGE].is_contiguous()
    assert kv.v[2 * PAGE : 4 * PAGE].is_contiguous()


def test_layers_and_planes_share_no_memory() -> None:
    layers = DevicePool([group("a"), group("b", layers=2)], 3, PAGE, "cpu")
    planes = [plane for name in ("a", "b") for kv in layers.layers(name) for plane in (kv.k, kv.v)]
    for mark, plane in enumerate(planes):
        plane.fill_(mark)
    assert [plane.unique().tolist() for plane in planes] == [[mark] for mark in range(len(planes))]


def test_groups_differ_in_shape_and_type() -> None:
    pool = DevicePool([group("kv"), group("draft", layers=1, heads=1, dtype="float64")], 3, PAGE, "cpu")
    (draft,) = pool.layers("draft")
    assert draft.k.shape == (3 * PAGE, 1, 8)
    assert draft.k.dtype == torch.float64
    assert pool.layers("kv")[0].k.dtype == torch.float32


def test_two_groups_of_one_name_are_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="'kv'"):
        DevicePool([group("kv"), group("kv")], 3, PAGE, "cpu")


def test_a_layer_takes_the_bytes_that_the_plan_counts() -> None:
    spec = group("kv")
    layers = DevicePool([spec], num_pages=5, page_size=PAGE, device="cpu").layers("kv")
    assert sum(kv.k.nbytes + kv.v.nbytes for kv in layers) == 5 * PAGE * spec.slot_bytes
