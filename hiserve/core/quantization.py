"""How the weights of a projection are stored in fewer bits, without torch."""

from __future__ import annotations

from typing import Literal

import msgspec


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


class Quantization(msgspec.Struct, frozen=True):
    """How a checkpoint, or the server that loads one, quantizes a model.

    Which weights it leaves as they are, the tensors of the checkpoint say: embedding, output head, norms and routers.

    Attributes:
        method: As config.json names the format; ``made`` if weights are quantized when they are loaded.
        linears: Of projections; None if they are not quantized.
        experts: Of experts, likewise.
    """

    method: str
    linears: QuantSpec | None
    experts: QuantSpec | None
