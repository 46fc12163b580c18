"""The groups of keys and values that grouped-query attention stores, without torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hiserve.core.kv_groups import CacheGroupSpec, CachePlan, Space, pack_heads
from hiserve.core.row_shapes import packed_heads_bytes
from hiserve.core.step_memory import StoredBytes

WINDOW = "swa"  # layers with a window, if these have pages of their own


def heads_plan(kv: CacheGroupSpec, windows: Sequence[int | None], *, frees_windows: bool) -> CachePlan:
    """Returns the groups of all layers; ``kv`` is that of layers without windows, ``windows`` has an entry for each layer."""
    if not frees_windows:
        return CachePlan(groups=(kv,), layers=tuple((kv.name, index) for index in range(kv.num_layers)))
    layers, counts = list[tuple[str, int]](), {kv.name: 0, WINDOW: 0}
    for window in windows:
        name = kv.name if window is None else WINDOW
        layers.append((name, counts[name]))
        counts[name] += 1
    groups = (
        msgspec.structs.replace(kv, num_layers=counts[kv.name]),
        msgspec.structs.replace(kv, name=WINDOW, num_layers=counts[WINDOW], space=Space.WINDOW),
    )
    return CachePlan(groups=groups, layers=tuple(layers), window=max(each for each in windows if each is not None))


def packed_plan(plan: CachePlan) -> CachePlan:
    """Returns a plan whose keys and values are packed."""
    return msgspec.structs.replace(plan, groups=pack_heads(plan.groups))


def packed_bytes(num_layers: int, num_windows: int, num_kv_heads: int, head_dim: int) -> StoredBytes | None:
    """Returns bytes of packed keys and values; None if heads of this size cannot be packed.

    Args:
        num_layers: Layers with attention.
        num_windows: Of these, layers that have a window where others have none.
        num_kv_heads: KV heads.
        head_dim: Elements of a head.
    """
    row = packed_heads_bytes(num_kv_heads, head_dim)
    return None if row is None else StoredBytes(token=num_layers * row, window=num_windows * row)
