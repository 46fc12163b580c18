"""The sampler draws from the exact filtered distribution, and each row from its own stream."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from hiserve.core.request import SamplingParams
from hiserve.sampling.params import SamplingRows
from hiserve.sampling.sampler import MAX_FEW, sample, scores
from tests.helpers.sampling import CPU, admit, batch, gather

VOCAB = 40
NUM_DRAWS = 20_000


def logits(seed: int = 0, rows: int = 1, size: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, size), generator=generator, dtype=torch.float64) * 2


def draws(row: Tensor, params: SamplingParams, num_draws: int = NUM_DRAWS) -> Tensor:
    """Draws at many positions of one stream."""
    rows = SamplingRows(2, CPU)
    rows.write([admit(1, params)])
    return sample(row.expand(num_draws, -1), gather(rows, [1] * num_draws, range(num_draws)))


def exact(row: Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution, token by token: temperature, top-k, the smallest set that reaches top-p, then min-p."""
    values = row[0].double().numpy() / params.temperature
    order = sorted(range(len(values)), key=lambda token: -values[token])
    kept = order[: params.top_k] if params.top_k > 0 else order
    weights = {token: math.exp(values[token] - values[order[0]]) for token in kept}
    total, mass, final = sum(weights.values()), 0.0, {}
    for token in kept:
        if mass >= params.top_p * total:
            break
        final[token] = weights[token]
        mass += weights[token]
    final = {token: weight for token, weight in final.items() if weight >= params.min_p}
    out = np.zeros(len(values))
    for token, weight in final.items():
        out[token] = weight / sum(final.values())
    return out


