"""The plain kernels against definitions written another way."""

from __future__ import annotations

import itertools

import pytest
import torch

from hiserve.core.activation import GELU_TANH, Activation
from hiserve.core.forward import LayerKV
from hiserve.kernels.reference import (
    act_mul,
    add_rms_norm,
    is_last_loc_legal,
    is_table_owned,
    last_loc,
    rms_norm,
    rope,
    rotate_and_store,
    store_kv,
)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_gives_unit_root_mean_square_times_the_weight(dtype: torch.dtype) -> None:
    x, weight = randn(5, 3, 32, dtype=dtype) * 10, randn(32, dtype=dtype)
    out = rms_norm(x, weight, 1e-6)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_rms_norm_of_sixteen_bit_inputs_is_computed_in_float32_and_rounded_once_before_the_weight() -> None:
    x, weight = randn(64, 256, dtype=torch.bfloat16) * 3, randn(256, dtype=torch.bfloat16)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), normed.bfloat16() * weight)
    narrow = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    assert not torch.equal(narrow, normed.bfloat16() * weight), "16-bit arithmetic would have passed too"


def test_rope_rotates_each_pair_by_its_angle() -> None:
    x, angles = randn(6, 3, 8, dtype=torch.float64), randn(6, 4, dtype=torch.float64)
    cos = torch.cat((angles.cos(), angles.cos()), -1).unsqueeze(1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).unsqueeze(1)
    got = rope(x, cos, sin)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles).unsqueeze(1)
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1))
    assert rope(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_what_is_added_to_the_residual_stays_there_and_is_normed() -> None:
    delta, residual, weight = randn(4, 16), randn(4, 16) * 3, randn(16)
    total = delta + residual
    assert torch.equal(add_rms_norm(delta, residual, weight, 1e-6), rms_norm(total, weight, 1e-6))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("has_norm", [True, False])
def test_queries_and_keys_are_normed_then_rotated_and_values_are_neither(has_norm: bool) -> None:
    qkv, weight, angles = randn(3, 8, 4), randn(6, 4), randn(3, 1, 2)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    kv, slots = LayerKV(k=torch.zeros(8, 2, 4), v=torch.zeros(8, 2, 4)), torch.tensor([6, 1, 4])
    q, k, v = rotate_and_store(qkv.clone(), weight if has_norm else None, 1e-6, cos, sin, kv, slots)
    heads = [rms_norm(qkv[:, head], weight[head], 1e-6) if has_norm else qkv[:, head] for head in range(6)]
    rotated = rope(torch.stack(heads, 1), cos, sin)
    assert torch.equal(torch.cat((q, k), 1), rotated)
    assert torch.equal(v, qkv[:, 6:])
    assert torch.equal(kv.k[slots], k)
    assert torch.equal(kv.v[slots], v)


def test_an_activation_takes_the_gate_first() -> None:
    gate_up = randn(7, 20)
    gate, up = gate_up[:, :10], gate_up[:, 10:]
    torch.testing.assert_close(act_mul(gate_up.clone()), gate * gate.sigmoid() * up)


def test_gelu_by_tanh_is_one_of_the_activations() -> None:
    gate_up = randn(7, 20, dtype=torch.float64) * 4
    expected = torch.nn.functional.gelu(gate_up[:, :10], approximate="tanh") * gate_up[:, 10:]
    torch.testing.assert_close(act_mul(gate_up, GELU_TANH), expected, atol=1e-14, rtol=1e-14)
    general = GELU_TANH._replace(limit=1e9)  # by the formula that has no case of its own
    torch.testing.assert_close(act_mul(gate_up, general), expected, atol=1e-14, rtol=1e-14)


def test_a_limited_activation_cuts_the_gate_above_and_up_on_both_sides() -> None:
    gate, up = torch.tensor([-9.0, 9.0, 1.0, 2.0, -1.0]), torch.tensor([1.0, 9.0, -9.0, 0.5, 0.0])
    cut_gate, cut_up = torch.tensor([-9.0, 7.0, 1.0, 2.0, -1.0]), torch.tensor([1.0, 7.0, -7.0, 0.5, 0.0])
    got = act_mul(torch.cat((gate, up))[None], Activation(slope=1.702, shift=1.0, limit=7.0))[0]
    torch.testing.assert_close(got, (cut_up + 1) * cut_gate * torch.sigmoid(1.702 * cut_gate))


def test_a_wider_norm_weight_is_multiplied_before_the_one_rounding() -> None:
    x, weight = randn(64, 256, dtype=torch.bfloat16) * 3, 1 + randn(256) / 300
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), (normed * weight).bfloat16())
    assert not torch.equal(normed.bfloat16() * weight.bfloat16(), (normed * weight).bfloat16())


def test_store_kv_writes_its_slots_and_no_other() -> None:
    kv = LayerKV(k=torch.zeros(8, 2, 4), v=torch.zeros(8, 2, 4))
    k, v, slots = randn(3, 2, 4), randn(3, 2, 4) + 9, torch.tensor([6, 1, 4])
    store_kv(kv, slots, k, v)
    assert torch.equal(kv.k[slots], k)
    assert torch.equal(kv.v[slots], v)
    assert not kv.k[[0, 2, 3, 5, 7]].any()


@pytest.mark.parametrize("page_size", [1, 4])
def test_last_loc_is_the_slot_of_the_last_computed_token(page_size: int) -> None:
    table = torch.tensor([[5, 2, 7], [9, 3, 1]], dtype=torch.int32)
    for row, computed in itertools.product(range(2), range(3 * page_size + 1)):
        lengths = torch.zeros(2, dtype=torch.int64)
        lengths[row] = computed
        place = computed - 1
        expected = -1 if computed == 0 else int(table[row, place // page_size]) * page_size + place % page_size
        assert last_loc(table, lengths, page_size)[row].item() == expected


def test_last_loc_of_a_row_longer_than_its_table_stays_inside_the_table() -> None:
    assert last_loc(torch.tensor([[5, 2]], dtype=torch.int32), torch.tensor([1000]), 4).shape == (1,)


def test_legal_last_locs_are_none_or_a_slot_past_the_sink_that_agrees_with_the_length() -> None:
    page_size, num_pages = 4, 3
    for location, computed in itertools.product(range(-3, 16), range(10)):
        expected = location == -1 or (4 <= location <= 11 and (location + 1) % 4 == computed % 4)
        got = is_last_loc_legal(torch.tensor([location]), torch.tensor([computed]), page_size, num_pages * page_size)
        assert got.item() == expected, (location, computed)


def test_a_table_is_owned_only_if_every_entry_in_use_is() -> None:
    page_owner = torch.tensor([0, 7, 7, 8, -1], dtype=torch.int32)
    table = torch.tensor([[1, 2, 3]], dtype=torch.int32)

    def owned(owners: list[int], kv_len: int) -> bool:
        return bool(
            is_table_owned(table, torch.tensor([owners], dtype=torch.int32), page_owner, torch.tensor([kv_len]), 4)
        )

    assert owned([7, 7, 8], 12)
    assert not owned([6, 7, 8], 12)
    assert not owned([7, 7, 7], 9)
    assert owned([7, 7, 7], 8), "the third entry is not in use"
    assert not owned([7, 6, 8], 5)


def test_an_entry_never_written_is_not_owned() -> None:
    """Cleared entries are page 0 with no owner; the sink has one, so that they differ."""
    page_owner = torch.tensor([0, -1], dtype=torch.int32)
    cleared = torch.zeros((1, 1), dtype=torch.int32)
    assert not is_table_owned(cleared, torch.full_like(cleared, -1), page_owner, torch.tensor([1]), 4)
