"""Rows of numbers in 8 bits: how many bytes they take, and where these lie in a page."""

from __future__ import annotations

from typing import NamedTuple

LEAST_TILE, MOST_TILE = 8, 64  # numbers of a scale in a row; with fewer, scales would take more than an eighth of it
MOST_TILES = 8  # of a row; the scales of all but one are 8 bytes at most, which kernels read at once
WIDE_SCALE_BYTES = 4  # float32
LATENT_SCALES = 4  # of a latent, which kernels read at once
PACKED_CAPABILITY = (8, 9)  # the least of a GPU with instructions for E4M3


class PackedShape(NamedTuple):
    """Numbers of a row: those in 8 bits (E4M3), in tiles that have a scale each, then those in bfloat16.

    A page keeps the numbers of all its rows, then their scales. Where tiles have several float32 scales, the numbers of the first half
    of them and those of the second lie in turns.

    Attributes:
        scaled: Numbers in 8 bits, a multiple of ``tile``.
        plain: Numbers in bfloat16.
        tile: Numbers of a scale, a power of 2.
        has_wide_scales: Scales are float32; else powers of 2, of which a byte keeps the exponent plus 127.
    """

    scaled: int
    plain: int
    tile: int
    has_wide_scales: bool = False

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.scaled + self.plain

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's numbers."""
        return self.scaled + 2 * self.plain

    @property
    def num_tiles(self) -> int:
        """Scales of a row."""
        return self.scaled // self.tile

    @property
    def has_pairs(self) -> bool:
        """Whether the numbers of two halves lie in turns."""
        return self.has_wide_scales and self.num_tiles > 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales; those of one byte are filled up with zeros to a multiple of 8, as a row of V4 has it."""
        return WIDE_SCALE_BYTES * self.num_tiles if self.has_wide_scales else -(-self.num_tiles // 8) * 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.value_bytes + self.scale_bytes


class PackedPages(NamedTuple):
    """How memory of bytes holds packed rows: pages of ``page_rows * shape.row_bytes`` bytes, one after the other."""

    shape: PackedShape
    page_rows: int


PACKED_V4 = PackedShape(448, 64, 64)
"""A row of DeepSeek-V4, 584 bytes."""


LEAST_EXPONENT = -15  # of the scale of a head: with it products of 8-bit numbers and scales are exact in float16 too
HEAD_MULTIPLE = 16  # elements: rows of packed heads begin at a multiple of 16 bytes, as the copy engine needs it


def scale_words(num_kv_heads: int) -> int:
    """Returns the words of 4 bytes that keep the scales of a token's keys and values, of two heads each.

    Bytes are the exponents of powers of 2, plus 127: of a key, of its value, and so on. Kernels load a word at once.
    """
    return (num_kv_heads + 1) // 2


def packed_heads_bytes(num_kv_heads: int, head_dim: int) -> int | None:
    """Returns the bytes of the packed keys and values of a token in a layer; None if heads of this size cannot be packed."""
    if head_dim % HEAD_MULTIPLE:
        return None
    return 2 * num_kv_heads * head_dim + 4 * scale_words(num_kv_heads)


def packed_row(width: int, rope_dim: int) -> PackedShape | None:
    """Returns a row whose last ``rope_dim`` numbers, which are rotated, stay in bfloat16; each tile has as many.

    None if these are no power of 2 between 8 and 64, or do not fill the row, or are all of it, or less than an eighth.
    """
    is_tile = LEAST_TILE <= rope_dim <= MOST_TILE and not rope_dim & (rope_dim - 1)
    if not is_tile or width % rope_dim or not 2 <= width // rope_dim <= MOST_TILES:
        return None
    return PackedShape(width - rope_dim, rope_dim, rope_dim)


def packed_latent(rank: int, rope_dim: int) -> PackedShape | None:
    """Returns the row of a latent of ``rank`` numbers, which has four scales, and of a rotated key, which stays in bfloat16.

    None if ``rank`` is no power of 2, or so small that scales would take more than half of it. Of 512 and 64 numbers it has 656 bytes.
    """
    tile = rank // LATENT_SCALES
    return PackedShape(rank, rope_dim, tile, True) if tile >= LEAST_TILE and not rank & (rank - 1) else None


def packed_key(width: int) -> PackedShape | None:
    """Returns a key of an index, all of whose numbers have one scale; None if these are no power of 2."""
    return PackedShape(width, 0, width, True) if width >= LEAST_TILE and not width & (width - 1) else None
