"""KV groups: bytes of a slot and of a page."""

from __future__ import annotations

import msgspec
import pytest

from hiserve.core.groups import CacheGroupSpec, page_bytes

GROUP = CacheGroupSpec(name="kv", num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16")


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4), ("float64", 8)])
def test_a_slot_holds_key_and_value_of_every_head_and_layer(dtype: str, size: int) -> None:
    assert msgspec.structs.replace(GROUP, dtype=dtype).slot_bytes == 2 * 3 * 2 * 16 * size


def test_a_page_holds_its_slots_of_every_group() -> None:
    small = msgspec.structs.replace(GROUP, name="draft", num_layers=1)
    assert page_bytes((GROUP, small), 8) == 8 * (384 + 128)
