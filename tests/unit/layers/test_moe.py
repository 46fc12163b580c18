"""Experts: against a definition written token by token, in both forms, in any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hiserve.kernels import reference
from hiserve.kernels.reference import mix_experts, route
from hiserve.layers import GatedMLP, Linear, MoE, SparseExperts, StackedExperts

NUM_EXPERTS, HIDDEN, INNER = 6, 10, 7
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Router, gate and up, down."""
    return (
        randn(NUM_EXPERTS, HIDDEN, seed=1, dtype=dtype),
        randn(NUM_EXPERTS, 2 * INNER, HIDDEN, seed=2, dtype=dtype),
        randn(NUM_EXPERTS, HIDDEN, INNER, seed=3, dtype=dtype),
    )


def moe(form: str, dtype: torch.dtype, num_per_token: int, is_normalized: bool) -> MoE:
    router, gate_up, down = weights(dtype)
    experts: StackedExperts | SparseExperts = StackedExperts(gate_up, down, reference)
    if form == "sparse":
        pairs = zip(gate_up, down, strict=True)
        experts = SparseExperts([GatedMLP(Linear(mine, reference), Linear(its, reference)) for mine, its in pairs])
    return MoE(
        router=Linear(router, reference),
        experts=experts,
        num_per_token=num_per_token,
        is_normalized=is_normalized,
        ops=reference,
    )


def by_token(x: Tensor, num_per_token: int, is_normalized: bool) -> Tensor:
    """The definition, in float64."""
    router, gate_up, down = weights()
    rows = []
    for token in x.double():
        likelihood = torch.exp(router @ token) / torch.exp(router @ token).sum()
        chosen = sorted(range(NUM_EXPERTS), key=lambda expert: -likelihood[expert])[:num_per_token]
        total = sum(likelihood[expert] for expert in chosen) if is_normalized else 1.0
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert in chosen:
            gate, up = (gate_up[expert] @ token).chunk(2)
            row += likelihood[expert] / total * (down[expert] @ (gate * gate.sigmoid() * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("num_per_token", "is_normalized"), [(1, False), (2, True), (2, False), (6, True)])
def test_a_token_is_what_its_experts_make_of_it(
    form: str, dtype: torch.dtype, num_per_token: int, is_normalized: bool
) -> None:
    x = randn(9, HIDDEN, seed=4, dtype=dtype)
    got = moe(form, dtype, num_per_token, is_normalized)(x)
    assert got.dtype == dtype
    expected = by_token(x, num_per_token, is_normalized)
    torch.testing.assert_close(got.double(), expected, atol=20 * TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("form", ["joined", "dense", "sparse"])
def test_a_shared_expert_counts_by_its_gate(form: str) -> None:
    x, into, back, gate = (
        randn(*shape, seed=10 + place)
        for place, shape in enumerate(((9, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN,)))
    )
    gate_up, up = into.chunk(2)
    whole = ((x @ gate_up.T) * (x @ gate_up.T).sigmoid() * (x @ up.T)) @ back.T
    layer = moe("sparse" if form == "sparse" else "dense", torch.float64, 2, True)
    without = layer(x)
    if form == "joined":
        assert isinstance(layer.experts, StackedExperts)
        gated = replace(layer, experts=replace(layer.experts, shared=(into, back)), shared_gate=gate)
    else:
        mlp = GatedMLP(Linear(into, reference), Linear(back, reference))
        gated = replace(layer, shared=mlp, shared_gate=gate)
    expected = without + whole * torch.sigmoid(x @ gate)[:, None]
    torch.testing.assert_close(gated(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_both_forms_agree(dtype: torch.dtype, rows: int) -> None:
    x = randn(rows, HIDDEN, seed=5, dtype=dtype)
    dense, sparse = (moe(form, dtype, 2, True)(x) for form in ("dense", "sparse"))
    assert dense.shape == sparse.shape == (rows, HIDDEN)
    assert dense.dtype == sparse.dtype == dtype
    torch.testing.assert_close(dense, sparse, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_the_rest_of_the_batch_changes_a_token_by_rounding_at_most(form: str) -> None:
    x, layer = randn(40, HIDDEN, seed=6), moe(form, torch.float64, 2, True)
    whole = layer(x)
    alone = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(whole, alone, atol=1e-13, rtol=1e-13)
    turned = torch.randperm(40, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(layer(x[turned]), whole[turned], atol=1e-13, rtol=1e-13)


def test_on_the_cpu_an_expert_without_tokens_is_not_run() -> None:
    calls = []

    class Counted(GatedMLP):
        def __call__(self, x: Tensor) -> Tensor:
            calls.append(x.shape[0])
            return x

    linear = Linear(torch.zeros(1, 1), reference)
    experts = SparseExperts([Counted(linear, linear, reference) for _ in range(4)])
    out = experts(torch.ones(3, 1), torch.tensor([[0.5], [1.0], [2.0]]), torch.tensor([[1], [3], [1]]))
    assert calls == [2, 1]
    assert out[:, 0].tolist() == [0.5, 1.0, 2.0]


def test_what_an_expert_makes_of_a_token_that_is_not_its_own_never_reaches_it() -> None:
    _, gate_up, down = weights()
    gate_up[2] = float("inf")
    x, shares = randn(4, HIDDEN, seed=8), torch.ones(4, 1, dtype=torch.float64)
    out = mix_experts(x, shares, torch.tensor([[0], [1], [2], [3]]), gate_up, down)
    assert out.isfinite().all(1).tolist() == [True, True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_are_at_least_float32_and_sum_to_one_if_normalized(dtype: torch.dtype) -> None:
    logits = randn(20, NUM_EXPERTS, seed=9, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for is_normalized in (True, False):
        shares, experts = route(logits, 3, is_normalized)
        assert shares.dtype == wide
        assert experts.dtype == torch.int64
        assert torch.equal(experts.sort().values, logits.to(wide).topk(3).indices.sort().values)
        sums = shares.sum(-1)
        assert torch.allclose(sums, torch.ones_like(sums)) == is_normalized
