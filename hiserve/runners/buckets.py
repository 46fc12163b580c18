"""The sizes for which graphs are captured."""

from __future__ import annotations

from bisect import bisect_left

# Small batches differ by much, large ones by little: at most half of a batch is padding, above 32 rows at most a third.
_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Of some hundreds of tokens the device computes every one that pads: above 256 at most a fifth of a step is padding.
_SMALL_TOKENS, _LARGE_TOKENS = (8, 16, 32, 64, 96, 128, 192), (768, 896, 1024, 1280, 1536, 1792, 2048)
_MIXED_TOKENS = (64, *range(128, 513, 64))
_TOKENS = (*_SMALL_TOKENS, *range(256, 641, 64), *_LARGE_TOKENS)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Returns ascending sizes of which the last is ``max_rows``, or the largest there is if that is less."""
    return _up_to(_ROWS, max_rows)


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Likewise for tokens; larger steps keep the device busier than their launches keep the host."""
    return _up_to(_TOKENS, max_tokens)


def mixed_buckets(max_tokens: int) -> tuple[int, ...]:
    """Likewise for tokens of steps that are one graph: larger ones are not bound by their launches."""
    return _up_to(_MIXED_TOKENS, max_tokens)


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    if most >= sizes[-1]:
        return sizes
    return (*sizes[: bisect_left(sizes, most)], most)
