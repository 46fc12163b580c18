"""The activation between the products of an MLP, within kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """``core.activation`` of values in float32 or wider; the gate's part is rounded to ``dtype``."""
    if ACTIVATION.limit is not None:
        keep: tl.constexpr = tl.PropagateNan.ALL
        gate = tl.minimum(gate, ACTIVATION.limit, propagate_nan=keep)
        up = tl.minimum(up, ACTIVATION.limit, propagate_nan=keep)
        up = tl.maximum(up, -ACTIVATION.limit, propagate_nan=keep)
    inner = gate
    if ACTIVATION.cubic != 0.0:
        inner = gate * (1.0 + ACTIVATION.cubic * gate * gate)
    if ACTIVATION.slope != 1.0:
        inner = inner * ACTIVATION.slope
    gate = (gate / (1.0 + tl.exp(-inner))).to(dtype).to(gate.dtype)
    if ACTIVATION.shift != 0.0:
        up = up + ACTIVATION.shift
    return gate * up
