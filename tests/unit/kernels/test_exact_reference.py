"""Operations of ``--exact`` on a CPU: a row has the same bits alone and beside others, whatever threads share the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from hiserve.core.activation import GELU_TANH, SILU, Activation
from hiserve.kernels.ops import ops_for

NUM_ROWS, SIZE = 333, 264  # more elements than one thread takes, in parts that are no multiple of a vector's
CUTS = ((0, 1), (5, 6), (7, 20), (100, 333), (332, 333))
EXACT = ops_for(torch.device("cpu"), is_exact=True)
ACTIVATIONS = (SILU, GELU_TANH, Activation(slope=1.7, limit=7.0, shift=1.0))
FREQUENCIES = torch.linspace(0.001, 1, SIZE)
GATE = torch.linspace(-0.1, 0.2, 2 * SIZE)
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"act_{i}": partial(EXACT.act_mul, activation=each) for i, each in enumerate(ACTIVATIONS)},
    "act_inputs": partial(EXACT.act_inputs, activation=SILU, reader=None),
    "the gate of a shared expert": lambda x: EXACT.route(x, 4, True, (x, GATE.to(x.dtype)))[0],
    "rms_norm": lambda x: EXACT.rms_norm(x, torch.full(x.shape[1:], 1.5, dtype=x.dtype), 1e-6),
    "route": lambda x: EXACT.route(x, 4, True)[0],
    "rotations": lambda x: EXACT.rotations((x[:, 0].abs() * 1e4).long(), FREQUENCIES, 1.0, torch.float32)[1],
}


@pytest.fixture
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_row_has_the_same_bits_beside_others_and_alone(operation: str, dtype: torch.dtype) -> None:
    compute, x = OPERATIONS[operation], torch.randn((NUM_ROWS, 2 * SIZE), generator=torch.Generator().manual_seed(3))
    x = x.to(dtype)
    together = compute(x)
    for first, end in CUTS:
        assert torch.equal(compute(x[first:end].clone()), together[first:end])
    assert compute(x[:0]).shape[0] == 0
