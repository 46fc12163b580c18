"""The memory that FlashInfer's schedules share, and the part of it that rows of one width in a graph need."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.attention.base import AttentionShape

TILES = (16, 64, 128)  # query vectors of one program


class Workspace:
    """Memory that all schedules share, since their kernels run in sequence."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.device = device  # a CUDA device
        # Programs among which FlashInfer splits rows.
        self.num_programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self._shape = shape
        self._partials = torch.empty(0, dtype=torch.uint8, device=device)
        self._indices = torch.empty(0, dtype=torch.int32, device=device)

    def partials(self, num_tiles: int, tile: int) -> Tensor:
        """Returns memory for intermediate results of programs that share a row.

        ``num_tiles`` counts programs times the query heads that each computes; ``tile`` is the query vectors of one.
        """
        num_bytes = 4 * num_tiles * tile * (self._shape.head_dim + 1) + 4096  # float32; a weight with each vector
        if self._partials.numel() < num_bytes:
            self._partials = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)  # FlashInfer asks for zeros
        return self._partials

    def indices(self, count: int) -> Tensor:
        """Returns memory for the lists of pages of a graph, int32 ``[count]``."""
        if self._indices.numel() < count:
            self._indices = torch.empty(count, dtype=torch.int32, device=self.device)
        return self._indices[:count]


def graph_tiles(num_rows: int, width: int, group: int, num_kv_heads: int, num_programs: int) -> tuple[int, int]:
    """Returns the most tiles of a KV head in a graph, and the query vectors of a tile.

    They hold for any lengths with the same numbers of tokens and rows, so FlashInfer chooses the tile for the longest
    possible row: all tokens but one for each other row. ``group`` is the query heads of a KV head; ``num_programs``
    those among which FlashInfer splits rows.
    """
    longest = (num_rows * (width - 1) + 1) * group
    tile = next((tile for tile in TILES if longest <= tile), TILES[-1])
    return max(-(-num_rows * width * group // tile) + num_rows, num_programs // num_kv_heads), tile
