"""KV groups: bytes of a slot."""

from __future__ import annotations

import msgspec
import pytest

from hiserve.core.kv_groups import CacheGroupSpec

GROUP = CacheGroupSpec(name="kv", num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16")


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4), ("float64", 8)])
def test_a_slot_holds_key_and_value_of_every_head_and_layer(dtype: str, size: int) -> None:
    assert msgspec.structs.replace(GROUP, dtype=dtype).slot_bytes == 2 * 3 * 2 * 16 * size
