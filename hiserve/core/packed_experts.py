"""Which weights of experts stay in fewer bits on the device, and their bytes there, without torch.

``kernels.packed_weights`` has the layout.
"""

from __future__ import annotations

import msgspec

from hiserve.core.quantization import QuantSpec

GROUP = 32  # 4-bit numbers of a row with one scale
BLOCK = 128  # numbers of a row that are loaded at once; with 8 bits rows and columns that share a scale
WORDS = 16  # of a block in 4 bits
_WORD_BYTES = _WIDE_BYTES = 4
_DTYPES = ("bfloat16", "float16")  # of states whose products upcast weights


class PackedSize(msgspec.Struct, frozen=True):
    """Of the weights that stay packed."""

    num_params: int = 0
    num_bytes: int = 0  # with their scales


def stays_packed(spec: QuantSpec | None, *row_sizes: int) -> bool:
    """Whether matrices that are stored like this, with so many numbers in a row, have kernels."""
    if spec is None:
        return False
    if spec.kind == "e2m1":
        return spec.group == (1, GROUP) and all(size % GROUP == 0 for size in row_sizes)
    return spec.kind == "e4m3" and spec.group == (BLOCK, BLOCK)


def unpacks_in_tiles(device: str, dtype: str) -> bool:
    """Whether products of a device, ``cpu`` or ``cuda``, upcast weights as they read them, for states of a type."""
    return device == "cuda" and dtype in _DTYPES


def packed_bytes(spec: QuantSpec, rows: int, columns: int, num_parts: int = 1) -> int:
    """Returns the bytes of a matrix with its scales; its parts, of as many rows, begin with scales of their own."""
    blocks = -(-columns // BLOCK)
    if spec.kind == "e2m1":
        return rows * blocks * (WORDS + 1) * _WORD_BYTES
    return rows * columns + num_parts * -(-rows // num_parts // BLOCK) * blocks * _WIDE_BYTES
