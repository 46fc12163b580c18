"""How a page lies off the device: every group and layer in one contiguous piece."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hiserve.core.kv_groups import CacheGroupSpec

ALIGNMENT = 64  # bytes: of every group within a page, so that kernels may read whole vectors


class PageLayout:
    """Where each piece of a page begins. A piece is the keys, or the values, of one layer.

        page    group | group | ...
        group   layer 0: keys, values | layer 1: keys, values | ...
        piece   [page_size, num_kv_heads, head_dim]

    Args:
        groups: The model's KV groups; names are unique.
        page_size: Tokens per page.

    Attributes:
        page_bytes: Bytes from one page to the next; a multiple of ``ALIGNMENT``.
        offsets: By group: int64 ``[num_layers, 2]``, bytes from the start of a page to its keys and values.
    """

    def __init__(self, groups: Sequence[CacheGroupSpec], page_size: int) -> None:
        self.groups = tuple(groups)
        self.page_size = page_size
        self.offsets: dict[str, NDArray[np.int64]] = {}
        end = 0
        for group in groups:
            assert group.name not in self.offsets, f"two KV groups are named {group.name!r}"
            planes = np.arange(2 * group.num_layers, dtype=np.int64).reshape(-1, 2)
            self.offsets[group.name] = end + planes * self.piece_bytes(group)
            end += -(-page_size * group.slot_bytes // ALIGNMENT) * ALIGNMENT
        self.page_bytes = end

    def piece_bytes(self, group: CacheGroupSpec) -> int:
        """Returns the bytes of one piece of a group."""
        return math.prod((self.page_size, group.num_kv_heads, group.head_dim)) * group.element_bytes
