"""The memory that FlashInfer asks for when it schedules rows of one width in a graph."""

from __future__ import annotations

import pytest

from hiserve.attention.flashinfer_memory import graph_tiles

NUM_PROGRAMS = 264  # of an H200


@pytest.mark.parametrize(
    ("num_rows", "width", "asked"),
    [
        (32, 4, 73_400_320),  # what it asked for there, in the words of its error
        (8, 4, 0),
        (1, 8, 0),
        (256, 8, 0),
    ],
)
def test_there_is_room_for_what_it_asks(num_rows: int, width: int, asked: int) -> None:
    """By its own rule: a tile for the longest row there could be; of each row the last may be filled in part."""
    num_heads, num_kv_heads, head_dim = 32, 8, 128
    group = num_heads // num_kv_heads
    longest = (num_rows * width - num_rows + 1) * group
    tile = 128 if longest > 64 else 64 if longest > 16 else 16
    tiles = max(-(-num_rows * width * group // tile) + num_rows - 1, NUM_PROGRAMS // num_kv_heads)
    ours, our_tile = graph_tiles(num_rows, width, group, num_kv_heads, NUM_PROGRAMS)
    assert our_tile == tile and tiles <= ours <= tiles + 1
    assert asked in (0, 4 * tiles * num_heads * tile * head_dim)
