"""Gates of attention among the rows of its projection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hiserve.core.forward import LayerKV
from hiserve.kernels import reference
from hiserve.layers import Linear, Rotation, SelfAttention
from hiserve.models.gated_attention import GatedSelfAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, NUM_TOKENS = 4, 2, 8, 6, 3


class Echo:
    """Attention whose outputs are its queries."""

    def forward(self, q: torch.Tensor, *_: Any) -> torch.Tensor:
        return q


def test_gates_take_part_in_outputs_and_in_nothing_that_is_stored() -> None:
    """A draft head that only updates its cache stores without attending."""
    generator = torch.Generator().manual_seed(4)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    num_qkv = NUM_HEADS + 2 * NUM_KV_HEADS
    weight, norms = randn((num_qkv + NUM_HEADS) * HEAD_DIM, HIDDEN), randn(NUM_HEADS + NUM_KV_HEADS, HEAD_DIM)
    x, angles = randn(NUM_TOKENS, HIDDEN), randn(NUM_TOKENS, 1, HEAD_DIM)
    shape: dict[str, Any] = {"layer": 0, "out": Linear(x, reference), "qk_weight": norms, "eps": 1e-6}
    shape |= {"head_dim": HEAD_DIM, "ops": reference}
    plain = SelfAttention(qkv=Linear(weight[: num_qkv * HEAD_DIM], reference), **shape)
    gated = GatedSelfAttention(qkv=Linear(weight, reference), num_heads=NUM_HEADS, **shape)
    inputs: Any = SimpleNamespace(slots=torch.arange(1, NUM_TOKENS + 1), window_slots=None)
    pools = [LayerKV(*torch.zeros(2, 9, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float64)) for _ in range(3)]
    given = inputs, Rotation(angles, angles)
    expected = plain.store(x, *given, pools[0])
    for ours, its in zip(gated.store(x, *given, pools[1]), expected, strict=True):
        torch.testing.assert_close(ours, its)
    echo: Any = Echo()
    gates = (x @ weight[num_qkv * HEAD_DIM :].T).sigmoid()
    torch.testing.assert_close(gated(x, *given, pools[2], echo), expected[0].flatten(1) * gates)
    for pool in pools[1:]:
        torch.testing.assert_close(pool.k, pools[0].k)
        torch.testing.assert_close(pool.v, pools[0].v)
