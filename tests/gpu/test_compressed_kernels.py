"""The kernels of compressed attention and of streams on CUDA, at the widths of DeepSeek-V4, against their twins."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hiserve.core.forward import LayerKV
from hiserve.core.row_shapes import PACKED_V4, PackedPages, packed_key, packed_latent
from hiserve.kernels import compressed_fused, compressed_reference, index_rows, index_store, latent_store, reference
from hiserve.kernels.latent_union import choose_parts
from hiserve.kernels.launch import num_processors
from hiserve.kernels.pairs import PairFrequencies
from hiserve.kernels.row_codecs import load_packed
from hiserve.kernels.streams_reference import MixWeights
from hiserve.kernels.union_rows import ChosenRows, RangeRows, rows_at
from tests.helpers.compressed_cases import KINDS, CompressedStep

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def twice(seed: int, run, *given):  # type: ignore[no-untyped-def]
    """Returns what the kernels make of a random case, and what the twins make of it."""
    found = []
    for ops in (compressed_fused, compressed_reference):
        torch.manual_seed(seed)
        found.append(run(ops, *given))
    return found


@pytest.mark.parametrize("num_tokens", [1, 3, 32, 200, 1000])
@pytest.mark.parametrize(("context", "packs_rows"), [(1000, False), (8192, False), (8192, True)])
def test_attention_over_unions(num_tokens: int, context: int, packs_rows: bool) -> None:
    case = CompressedStep(num_rows=min(num_tokens, 3), context=context, most=512, device="cuda", packs_rows=packs_rows)
    for (out, lse), (expected, sums) in zip(*twice(num_tokens, case.attend, num_tokens, KINDS), strict=True):
        assert_close(out, expected, atol=2e-2, rtol=2e-2)
        assert_close(lse, sums, atol=2e-3, rtol=2e-3)


def test_of_one_row_of_many_tokens_there_are_several_parts() -> None:
    _, num_parts = choose_parts(1, 64, 1152, BF16, num_processors(torch.device("cuda")))
    assert num_parts > 8


@pytest.mark.parametrize("packs_rows", [False, True])
def test_float32_is_computed_exactly_enough(packs_rows: bool) -> None:
    case = CompressedStep(context=3000, most=512, dtype=torch.float32, device="cuda", packs_rows=packs_rows)
    for (out, lse), (expected, sums) in zip(*twice(1, case.attend, 5, KINDS), strict=True):
        assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert_close(lse, sums, atol=1e-5, rtol=1e-5)


def whole_case(num_rows: int, context: int, *, weight: int = 1) -> tuple[Tensor, Tensor, RangeRows]:
    """Returns an index of small whole numbers, whose scores are exact and often equal."""
    case = CompressedStep(num_rows=num_rows, context=context, device="cuda")
    keys = case.range(4, 128, num_rows)
    keys.pool.copy_(torch.randint(-1, 2, keys.pool.shape, device="cuda"))
    q = torch.randint(-1, 2, (num_rows, 64, 128), device="cuda").to(BF16)
    return q, torch.randint(-weight, 3, (num_rows, 64), device="cuda").float(), keys


@pytest.mark.parametrize(("num_rows", "context"), [(1, 131072), (8, 30000), (5, 2100), (3, 1000)])
@pytest.mark.parametrize("most", [512, 1024])
def test_an_index_chooses_exactly_the_best(num_rows: int, context: int, most: int) -> None:
    torch.manual_seed(context)
    q, weights, keys = whole_case(num_rows, context)
    for each in (weights, torch.zeros_like(weights), -weights.abs()):
        found, expected = (
            ops.choose_rows(q, each, keys, most, 0.125) for ops in (compressed_fused, compressed_reference)
        )
        assert torch.equal(found, expected)
        assert torch.equal(
            compressed_fused.choose_rows(q, each, keys, most, 0.125), found
        )  # no count depends on a race


@pytest.mark.parametrize(("num_rows", "context"), [(1, 131072), (8, 30000), (3, 1000)])
def test_an_index_of_packed_keys_chooses_the_best(num_rows: int, context: int) -> None:
    """Scores may be rounded in another way: of the chosen rows they add up to as much."""
    case = CompressedStep(num_rows=num_rows, context=context, most=512, device="cuda", packs_rows=True)
    torch.manual_seed(context)
    keys, q = case.range(4, 128, num_rows), case.randn(num_rows, 64, 128)
    weights, sums = torch.rand(num_rows, 64, device="cuda"), []
    for ops in (compressed_fused, compressed_reference):
        slots = ops.choose_rows(q, weights, keys, 512, 0.125)
        assert slots.eq(-1).any() == (context < 2048) and all(
            len(set(each.tolist()) - {-1}) == min(512, context // 4) for each in slots
        )
        rows = rows_at(keys, slots, torch.float32)
        scores = torch.einsum("thn,tkn->thk", q.float(), rows).relu()
        sums.append(torch.einsum("thk,th->t", scores, weights))
    assert_close(*sums, atol=0, rtol=1e-4)


def test_a_stored_row_has_the_bytes_of_the_twin_but_where_its_numbers_are_rounded() -> None:
    torch.manual_seed(6)
    x, norm = torch.randn(64, 1, 512, device="cuda", dtype=BF16) * 3, torch.rand(512, device="cuda", dtype=BF16)
    angles, slots = torch.randn(64, 32, device="cuda"), torch.randperm(256, device="cuda")[:64]
    pages, pools = PackedPages(PACKED_V4, 128), torch.full((2, 256, 584), 255, dtype=torch.uint8, device="cuda")
    for ops, pool in zip((compressed_fused, compressed_reference), pools, strict=True):
        ops.store_rows(x[:, :0], x[:, 0], norm, 1e-6, angles.cos(), angles.sin(), pool, slots, pages)
    assert (pools[0] != pools[1]).float().mean() < 0.05
    assert_close(*(load_packed(pool, slots, pages) for pool in pools), rtol=0.13, atol=2e-2)


def test_a_stored_key_of_an_index_has_the_bytes_of_the_twin_but_where_its_numbers_are_rounded() -> None:
    """Of DeepSeek-V3.2."""
    torch.manual_seed(7)
    key, positions = torch.randn(64, 128, device="cuda", dtype=BF16) * 3, torch.arange(64, device="cuda")
    angles = reference.rotations(positions, torch.linspace(1, 1e-3, 32, device="cuda"), 1.0, torch.float32)
    weight, bias = (torch.rand(128, device="cuda", dtype=BF16) for _ in range(2))
    shape, slots = packed_key(128), torch.randperm(256, device="cuda")[:64]
    assert shape is not None
    pages, pools = PackedPages(shape, 64), torch.full((2, 256, 132), 255, dtype=torch.uint8, device="cuda")
    for module, pool in zip((index_store, index_rows), pools, strict=True):
        module.store_index_keys(key, weight, bias, 1e-6, *angles, pool, slots, pages)
    assert (pools[0] != pools[1]).float().mean() < 0.05
    assert_close(*(load_packed(pool, slots, pages) for pool in pools), rtol=0.13, atol=2e-2)


@pytest.mark.parametrize("packs_rows", [False, True])
@pytest.mark.parametrize(("ratio", "num_series"), [(4, 2), (128, 1)])
@pytest.mark.parametrize("context", [1000, 1024])
def test_compressed_rows(ratio: int, num_series: int, context: int, packs_rows: bool) -> None:
    case = CompressedStep(context=context, num_rows=6, device="cuda", packs_rows=packs_rows)
    (pool, carried), (expected, rings) = twice(2, case.compress, ratio, num_series)
    near = 0.13 if packs_rows else 2e-2  # of 8 bits, a step
    assert_close(pool[128 // ratio :], expected[128 // ratio :], atol=2e-2, rtol=near)
    assert_close(carried.rows[1:], rings.rows[1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 5, 32, 1000, 3000])
def test_streams(num_tokens: int) -> None:
    torch.manual_seed(3)
    streams = torch.randn(num_tokens, 4, 4096, device="cuda", dtype=BF16)
    weights = MixWeights(*(torch.randn(each, device="cuda") * 0.02 for each in ((24, 4 * 4096), (24,), (3,))))
    constants = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}
    (x, post, matrix), theirs = (
        ops.mix_streams(streams, weights, **constants) for ops in (compressed_fused, compressed_reference)
    )
    assert_close(x, theirs[0], atol=2e-2, rtol=2e-2)
    assert_close((post, matrix), theirs[1:], atol=1e-5, rtol=1e-5)
    merged = [ops.merge_streams(streams, x, post, matrix) for ops in (compressed_fused, compressed_reference)]
    assert_close(*merged, atol=2e-2, rtol=2e-2)
    passed = [
        ops.pass_streams(streams, x, post, matrix, weights, **constants)
        for ops in (compressed_fused, compressed_reference)
    ]
    assert_close(passed[0][0], merged[0], atol=2e-2, rtol=2e-2)
    assert_close(passed[0][1], passed[1][1], atol=2e-2, rtol=2e-2)
    again = compressed_reference.mix_streams(passed[0][0], weights, **constants)
    assert_close(passed[0][2:], again[1:], atol=1e-5, rtol=1e-5)


def test_slots_of_a_window_without_the_first_row() -> None:
    torch.manual_seed(9)
    window = CompressedStep(num_rows=4, context=700, device="cuda").range(1, 512, 8, 128)
    kv_lens, starts = torch.tensor([2, 128, 129, 700], device="cuda"), torch.arange(0, 9, 2, device="cuda").int()
    ours, theirs = (ops.slots_behind_first(window, kv_lens, starts) for ops in (compressed_fused, compressed_reference))
    assert torch.equal(ours, theirs)


def test_pairs_and_roots() -> None:
    torch.manual_seed(4)
    x, norm = torch.randn(7, 65, 512, device="cuda", dtype=BF16), torch.rand(512, device="cuda", dtype=BF16)
    positions = torch.tensor([0, 3, 4, 127, 5000, 100_000, 1_048_575], device="cuda")
    kinds = PairFrequencies(
        10_000.0 ** -torch.rand(2, 32, device="cuda"), torch.ones(2, device="cuda"), torch.tensor([1, 4], device="cuda")
    )
    found = []
    for ops in (compressed_fused, compressed_reference):
        cos, sin = ops.pair_angles(positions, kinds, torch.float32)
        pool = torch.zeros(9, 512, device="cuda", dtype=BF16)
        slots = torch.arange(7, device="cuda") + 1
        heads = ops.store_rows(x[:, 1:], x[:, 0], norm, 1e-6, cos[0], sin[0], pool, slots)
        found.append((cos, sin, heads, pool, ops.rotate_pairs(x, cos[1], sin[1])))
    assert_close(found[0][:2], found[1][:2], atol=1e-5, rtol=1e-5)
    assert_close(found[0][2:], found[1][2:], atol=2e-2, rtol=2e-2)
    logits, bias = torch.randn(500, 256, device="cuda") * 4, torch.randn(256, device="cuda")
    ours, theirs = (ops.route_by_root(logits, 6, 1.5, bias=bias) for ops in (compressed_fused, compressed_reference))
    assert torch.equal(ours[1], theirs[1])
    assert_close(ours[0], theirs[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("packs_rows", [False, True])
def test_one_graph_serves_every_length(packs_rows: bool) -> None:
    """Positions move below and above the window, saturation and page edges; nothing is planned between the replays."""
    torch.manual_seed(5)
    case = CompressedStep(num_rows=4, context=9000, most=512, device="cuda", packs_rows=packs_rows)
    window, heavy = (
        case.range(1, 512, 4, 128),
        replace(case.range(128, 512, 4), positions=torch.zeros(4, device="cuda").long()),
    )
    window = replace(window, positions=heavy.positions)
    keys, q, sink = (
        replace(case.range(4, 128, 4), positions=heavy.positions),
        case.randn(4, 64, 512),
        torch.randn(64, device="cuda"),
    )
    some, index_q, weights = case.range(4, 512, 4), case.randn(4, 64, 128), torch.rand(4, 64, device="cuda")

    def step() -> tuple[Tensor, ...]:
        slots = compressed_fused.choose_rows(index_q, weights, keys, 512, 0.1)
        sparse = compressed_fused.attend(q, [window, ChosenRows(some.pool, slots, some.packed)], sink, 0.05)[0]
        return slots, sparse, compressed_fused.attend(q, [window, heavy], sink, 0.05)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for last in (0, 2, 3, 126, 127, 128, 255, 2046, 2047, 2048, 4095, 4096, 8191, 8999):
        heavy.positions.copy_(torch.tensor([last, last // 2, 0, last], device="cuda"))
        graph.replay()
        for found, eager in zip(captured, step(), strict=True):
            assert torch.equal(found, eager), last
        assert not captured[1].isnan().any() and math.isfinite(float(captured[2].sum()))


def test_a_stored_latent_has_the_bytes_of_the_twin_but_where_its_numbers_are_rounded() -> None:
    """Of DeepSeek-V3.2; new rows are read as stored ones."""
    torch.manual_seed(8)
    row, positions = torch.randn(64, 576, device="cuda", dtype=BF16) * 3, torch.arange(64, device="cuda")
    turns = reference.rotations(positions, torch.linspace(1, 1e-3, 32, device="cuda"), 1.0, torch.float32)
    q, weight = torch.randn(64, 20, 192, device="cuda", dtype=BF16), torch.rand(512, device="cuda", dtype=BF16)
    shape, slots = packed_latent(512, 64), torch.randperm(256, device="cuda")[:64]
    assert shape is not None
    pages, pools, given = (
        PackedPages(shape, 64),
        torch.full((2, 256, 1, 656), 255, dtype=torch.uint8, device="cuda"),
        [],
    )
    for module, pool in zip((latent_store, reference), pools, strict=True):
        given.append(module.store_latents(q.clone(), row, weight, 1e-6, *turns, LayerKV(k=pool, v=pool), slots, pages))
        assert torch.equal(given[-1][1][:, 0], load_packed(pool[:, 0], slots, pages).to(BF16))
    assert_close(given[0][0], given[1][0])
    assert (pools[0] != pools[1]).float().mean() < 0.05
    assert_close(*(load_packed(pool[:, 0], slots, pages) for pool in pools), rtol=0.13, atol=2e-2)
