"""The activation of a gated MLP, without torch: constants of one formula, which kernels compile in."""

from __future__ import annotations

import math
from typing import NamedTuple


class Activation(NamedTuple):
    """``gate * sigmoid(slope * gate * (1 + cubic * gate**2)) * (up + shift)``.

    ``gelu`` with ``tanh`` is of this form, because ``(1 + tanh(u)) / 2`` is ``sigmoid(2 * u)``.

    Attributes:
        slope: Factor of the sigmoid's argument.
        cubic: Factor of its cubic term.
        shift: Added to ``up``.
        limit: ``gate`` is at most this, ``up`` at most this and at least its negative; None is no limit.
    """

    slope: float = 1.0
    cubic: float = 0.0
    shift: float = 0.0
    limit: float | None = None


SILU = Activation()
GELU_TANH = Activation(slope=math.sqrt(8 / math.pi), cubic=0.044715)
