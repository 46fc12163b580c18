"""The gated delta rule in torch: against its definition and transformers' layer, whatever chunks, drafts and snapshots."""

from __future__ import annotations

import importlib
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hiserve.core.step_memory import DELTA_CHUNK
from hiserve.kernels.delta import DeltaShape, DeltaWeights
from hiserve.models.delta_config import DeltaConfig
from tests.helpers.delta_cases import (
    SHAPE,
    TAPS,
    Chunk,
    Layer,
    batch_of,
    nan_pools,
    plain,
    random_inputs,
    random_weights,
)

F64 = torch.float64


def new_layer(ring: int, *, dtype: torch.dtype = F64, shape: DeltaShape = SHAPE, num_slots: int = 4) -> Layer:
    return Layer(random_weights(shape, dtype), nan_pools(5, ring, num_slots, shape, dtype), shape)


def generate(layer: Layer, inputs: Tensor, rng: random.Random, max_q: int, *, row: int = 1, start: int = 0) -> Tensor:
    """Feeds a row's inputs in chunks, and as drafts, of which some are the true next inputs and the others noise.

    Returns the outputs of the accepted tokens. As in an engine, the state lags by the drafts of the step before.
    """
    computed = state_len = start
    outs: list[Tensor] = []
    while computed < len(inputs):
        is_chunk = rng.random() < 0.3
        num_new = rng.randint(1, 13) if is_chunk else rng.randint(1, max_q)
        true = inputs[computed : computed + num_new]
        num_draft = 0 if is_chunk else len(true) - 1
        num_right = rng.randint(0, num_draft)
        fed = true.clone()
        fed[len(true) - num_draft + num_right :] = random_inputs(num_draft - num_right, layer.shape, inputs.dtype)
        (out,) = layer.step([Chunk(row, computed, state_len, fed, num_draft)])
        num_kept = len(true) - num_draft + num_right
        outs.append(out[:num_kept])
        state_len = computed + len(true) - num_draft
        computed += num_kept
    return torch.cat(outs)


