"""The memory that FlashInfer requests when it schedules rows of one width in a graph."""

from __future__ import annotations

TILES = (16, 64, 128)  # query vectors of one program


def graph_tiles(num_rows: int, width: int, group: int, num_kv_heads: int, num_programs: int) -> tuple[int, int]:
    """Returns the most tiles of a KV head in a graph, and the query vectors of a tile.

    They hold for any lengths with the same numbers of tokens and rows, so FlashInfer chooses the tile for the longest
    possible row: all tokens but one for each other row. ``group`` is the query heads of a KV head; ``num_programs``
    those among which FlashInfer splits rows.
    """
    longest = (num_rows * (width - 1) + 1) * group
    tile = next((tile for tile in TILES if longest <= tile), TILES[-1])
    return max(-(-num_rows * width * group // tile) + num_rows, num_programs // num_kv_heads), tile
