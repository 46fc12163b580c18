"""How FlashInfer splits rows of one width in a graph: what memory it asks for when it schedules them."""

from __future__ import annotations

TILES = (16, 64, 128)  # query vectors of one program


def graph_tiles(num_rows: int, width: int, group: int, num_kv_heads: int, num_programs: int) -> tuple[int, int]:
    """Returns the tiles of a KV head that a graph has room for, at most, and the query vectors of one.

    It holds for any lengths of as many tokens and rows, so FlashInfer takes the tile that suits the longest row there could be:
    all tokens but one for each other row.

    Args:
        num_rows: Rows of the graph.
        width: Tokens of each row.
        group: Query heads of a KV head.
        num_kv_heads: KV heads.
        num_programs: How many programs FlashInfer splits rows among.
    """
    longest = (num_rows * (width - 1) + 1) * group
    tile = next((tile for tile in TILES if longest <= tile), TILES[-1])
    return max(-(-num_rows * width * group // tile) + num_rows, num_programs // num_kv_heads), tile
