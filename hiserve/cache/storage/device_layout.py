"""How a KV group lies in device memory."""

from __future__ import annotations

from torch import Tensor

from hiserve.core.forward import LayerKV
from hiserve.core.kv_groups import CacheGroupSpec


def storage_shape(group: CacheGroupSpec, num_pages: int, page_size: int) -> tuple[int, ...]:
    """Returns ``(num_layers, 2, num_slots, num_kv_heads, head_dim)``: layer-major, keys then values.

    Layer-major makes the slots of adjacent pages adjacent within a layer, so that a row whose
    pages are adjacent is one contiguous view there: CPU attention reads it without a gather.
    """
    return (group.num_layers, 2, num_pages * page_size, group.num_kv_heads, group.head_dim)


def layer_views(storage: Tensor) -> tuple[LayerKV, ...]:
    """Returns the keys and values of each layer of a group, as views of its storage."""
    return tuple(LayerKV(k=planes[0], v=planes[1]) for planes in storage)
