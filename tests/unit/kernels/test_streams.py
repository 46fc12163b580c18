"""The kernels of several streams, of pairs and of roots against their twins, run by Triton's interpreter."""

from __future__ import annotations

from tests.helpers.interpreted import run_interpreted

HEADER = """
import torch
from torch.testing import assert_close

torch.set_num_threads(1)
torch.manual_seed(5)
"""
STREAMS = """
from hiserve.kernels import streams as fused, streams_reference as reference
from hiserve.kernels.stream_sums import SumBlocks
from hiserve.kernels.streams_reference import MixWeights

fused._PROMPT = fused._PROMPT._replace(sums=SumBlocks(4, 2, 64, 4))
for dtype, count, hidden, num_tokens, num_processors in (
    (torch.float32, 4, 300, 3, 16), (torch.float16, 2, 128, 18, 16), (torch.float32, 3, 16, 2, 16),
    (torch.float32, 2, 80, 3, 0),  # as a prompt: blocks of other sizes, and the last program has a token less
):
    fused.num_processors = lambda device: num_processors
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-3, atol=2e-3)
    streams = torch.randn(num_tokens, count, hidden).to(dtype)
    num_outputs = (2 + count) * count
    weights = MixWeights(torch.randn(num_outputs, count * hidden) * 0.1, torch.randn(num_outputs), torch.randn(3))
    constants = dict(iterations=3, eps=1e-2, norm_eps=1e-3)
    ours, theirs = (each.mix_streams(streams, weights, **constants) for each in (fused, reference))
    assert_close(ours, theirs, **close)
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
    out = torch.randn(num_tokens, hidden).to(dtype)
    assert_close(*(each.merge_streams(streams, out, *theirs[1:]) for each in (fused, reference)), **close)
    assert_close(*(each.pass_streams(streams, out, *theirs[1:], weights, **constants) for each in (fused, reference)), **close)
    # The same streams under one address, as of an embedding.
    same = streams[:, :1].expand(-1, count, -1)
    assert_close(*(each.mix_streams(same, weights, **constants) for each in (fused, reference)), **close)
    assert_close(*(each.merge_streams(same, out, *theirs[1:]) for each in (fused, reference)), **close)
    assert_close(*(each.pass_streams(same, out, *theirs[1:], weights, **constants) for each in (fused, reference)), **close)
    head = MixWeights(weights.weight[:count], weights.base[:count], weights.scale[:1])
    for some in (streams, streams[:0]):  # a step whose rows draw no token has none
        assert_close(*(each.join_streams(some, head, eps=1e-2, norm_eps=1e-3) for each in (fused, reference)), **close)
"""
PAIRS = """
from hiserve.kernels import pairs as reference, pairs_triton as fused

for dtype, shape, turned in ((torch.float32, (3, 5, 32), 4), (torch.float16, (2, 1, 16), 8), (torch.float32, (2, 2, 12), 2)):
    close = dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-3, atol=2e-3)
    x = torch.randn(shape[0], shape[1] * shape[2] + 5).to(dtype)[:, 5:].view(shape) if shape[1] == 1 else torch.randn(shape).to(dtype)
    cos, sin = torch.randn(2, shape[0], turned)
    assert_close(*(each.rotate_pairs(x, cos, sin) for each in (fused, reference)), **close)
    row, slots = torch.randn(shape[0], shape[2] + 3).to(dtype)[:, 3:], torch.randperm(5)[: shape[0]]
    for norm, heads in ((torch.rand(shape[2]).to(dtype), x), (torch.rand(shape[2]), x[:, :0])):
        pools = torch.full((2, 5, shape[2]), torch.nan, dtype=dtype)
        found = [
            each.store_rows(heads, row, norm, 1e-3, cos, sin, pool, slots)
            for each, pool in zip((fused, reference), pools, strict=True)
        ]
        assert_close(*found, **close)
        assert_close(*pools, equal_nan=True, **close)
        assert pools[0].isnan().any(1).sum() == 5 - shape[0]

kinds = reference.PairFrequencies(torch.rand(3, 6), torch.tensor([1.0, 1.5, 1.0]), torch.tensor([1, 1, 4]))
positions = torch.tensor([0, 3, 4, 1000, 77])
ours, theirs = (each.pair_angles(positions, kinds, torch.float32) for each in (fused, reference))
assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
assert torch.equal(ours[0][2, 0], ours[0][2, 1]) and not torch.equal(ours[0][1, 0], ours[0][1, 1])
"""
ROUTES = """
from hiserve.kernels import routing as reference, routing_triton as fused

for num_experts, count in ((256, 6), (12, 3)):
    logits, bias = torch.randn(5, num_experts) * 4, torch.randn(num_experts)
    logits[0, :4] = torch.tensor([60.0, -60.0, -9.0, 20.5])
    given = torch.randint(0, num_experts, (9, count)), torch.tensor([8, 0, 3, 3, 1], dtype=torch.int32)
    for how in (dict(bias=bias), dict(given=given)):
        ours, theirs = (each.route_by_root(logits, count, 1.5, **how) for each in (fused, reference))
        assert torch.equal(ours[1], theirs[1])
        assert_close(ours[0], theirs[0], rtol=2e-6, atol=1e-7)
for value in (torch.nan, torch.inf, -torch.inf):
    shares, experts = fused.route_by_root(torch.full((1, 8), value), 3, 1.0, bias=torch.zeros(8))
    assert experts.tolist() == [[0, 1, 2]]
small = torch.full((1, 4), -30.0)
assert_close(*(each.route_by_root(small, 2, 1.0, bias=torch.zeros(4))[0] for each in (fused, reference)))
"""


def test_streams_are_those_of_the_twin() -> None:
    run_interpreted(HEADER + STREAMS)


def test_pairs_are_turned_as_by_the_twin() -> None:
    run_interpreted(HEADER + PAIRS)


def test_roots_choose_what_the_twin_chooses() -> None:
    run_interpreted(HEADER + ROUTES)
