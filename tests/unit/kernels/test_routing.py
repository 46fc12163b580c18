"""The choice of experts among groups, against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch

from hiserve.kernels.routing import ExpertGroups, route_in_groups
from tests.helpers.interpreted import run_interpreted

PROGRAM = """
import torch
from hiserve.kernels import routing, routing_triton
from hiserve.kernels.routing import ExpertGroups

torch.set_num_threads(1)
torch.manual_seed(4)
# (experts, groups, of a token, experts of a token): DeepSeek-V3, GLM-4.7-Flash, groups of two, all groups, an odd number
for num_experts, num_groups, num_chosen, count in ((256, 8, 4, 8), (64, 1, 1, 4), (8, 4, 2, 3), (16, 4, 4, 5), (12, 4, 2, 3)):
    for is_normalized in (True, False):
        for dtype in (torch.float32, torch.float64):
            logits, bias = torch.randn(9, num_experts, dtype=dtype) * 3, torch.randn(num_experts, dtype=dtype)
            groups = ExpertGroups(bias, num_groups, num_chosen, scale=2.5)
            ours, theirs = (each.route_in_groups(logits, groups, count, is_normalized) for each in (routing_triton, routing))
            assert torch.equal(ours[1], theirs[1]), (num_experts, ours, theirs)
            torch.testing.assert_close(ours[0], theirs[0])
# Whatever the logits, experts are in range and differ.
for value in (torch.nan, torch.inf, -torch.inf, -200.0):
    shares, chosen = routing_triton.route_in_groups(torch.full((2, 8), value), ExpertGroups(torch.zeros(8), 4, 2, 1.0), 4, True)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2, (value, chosen)
    assert not shares.isnan().any()
"""


def choose(logits: list[float], bias: list[float], num_groups: int, num_chosen: int, num_per_token: int) -> list[int]:
    """Returns the experts of one token, by the rule as it is written down."""
    scores = [1 / (1 + math.exp(-logit)) + each for logit, each in zip(logits, bias, strict=True)]
    size = len(scores) // num_groups
    groups = sorted(range(num_groups), key=lambda g: -sum(sorted(scores[g * size : (g + 1) * size])[-2:]))[:num_chosen]
    may = [expert for group in groups for expert in range(group * size, (group + 1) * size)]
    return sorted(may, key=lambda expert: -scores[expert])[:num_per_token]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_groups", "num_chosen", "num_per_token"), [(4, 2, 3), (1, 1, 4), (4, 4, 12), (6, 1, 2)])
@pytest.mark.parametrize("is_normalized", [True, False])
def test_the_best_experts_of_the_best_groups(
    dtype: torch.dtype, num_groups: int, num_chosen: int, num_per_token: int, is_normalized: bool
) -> None:
    torch.manual_seed(2)
    logits, bias = torch.randn(50, 12, dtype=dtype), torch.randn(12, dtype=dtype)
    groups = ExpertGroups(bias, num_groups, num_chosen, scale=2.5)
    shares, experts = route_in_groups(logits, groups, num_per_token, is_normalized)
    for token in range(50):
        expected = choose(logits[token].tolist(), bias.tolist(), num_groups, num_chosen, num_per_token)
        assert experts[token].tolist() == expected
        wanted = logits[token, expected].sigmoid()
        torch.testing.assert_close(shares[token], 2.5 * (wanted / wanted.sum() if is_normalized else wanted))


def test_a_bias_changes_the_choice_and_never_a_share() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-3.0, 0.0, 0.0, 3.0])
    shares, experts = route_in_groups(logits, ExpertGroups(bias, 1, 1, scale=1.0), 2, False)
    assert experts.tolist() == [[3, 1]]
    torch.testing.assert_close(shares, logits[:, [3, 1]].sigmoid())


def test_shares_of_impossible_experts_are_zero_and_no_number_is_lost() -> None:
    shares, _ = route_in_groups(torch.full((1, 4), -200.0), ExpertGroups(torch.zeros(4), 1, 1, 1.0), 2, True)
    assert shares.tolist() == [[0.0, 0.0]]


def test_triton_chooses_what_its_twin_chooses() -> None:
    run_interpreted(PROGRAM)
