"""How the weights of a projection are stored in fewer bits, without torch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from hiserve.core.name_patterns import name_pattern

_SCALE_BYTES = {8: 4, 4: 2}  # of a scale on the device, by the bits of a value
TILE_ROWS = 64  # rows of a tile of 4-bit codes
_MAX_HALF = 64


class QuantSpec(msgspec.Struct, frozen=True):
    """The storage of a weight ``[rows, columns]``, and the type of the inputs of its products.

    Attributes:
        bits: Of a stored value.
        kind: What the bits are. ``e4m3`` (FP8) and ``e2m1`` (FP4) are numbers with a sign, exponent and mantissa (OCP
            Microscaling Formats, 2023). ``int`` is 0 to 15 less 8, ``uint`` is 0 to 15 less a zero point of the group.
        group: Rows and columns that share a scale; 0 is all of them. ``(0, 0)`` is one scale for the weight, ``(1, 0)`` one
            for each output, ``(128, 128)`` one for each block, ``(1, 128)`` one for each 128 inputs of an output.
        activations: ``token``: inputs of many rows may be rounded to the weight's kind, with a scale for each token.
            ``none``: they keep their type.
    """

    bits: Literal[8, 4]
    kind: Literal["e4m3", "e2m1", "int", "uint"]
    group: tuple[int, int]
    activations: Literal["none", "token"] = "none"

    @property
    def half_tile(self) -> int:
        """Bytes of a row in a tile of 4-bit codes, each of which holds two of them: a group of columns, or half of one."""
        return min(self.group[1], _MAX_HALF)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Returns the bytes that a weight takes on the device, with its scales and zero points, in whole tiles."""
        of_rows, of_columns = self.group
        # A scale for the whole weight is kept for each row, as others are.
        num_scales = -(-rows // max(1, of_rows)) * -(-columns // (of_columns or columns))
        beside = num_scales * (_SCALE_BYTES[self.bits] + (1 if self.kind == "uint" else 0))
        if self.bits == 8:
            return rows * columns + beside
        return -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // (2 * self.half_tile)) * self.half_tile + beside


class Quantization(msgspec.Struct, frozen=True):
    """How a checkpoint, or the server that loads one, quantizes a model.

    Attributes:
        method: As config.json names the format; ``made`` if weights are quantized when they are loaded.
        linears: Of projections; None if they are not quantized.
        experts: Of experts, likewise.
        ignored: Modules that are left as they are: names, parts of names between dots, patterns with ``*``, or after
            ``re:`` regular expressions (``core.name_patterns``). Which these are the tensors of a checkpoint say; without them this counts.
    """

    method: str
    linears: QuantSpec | None
    experts: QuantSpec | None
    ignored: tuple[str, ...] = ()

    def is_ignored(self, module: str) -> bool:
        """Whether a module is left as it is; ``module`` is the name of a tensor without its last part."""
        for pattern in self.ignored:
            if pattern.startswith("re:"):
                found = name_pattern(pattern.removeprefix("re:")).matches_start(module)
            elif "*" in pattern:
                found = fnmatchcase(module, pattern) or fnmatchcase(module, pattern + ".*")
            else:
                found = f".{pattern}." in f".{module}."
            if found:
                return True
        return False
