"""Compressed rows, made in any chunks, against sums by hand; several residual streams; the choice of experts by roots."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hiserve.kernels.compress_reference import Compression, compress
from hiserve.kernels.compressed_ops import compressed_ops_for
from hiserve.kernels.routing import route_by_root
from hiserve.kernels.streams_reference import MixWeights, join_streams, merge_streams, mix_streams
from tests.helpers.compressed_cases import Compressed, made_by_hand, random_compression

WIDE = torch.float64
LENGTH = 67
KINDS = [(4, 2), (16, 1), (2, 2), (1, 1)]  # tokens of a row, series
WIDTH = 6


def case(ratio: int, num_series: int) -> tuple[Compression, Tensor, Tensor, Tensor]:
    torch.manual_seed(ratio)
    how = random_compression(WIDTH, ratio, num_series, WIDE)
    values, scores = torch.randn(2, LENGTH, num_series * WIDTH, dtype=WIDE)
    return how, values, scores, torch.randn(LENGTH, 2, dtype=WIDE)


@pytest.mark.parametrize(("ratio", "num_series"), KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 16, LENGTH])
def test_rows_are_the_same_whatever_the_chunks(ratio: int, num_series: int, chunk: int) -> None:
    how, *given = case(ratio, num_series)
    made = Compressed(how, *given, ring=how.span + 2)
    expected = made_by_hand(*given[:2], how, given[2])
    for start in range(0, LENGTH, chunk):
        end = min(start + chunk, LENGTH)
        made.step(compress, start, end)
        assert_close(made.rows(end), expected[: end // ratio], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ratio", "num_series"), KINDS[:2])
@pytest.mark.parametrize("num_draft", [1, 4])
def test_refused_drafts_leave_no_trace(ratio: int, num_series: int, num_draft: int) -> None:
    """The ring has the room that the house allocates: its span, and two steps of drafts."""
    how, values, scores, turns = case(ratio, num_series)
    expected, chance = made_by_hand(values, scores, how, turns), random.Random(num_draft)
    made = Compressed(how, values.clone(), scores.clone(), turns, ring=how.span + 2 * (1 + num_draft))
    start = 0
    while start + num_draft < LENGTH:
        accepted = chance.randint(0, num_draft)
        wrong = slice(start + 1 + accepted, start + 1 + num_draft)
        made.values[wrong] = made.scores[wrong] = 99.0
        made.step(compress, start, start + 1 + num_draft, num_draft)
        made.values[wrong], made.scores[wrong] = values[wrong], scores[wrong]
        start += 1 + accepted
        assert_close(made.rows(start), expected[: start // ratio], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("boundary", [8, 16, 24])
@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_a_snapshot_is_all_that_a_resume_reads(boundary: int, chunk: int) -> None:
    how, *given = case(4, 2)
    first = Compressed(how, *given, ring=how.span + 4, num_kept=4)
    for start in range(0, 40, chunk):
        first.step(compress, start, min(start + chunk, 40), snap_at=boundary, state_len=start)
    later = Compressed(how, *given, ring=how.span + 4)
    places = torch.arange(boundary - 4, boundary) % (how.span + 4)
    later.carried.rows[2, places] = first.carried.snapshots[1]
    for start in range(boundary, LENGTH, 7):
        later.step(compress, start, min(start + 7, LENGTH))
    expected = made_by_hand(*given[:2], how, given[2])
    assert_close(later.rows(LENGTH)[boundary // 4 :], expected[boundary // 4 :], rtol=1e-12, atol=1e-12)
    assert first.carried.snapshots[2].isnan().all(), "a slot of nobody was written"


def test_drafts_are_in_no_snapshot() -> None:
    how, *given = case(4, 2)
    made = Compressed(how, *given, ring=how.span + 8, num_kept=4)
    made.step(compress, 0, 17, num_draft=2, snap_at=16)
    assert made.carried.snapshots[1].isnan().all()
    made.step(compress, 15, 18, num_draft=2, snap_at=16, state_len=15)
    assert_close(made.carried.snapshots[1, :, : 2 * WIDTH], given[0][12:16])


def test_memory_of_other_rows_stays_as_it_was() -> None:
    how, *given = case(4, 2)
    made = Compressed(how, *given, ring=how.span, num_kept=4)
    made.step(compress, 0, 61)
    assert made.carried.rows[[1, 3]].isnan().all() and made.carried.snapshots[1:].isnan().all()
    assert made.pool[made.table[1, 3] * 4 + 3].isnan().all(), "a row whose last token is not there"


NUM_STREAMS, HIDDEN = 4, 10


def mix_weights(num_outputs: int, num_scales: int) -> MixWeights:
    sizes: tuple[tuple[int, ...], ...] = ((num_outputs, NUM_STREAMS * HIDDEN), (num_outputs,), (num_scales,))
    return MixWeights(*(torch.randn(each, dtype=WIDE) for each in sizes))


def test_streams_are_mixed_as_the_rule_says() -> None:
    torch.manual_seed(7)
    eps, norm_eps, iterations = 1e-2, 1e-3, 5
    streams, out = torch.randn(5, NUM_STREAMS, HIDDEN, dtype=WIDE), torch.randn(5, HIDDEN, dtype=WIDE)
    weights = mix_weights((2 + NUM_STREAMS) * NUM_STREAMS, 3)
    x, post, matrix = mix_streams(streams, weights, iterations=iterations, eps=eps, norm_eps=norm_eps)
    after = merge_streams(streams, out, post, matrix)
    for token in range(5):
        flat = streams[token].flatten()
        mixed = weights.weight @ (flat / (flat.square().mean() + norm_eps).sqrt())

        sizes = torch.tensor([NUM_STREAMS, NUM_STREAMS, NUM_STREAMS**2])
        scaled = mixed * weights.scale.repeat_interleave(sizes) + weights.base
        gates = 1 / (1 + (-scaled).exp())
        assert_close(x[token], ((gates[:4] + eps)[:, None] * streams[token]).sum(0))
        assert_close(post[token], 2 * gates[4:8])
        square = scaled[8:].view(4, 4).exp()
        square = square / square.sum(1, keepdim=True) + eps
        for turn in range(2 * iterations - 1):
            square = square / (square.sum(turn % 2, keepdim=True) + eps)
        assert_close(matrix[token], square)
        for stream in range(NUM_STREAMS):
            total = post[token, stream] * out[token]
            for other in range(NUM_STREAMS):
                total = total + matrix[token, other, stream] * streams[token, other]
            assert_close(after[token, stream], total)


def test_the_head_joins_streams_by_weights_of_their_own() -> None:
    torch.manual_seed(8)
    streams, weights = torch.randn(3, NUM_STREAMS, HIDDEN, dtype=WIDE), mix_weights(NUM_STREAMS, 1)
    flat = streams.flatten(1)
    normed = flat / (flat.square().mean(1, keepdim=True) + 1e-3).sqrt()
    shares = 1 / (1 + (-(normed @ weights.weight.T * weights.scale + weights.base)).exp()) + 1e-2
    expected = torch.einsum("tj,tjn->tn", shares, streams)
    assert_close(join_streams(streams, weights, eps=1e-2, norm_eps=1e-3), expected)


def test_experts_are_chosen_with_a_bias_and_weighed_without() -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=WIDE), torch.tensor([-3.0, 0.0, 0.0, 3.0], dtype=WIDE)
    shares, experts = route_by_root(logits, 2, 1.5, bias=bias)
    assert experts.tolist() == [[3, 1]]
    roots = [math.sqrt(math.log1p(math.exp(value))) for value in (-1.0, 1.0)]
    assert_close(shares, torch.tensor([[1.5 * each / sum(roots) for each in roots]], dtype=WIDE))


def test_given_experts_are_weighed_alike() -> None:
    logits, table = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=WIDE), torch.tensor([[1, 1], [2, 0]])
    shares, experts = route_by_root(logits, 2, 2.5, given=(table, torch.tensor([1], dtype=torch.int32)))
    roots = [math.sqrt(math.log1p(math.exp(value))) for value in (0.0, 2.0)]
    assert experts.tolist() == [[2, 0]]
    assert_close(shares, torch.tensor([[2.5 * each / sum(roots) for each in roots]], dtype=WIDE))


def test_each_device_has_all_operations() -> None:
    ops = compressed_ops_for(torch.device("cpu"))
    assert all(
        callable(getattr(ops, name)) for name in ("attend", "choose_rows", "compress", "rotate_pairs", "store_rows")
    )