def test_a_token_at_a_time_it_is_the_rule_as_written() -> None:
    torch.manual_seed(1)
    layer, inputs = new_layer(TAPS - 1), random_inputs(20, SHAPE, F64)
    wanted, states = plain(inputs, layer.weights, SHAPE)
    for token in range(20):
        (out,) = layer.step([Chunk(1, token, token, inputs[token : token + 1])])
        assert_close(out[0], wanted[token], rtol=1e-12, atol=1e-13)
        assert_close(layer.pools.state[1], states[token], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("max_q", [1, 2, 3, 6])
def test_chunks_and_rejected_drafts_change_no_bit_with_the_least_ring(max_q: int) -> None:
    torch.manual_seed(max_q)
    layer = new_layer(max_q + TAPS - 2)
    inputs = random_inputs(120, SHAPE, F64)
    (whole,) = layer.step([Chunk(2, 0, 0, inputs)])
    assert_close(whole, plain(inputs, layer.weights, SHAPE)[0], rtol=1e-11, atol=1e-12)
    for seed in range(3):
        out = generate(layer, inputs, random.Random(seed), max_q)
        assert torch.equal(out, whole), f"seed {seed}: {(out - whole).abs().max()}"


def each_after_each(kinds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns kinds of steps in an order in which each follows each once, itself too."""
    left = {kind: list(kinds) for kind in kinds}
    walk, order = [kinds[0]], list[tuple[int, int]]()
    while walk:  # Hierholzer: the circuit is whole once nothing leaves its ends
        if left[walk[-1]]:
            walk.append(left[walk[-1]].pop())
        else:
            order.append(walk.pop())
    return order[::-1]


def test_every_rejection_behind_every_other_leaves_the_state_of_plain_decoding() -> None:
    """H6: what a step replays depends on the drafts of the step before. (drafts, of which right); (-1, n) is a chunk of n."""
    torch.manual_seed(11)
    kinds = [(drafts, right) for drafts in range(4) for right in range(drafts + 1)] + [(-1, 2), (-1, 5)]
    order = each_after_each(kinds)
    assert len(order) == len(kinds) ** 2 + 1 and len(set(pairwise(order))) == len(kinds) ** 2
    inputs = random_inputs(sum(1 + right for _, right in order) + 8, SHAPE, F64)
    layer = new_layer(4 + TAPS - 2)
    wanted, states = plain(inputs, layer.weights, SHAPE)
    computed = state_len = 0
    for num_draft, num_right in order:
        num_draft, num_certain = (0, num_right) if num_draft < 0 else (num_draft, 1)
        num_kept = num_certain if num_certain > 1 else 1 + num_right
        fed = inputs[computed : computed + num_certain + num_draft].clone()
        fed[num_kept:] = random_inputs(len(fed) - num_kept, SHAPE, F64)
        (out,) = layer.step([Chunk(1, computed, state_len, fed, num_draft)])
        assert_close(out[:num_kept], wanted[computed : computed + num_kept], rtol=0, atol=1e-12)
        state_len, computed = computed + num_certain, computed + num_kept
        assert_close(layer.pools.state[1], states[state_len - 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_q", [2, 3, 6])
def test_a_ring_of_one_entry_less_is_too_short(max_q: int) -> None:
    """The replay then reads drafts in place of the oldest inputs: the bound of the ring is tight."""
    torch.manual_seed(max_q)
    layer = new_layer(max_q + TAPS - 3)
    inputs = random_inputs(60, SHAPE, F64)
    (whole,) = layer.step([Chunk(2, 0, 0, inputs)])
    layer.step([Chunk(1, 0, 0, inputs[:20])])
    fed = torch.cat((inputs[20:21], random_inputs(max_q - 1, SHAPE, F64)))
    layer.step([Chunk(1, 20, 20, fed, num_draft=max_q - 1)])
    (out,) = layer.step([Chunk(1, 21, 21, inputs[21:22])])
    assert (out - whole[21]).abs().max() > 1e-3


def test_a_row_resumes_from_each_snapshot_in_another_row() -> None:
    torch.manual_seed(3)
    inputs, max_q = random_inputs(70, SHAPE, F64), 4
    layer = new_layer(max_q + TAPS - 2)
    (whole,) = layer.step([Chunk(2, 0, 0, inputs)])
    _, states = plain(inputs, layer.weights, SHAPE)
    for boundary in (1, 2, 3, 4, 16, 17, 40, 69):
        for num_draft, start in ((0, 0), (0, max(boundary - 3, 0)), (2, boundary - 1)):
            if start:
                layer.step([Chunk(1, 0, 0, inputs[:start])])
            end = boundary + num_draft + (0 if num_draft else 5)
            layer.step([Chunk(1, start, start, inputs[start:end], num_draft, boundary, 3)])
            assert_close(layer.pools.snap_state[3], states[boundary - 1], rtol=1e-11, atol=1e-12)
            layer.restore(3, 4, boundary)
            out = generate(layer, inputs, random.Random(boundary), max_q, row=4, start=boundary)
            assert torch.equal(out, whole[boundary:]), boundary


def test_a_snapshot_is_stored_when_the_state_passes_its_boundary_and_not_when_drafts_do() -> None:
    torch.manual_seed(4)
    layer, inputs = new_layer(8), random_inputs(40, SHAPE, F64)
    states = plain(inputs, layer.weights, SHAPE)[1]
    layer.step([Chunk(1, 0, 0, inputs[:10])])

    def is_stored(chunk: Chunk) -> bool:
        layer.pools.snap_state[2] = torch.nan
        layer.step([chunk])
        return not bool(layer.pools.snap_state[2].isnan().any())

    assert not is_stored(Chunk(1, 10, 10, inputs[10:14], 3, snap_at=12, snap_slot=2)), "drafts passed it"
    assert is_stored(Chunk(1, 12, 11, inputs[12:15], 2, snap_at=12, snap_slot=2)), "a replay passes it"
    assert_close(layer.pools.snap_state[2], states[11])
    assert not is_stored(Chunk(1, 15, 13, inputs[15:16], 0, snap_at=13, snap_slot=2)), "it was passed before"
    assert is_stored(Chunk(1, 16, 16, inputs[16:20], 0, snap_at=20, snap_slot=2)), "a step ends there"
    assert_close(layer.pools.snap_state[2], states[19])
    assert not is_stored(Chunk(1, 20, 20, inputs[20:30], 0, snap_at=31, snap_slot=2)), "it lies ahead"


def test_rows_of_a_batch_have_the_bits_that_they_have_alone() -> None:
    torch.manual_seed(5)
    inputs = [random_inputs(60, SHAPE, F64) for _ in range(4)]
    alone, together = new_layer(9), new_layer(9)
    together.weights = alone.weights
    lengths = ((20, 3, 40, 1), (2, 5, 1, 17), (1, 1, 1, 1), (30, 2, 4, 4))
    ends, drafts = [0] * 4, (0, 2, 0, 0)
    lags = [0] * 4
    for step in lengths:
        chunks = [
            Chunk(
                1 + row,
                ends[row],
                ends[row] - lags[row],
                inputs[row][ends[row] : ends[row] + count],
                draft * (count > draft),
            )
            for row, (count, draft) in enumerate(zip(step, drafts, strict=True))
        ]
        outs = together.step(chunks, num_spare=2)
        for chunk, out in zip(chunks, outs, strict=True):
            assert torch.equal(alone.step([chunk])[0], out)
        lags = [chunk.num_draft for chunk in chunks]
        ends = [end + count for end, count in zip(ends, step, strict=True)]
    assert torch.equal(alone.pools.state[1:], together.pools.state[1:])
    assert torch.equal(alone.pools.ring[1:], together.pools.ring[1:])


def test_padding_reaches_no_output_and_writes_row_and_slot_0_alone() -> None:
    torch.manual_seed(6)
    layer, inputs = new_layer(7), random_inputs(30, SHAPE, F64)
    (wanted,) = layer.step([Chunk(2, 0, 0, inputs)])
    before = [each[1:].clone() for each in (layer.pools.ring, layer.pools.state, layer.pools.snap_ring)]
    # A padded row, one without tokens, tokens of no row, and bounds for more: what a graph for larger steps has.
    mixed, gates = torch.cat((inputs, inputs[:9])).split_with_sizes((SHAPE.num_channels, 2 * SHAPE.num_value_heads), 1)
    batch = batch_of([Chunk(0, 0, 0, inputs[:4]), Chunk(1, 0, 0, inputs)], 1, [4, 64, 1])
    shifted = torch.cat((mixed[:4], mixed)), torch.cat((gates[:4], gates))
    out = layer.run(*shifted, layer.weights, layer.pools, batch, SHAPE)
    assert torch.equal(out[4:34], wanted) and not out.isnan().any() and (out[34:] == 0).all()
    after = [each[1:] for each in (layer.pools.ring, layer.pools.state, layer.pools.snap_ring)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[1:].nan_to_num(7), new[1:].nan_to_num(7)), "rows that are not in the batch"
    assert layer.pools.snap_state[1:].isnan().all()


def test_an_empty_state_is_zeros_whatever_the_memory_holds() -> None:
    torch.manual_seed(7)
    layer, inputs = new_layer(5), random_inputs(8, SHAPE, F64)
    outs = []
    for rest in (torch.nan, torch.inf, 3.0):
        layer.pools.ring.fill_(rest)
        layer.pools.state.fill_(rest)
        outs.append(layer.step([Chunk(1, 0, 0, inputs)])[0])
        outs.append(layer.step([Chunk(3, 0, 0, inputs[:3], 2)])[0])
    for index, out in enumerate(outs):
        assert torch.equal(out, outs[index % 2]) and out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    layer, inputs = new_layer(6, dtype=dtype), random_inputs(50, SHAPE, dtype)
    wanted = plain(inputs, layer.weights, SHAPE)
    (out,) = layer.step([Chunk(1, 0, 0, inputs)])
    assert out.dtype == dtype and layer.pools.state.dtype == torch.float32
    assert_close(layer.pools.state[1].double(), wanted[1][-1], rtol=1e-4, atol=1e-5)
    assert_close(out.double(), wanted[0].to(dtype).double(), rtol=torch.finfo(dtype).eps * 2, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_it_is_the_layer_of_transformers(name: str) -> None:
    layer = oracle(name)
    torch.manual_seed(9)
    hidden = torch.randn(1, 40, layer.hidden_size)
    with torch.inference_mode():
        wanted = layer(hidden)[0]
        if name == "qwen3_next":
            projected = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
            q, k, v, z, b, a = projected
            mixed = torch.cat([each.reshape(1, 40, -1) for each in (q, k, v)], -1)
        else:
            mixed, z = layer.in_proj_qkv(hidden), layer.in_proj_z(hidden)
            b, a = layer.in_proj_b(hidden), layer.in_proj_a(hidden)
        inputs = torch.cat((mixed, b, a), -1)[0]
        weights = DeltaWeights(layer.conv1d.weight.squeeze(1), layer.A_log, layer.dt_bias)
        ours = Layer(weights, nan_pools(5, 6, 2, SHAPE, torch.float32))
        out = generate(ours, inputs, random.Random(1), 4)
        normed = layer.norm(out.flatten(0, 1), z.reshape(-1, SHAPE.value_dim))
        found = layer.out_proj(normed.view(40, -1))
    assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def oracle(name: str) -> Any:
    """A layer of transformers with random weights."""
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    family = {"qwen3_5_moe": "Qwen3_5Moe", "qwen3_next": "Qwen3Next"}[name]
    made = getattr(config, f"{family}TextConfig" if name == "qwen3_5_moe" else f"{family}Config")(
        hidden_size=32,
        num_hidden_layers=2,
        linear_num_key_heads=SHAPE.num_key_heads,
        linear_num_value_heads=SHAPE.num_value_heads,
        linear_key_head_dim=SHAPE.key_dim,
        linear_value_head_dim=SHAPE.value_dim,
        linear_conv_kernel_dim=TAPS,
    )
    torch.manual_seed(10)
    layer = getattr(modeling, f"{family}GatedDeltaNet")(made, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
        layer.A_log.copy_(torch.rand(SHAPE.num_value_heads).mul(4).add(0.05).log())
    return layer


def test_the_memory_of_a_step_counts_what_the_kernels_of_prompts_keep() -> None:
    """Of a token, with the heads of Qwen3.5-35B-A3B in 16 bits: by hand from the tensors that a launch makes."""
    config = DeltaConfig(
        layers=frozenset({0}),
        num_key_heads=16,
        num_value_heads=32,
        key_dim=128,
        value_dim=128,
        conv_width=4,
        is_interleaved=False,
    )
    projected, heads, factors = 2 * (8192 + 64 + 4096), 2 * 8192, 4 * 64
    solved = 2 * 32 * (128 + 128 + DELTA_CHUNK)
    assert 2 * config.step_elements() == projected + heads + factors + solved + 2 * 4096


def test_states_of_another_type_are_rounded_where_they_are_stored_alone() -> None:
    """Sums stay wide: a step from a stored state is one of float32 from there."""
    torch.manual_seed(6)
    weights, inputs = random_weights(SHAPE, torch.float32), random_inputs(12, SHAPE, torch.float32)
    narrow, wide = (
        Layer(weights, nan_pools(3, 5, 2, SHAPE, torch.float32, TAPS, dtype), SHAPE)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for start, end in ((0, 7), (7, 12)):
        step = Chunk(1, start, start, inputs[start:end], snap_at=end, snap_slot=1)
        assert torch.equal(narrow.step([step])[0], wide.step([step])[0])
        for name in ("state", "snap_state"):
            wide_state = getattr(wide.pools, name)
            assert torch.equal(getattr(narrow.pools, name)[1], wide_state[1].bfloat16()), name
            wide_state[1] = wide_state[1].bfloat16()
