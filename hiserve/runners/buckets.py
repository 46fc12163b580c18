"""The sizes for which graphs are captured."""

from __future__ import annotations

from bisect import bisect_left

# Small batches differ by much, large ones by little: at most half of a batch is padding, above 32 rows at most a third.
_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_TOKENS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Returns ascending sizes of which the last is ``max_rows``, or the largest there is if that is less."""
    return _up_to(_ROWS, max_rows)


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Likewise for tokens; larger steps keep the device busier than their launches keep the host."""
    return _up_to(_TOKENS, max_tokens)


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    if most >= sizes[-1]:
        return sizes
    return (*sizes[: bisect_left(sizes, most)], most)
