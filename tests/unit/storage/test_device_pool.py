"""The device pool and its layout."""

from __future__ import annotations

import msgspec
import pytest
import torch

from hiserve.cache.storage.device import DevicePool
from hiserve.core.forward import GroupedKV
from hiserve.core.kv_groups import CacheGroupSpec, CachePlan, Space

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


def test_rows_carry_rings_and_states_along_and_layers_see_all_of_their_groups() -> None:
    ring = msgspec.structs.replace(group("inputs", 2, 1), codec="inputs", space=Space.ROW, ring=5)
    state = msgspec.structs.replace(group("state", 2), codec="state", space=Space.ROW, value_dim=3)
    rare = msgspec.structs.replace(group("rare", 2, 1), codec="latent", value_dim=8, ratio=2)
    kv = msgspec.structs.replace(group("kv", 1, 1), codec="latent", value_dim=8)
    pool = DevicePool([kv, rare, ring, state], 3, PAGE, "cpu", 0, 6)
    assert pool.storage("inputs").shape == (2, 6, 5, 8) and pool.storage("state").shape == (2, 6, 2, 8, 3)
    places = (("kv", 0), ("state", 1))
    beside: tuple[tuple[tuple[str, int], ...], ...] = ((("rare", 1), ("inputs", 0)), (("inputs", 1),))
    both = pool.model_layers(CachePlan(groups=(kv, rare, ring, state), layers=places, beside=beside))
    first, second = (each for each in both if isinstance(each, GroupedKV))
    assert first.k.shape == (3 * PAGE, 1, 8) and first.beside["rare"].shape == (3 * PAGE // 2, 8)
    assert second.k.shape == (6, 2, 8, 3) and second.beside["inputs"].shape == (6, 5, 8)
    first.beside["rare"].fill_(2.0)
    second.beside["inputs"].fill_(3.0)
    assert pool.storage("rare")[1].eq(2).all() and pool.storage("inputs")[1].eq(3).all()


def test_the_first_pages_and_rows_are_cleared_and_no_others() -> None:
    groups = [
        group("kv"),
        msgspec.structs.replace(group("rows", dtype="uint8"), ratio=2),
        msgspec.structs.replace(group("swa"), space=Space.WINDOW),
        msgspec.structs.replace(group("ring"), space=Space.ROW, codec="inputs", ring=3),
    ]
    pool = DevicePool(groups, 9, PAGE, "cpu", num_window_pages=4, num_rows=5)
    for each in groups:
        pool.storage(each.name).fill_(7)
    pool.clear(6, 3)
    for name, count in (("kv", 6 * PAGE), ("rows", 6 * PAGE // 2), ("swa", 4 * PAGE)):
        storage = pool.storage(name)
        assert (storage[:, :, :count] == 0).all() and (storage[:, :, count:] == 7).all(), name
    assert (pool.storage("ring")[:, :3] == 0).all() and (pool.storage("ring")[:, 3:] == 7).all()