def chi_square_excess(drawn: Tensor, expected: np.ndarray) -> float:
    """Standard deviations by which chi-square exceeds its mean (Wilson and Hilferty, 1931); inf off support."""
    counts = np.bincount(drawn.numpy(), minlength=len(expected))
    if counts[expected == 0].any():
        return math.inf
    mean = expected * len(drawn)
    large = mean >= 5
    statistic = ((counts - mean)[large] ** 2 / mean[large]).sum()
    freedom = large.sum() - 1
    return float(((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


FILTERS = {
    "plain": SamplingParams(temperature=1.0, seed=11),
    "cold": SamplingParams(temperature=0.6, seed=12),
    "hot": SamplingParams(temperature=2.5, seed=13),
    "top-k": SamplingParams(temperature=1.0, top_k=7, seed=14),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8, seed=15),
    "both": SamplingParams(temperature=1.3, top_k=12, top_p=0.7, seed=16),
    "min-p": SamplingParams(temperature=1.2, min_p=0.08, seed=17),
    "all": SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.12, seed=18),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_draws_follow_the_exact_filtered_distribution(name: str, dtype: torch.dtype) -> None:
    row, params = logits(), FILTERS[name]
    drawn = draws(row.to(dtype), params)
    assert chi_square_excess(drawn, exact(row, params)) < 4.0


@pytest.mark.parametrize("name", FILTERS)
def test_the_chi_square_test_notices_a_slightly_wrong_temperature(name: str) -> None:
    """The negative control of the test above: 10 % off is seen, with the same draws."""
    row, params = logits(), FILTERS[name]
    wrong = msgspec.structs.replace(params, temperature=params.temperature * 1.1)
    assert chi_square_excess(draws(row, params), exact(row, wrong)) > 4.0


@pytest.mark.parametrize("changed", [{"top_k": 6}, {"top_p": 0.6}, {"min_p": 0.12}])
def test_the_chi_square_test_notices_another_filter(changed: dict[str, float]) -> None:
    row = logits()
    base = {"temperature": 1.0, "top_k": 7, "top_p": 0.95, "min_p": 0.05}
    assert (exact(row, SamplingParams(**base | changed)) != exact(row, SamplingParams(**base))).any()
    assert chi_square_excess(draws(row, SamplingParams(**base, seed=3)), exact(row, SamplingParams(**base))) < 4.0
    assert (
        chi_square_excess(draws(row, SamplingParams(**base, seed=3)), exact(row, SamplingParams(**base | changed)))
        > 4.0
    )


def test_many_seeds_at_one_position_follow_the_distribution_too() -> None:
    row, seeds = logits(), range(4_000)
    rows = SamplingRows(len(seeds) + 1, CPU)
    rows.write([admit(seed + 1, SamplingParams(temperature=1.0, top_p=0.9, seed=seed * 977)) for seed in seeds])
    drawn = sample(row.expand(len(seeds), -1), gather(rows, range(1, len(seeds) + 1), [9] * len(seeds)))
    assert chi_square_excess(drawn, exact(row, SamplingParams(top_p=0.9))) < 4.0
    assert chi_square_excess(drawn, exact(row, SamplingParams(top_p=0.9, temperature=1.3))) > 4.0


def test_a_large_and_a_small_top_k_draw_the_same_tokens() -> None:
    """Two ways to one distribution: a sort of all, and noise for the likeliest alone."""
    rows = logits(rows=64, size=300, seed=2)
    few, many = (
        sample(rows, batch([SamplingParams(temperature=1.0, top_k=k, min_p=0.2, seed=3)] * 64, range(64)))
        for k in (MAX_FEW, MAX_FEW + 1)
    )
    assert (rows > rows.amax(1, keepdim=True) + math.log(0.2)).sum(1).max() < MAX_FEW
    assert torch.equal(few, many)
    assert few.unique().numel() > 20


def test_choices_of_one_request_differ_and_each_repeats_itself() -> None:
    row = logits(size=300, seed=2) / 4
    params = [SamplingParams(temperature=1.0, seed=3)] * 16

    def replies() -> list[tuple[int, ...]]:
        steps = [sample(row.expand(16, -1), batch(params, [p] * 16, list(range(16)))).tolist() for p in range(8)]
        return list(zip(*steps, strict=True))

    assert len(set(replies())) == 16
    assert replies() == replies()


def test_neighbouring_positions_are_independent() -> None:
    row = logits(size=4)
    drawn = draws(row, FILTERS["plain"])
    single = exact(row, FILTERS["plain"])
    pairs = drawn[0::2] * 4 + drawn[1::2]
    assert chi_square_excess(pairs, np.outer(single, single).ravel()) < 4.0
    assert chi_square_excess(drawn[0::2] * 5, np.outer(single, single).ravel()) > 4.0


def test_greedy_is_the_argmax_and_the_lowest_token_wins_ties() -> None:
    row = logits(rows=2)
    row[1, [3, 17, 30]] = 100.0
    greedy = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, seed=1)
    plain = batch([greedy] * 2, range(2))
    assert (plain.free, plain.few, plain.filtered) == (None, None, None)
    assert sample(row, plain).tolist() == [int(row[0].argmax()), 3]


def test_a_stream_is_the_same_in_any_batch() -> None:
    """Alone, among greedy rows, among filtered rows, first or last: the same tokens at each position."""
    rows, params = logits(rows=64), SamplingParams(temperature=0.9, seed=5)
    alone = [int(sample(rows[p : p + 1], batch([params], [p]))) for p in range(64)]
    assert len(set(alone)) > 10
    neighbours = [
        [SamplingParams(temperature=0.0, seed=1)],
        [SamplingParams(temperature=1.5, seed=2)],
        [FILTERS["both"], FILTERS["top-k"]],
    ]
    for others in neighbours:
        for place in range(len(others) + 1):
            mixed = [*others[:place], params, *others[place:]]
            for p in range(64):
                together = logits(seed=p, rows=len(mixed))
                together[place] = rows[p]
                drawn = sample(together, batch(mixed, [p] * len(mixed)))
                assert int(drawn[place]) == alone[p]


def test_seed_choice_and_position_each_change_the_stream() -> None:
    rows = logits(rows=64, seed=4) / 4
    base = SamplingParams(temperature=1.0, seed=5)

    def stream(params: SamplingParams, first: int = 0, choice: int = 0) -> list[int]:
        return sample(rows, batch([params] * 64, range(first, first + 64), [choice] * 64)).tolist()

    assert stream(base) == stream(base)
    for other in (
        stream(SamplingParams(temperature=1.0, seed=6)),
        stream(base, first=1),
        stream(base, choice=1),
    ):
        assert sum(a == b for a, b in zip(stream(base), other, strict=True)) < 20


def test_float64_stays_float64_and_sixteen_bits_are_widened() -> None:
    one = batch([FILTERS["both"]], [3])
    assert scores(logits(), one).dtype == torch.float64
    assert scores(logits().bfloat16(), one).dtype == torch.float32


@pytest.mark.parametrize("filter_", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_temperature_is_greedy_in_effect(dtype: torch.dtype, filter_: dict[str, Any]) -> None:
    row = logits()
    for temperature in (1e-6, 1e-39, 1e-320):
        one = batch([SamplingParams(temperature=temperature, seed=3, **filter_)] * 50, range(50))
        assert not scores(row.to(dtype).expand(50, -1), one).isnan().any()
        drawn = sample(row.to(dtype).expand(50, -1), one)
        assert set(drawn.tolist()) == {int(row.argmax())}


def test_a_filter_always_leaves_the_likeliest_token() -> None:
    row = logits()
    for params in (
        SamplingParams(temperature=1.0, top_p=1e-12, seed=3),
        SamplingParams(temperature=1.0, top_k=1, seed=3),
    ):
        assert set(draws(row.float(), params, 200).tolist()) == {int(row.argmax())}


def test_a_token_that_is_certain_survives_any_filter() -> None:
    """Its probability rounds to 1, which is all that a tiny top-p asks to remove."""
    row = torch.full((1, VOCAB), -200.0)
    row[0, 5] = 200.0
    assert set(draws(row, SamplingParams(temperature=1.0, top_p=1e-12, seed=3), 50).tolist()) == {5}


def test_a_top_k_beyond_the_vocabulary_keeps_all() -> None:
    row = logits()
    wide = draws(row, SamplingParams(temperature=1.0, top_k=10 * VOCAB, seed=3), 200)
    assert torch.equal(wide, draws(row, SamplingParams(temperature=1.0, seed=3), 200))


def test_equal_scores_at_the_threshold_are_all_kept() -> None:
    row = torch.zeros(1, 6, dtype=torch.float64)
    row[0, 0] = 1.0
    assert set(draws(row, SamplingParams(temperature=1.0, top_k=3, seed=2), 500).tolist()) == set(range(6))


def test_masked_logits_are_never_drawn() -> None:
    row = logits()
    row[0, ::2] = -torch.inf
    assert (draws(row, FILTERS["top-p"], 500) % 2 == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("params", [FILTERS["top-p"], FILTERS["both"]], ids=["all", "few"])
def test_rows_begin_at_multiples_of_16_bytes_when_chances_are_summed(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, dtype: torch.dtype
) -> None:
    """As those of scores: the threshold of top-p is a sum on CUDA whose order would depend on the row's place in the batch."""
    row, apart = logits(size=VOCAB + 1).to(dtype), []
    expected, softmax = draws(row, params, 50), Tensor.softmax
    monkeypatch.setattr(Tensor, "softmax", lambda x, dim: (apart.append(x.stride(0) * x.itemsize), softmax(x, dim))[1])
    assert torch.equal(draws(row, params, 50), expected)
    assert apart and all(each % 16 == 0 for each in apart)
