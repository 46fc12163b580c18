"""The gated delta rule in Triton; ``kernels.delta`` is its twin."""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.core.forward import ForwardInputs
from hiserve.kernels import delta as twin
from hiserve.kernels.delta import DeltaPools, DeltaShape, DeltaWeights, row_groups
from hiserve.kernels.delta_chunks import solve_chunks
from hiserve.kernels.delta_inputs import make_inputs
from hiserve.kernels.delta_scan import scan_chunks
from hiserve.kernels.delta_step import advance

_MIN_HEAD = 16  # elements; a power of 2
_IN_CHUNKS = (torch.bfloat16, torch.float16)
"""Types whose prompts are computed chunk by chunk, with sums in float32. Otherwise each token has the same operations, whatever the step."""


def delta(
    mixed: Tensor, gates: Tensor, weights: DeltaWeights, pools: DeltaPools, inputs: ForwardInputs, shape: DeltaShape
) -> Tensor:
    """Like ``delta.delta``; rows of ``mixed`` and ``gates`` may lie apart. Heads of odd sizes use the twin."""
    if any(size & (size - 1) or size < _MIN_HEAD for size in (shape.key_dim, shape.value_dim)):
        return twin.delta(mixed, gates, weights, pools, inputs, shape)
    assert inputs.state is not None, "a batch without states"
    assert mixed.stride(1) == gates.stride(1) == 1, f"elements {mixed.stride()} and {gates.stride()} apart"
    groups, num_tokens = row_groups(inputs), mixed.shape[0]
    in_chunks = mixed.dtype in _IN_CHUNKS and pools.wide == torch.float32
    out = mixed.new_empty((num_tokens, shape.num_value_heads, shape.value_dim))
    if not groups:
        out.zero_()
    for group in groups:
        rows, indptr = inputs.state.cut(group.first, group.end), inputs.qo_indptr[group.first : group.end + 1]
        until = num_tokens if group is groups[-1] else 0
        made = make_inputs(
            mixed,
            gates,
            weights,
            pools,
            rows,
            indptr,
            shape,
            width=group.width,
            dtype=mixed.dtype if in_chunks and group.is_long else pools.wide,
            is_packed=group.is_long,
        )
        if in_chunks and group.is_long:
            solved = solve_chunks(made, rows, indptr, num_tokens=num_tokens, width=group.width)
            scan_chunks(made, solved, mixed, gates, pools, rows, indptr, out, until)
        else:
            advance(made, mixed, gates, pools, rows, indptr, out, until)
    return out
