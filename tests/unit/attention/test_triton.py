"""Which rows Triton's two kernels get; what they compute of them is the contract's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hiserve.attention.triton import TritonAttention
from tests.helpers.attention import Case


@pytest.mark.parametrize(
    ("q_lens", "num_short"),
    [
        ([1, 1, 1], 3),
        ([4, 1, 6, 2], 4),  # rows with other numbers of drafts
        ([1, 32, 33, 1], 2),
        ([33, 33], 2),
        ([33, 32], 0),
        ([33, 1, 1], 0),
        ([64, 64], 2),
        ([65, 65], 0),
    ],
)
def test_leading_rows_of_few_tokens_are_computed_together_and_all_behind_a_longer_one_by_the_other_kernel(
    q_lens: list[int], num_short: int
) -> None:
    case = Case([(5, new) for new in q_lens], group=2, dtype=torch.float32)
    attention = TritonAttention(case.shape)
    attention.plan(case.inputs)
    others = attention._others
    assert attention._num_short == sum(q_lens[:num_short])
    assert (0 if others is None else len(others.rows.all_seen.kv_lens)) == len(q_lens) - num_short
    if others is not None:
        assert others.rows.all_seen.max_q_len > 32  # all that this kernel is compiled for


def test_splits_are_made_in_the_first_layer_that_attends() -> None:
    """Elsewhere layers without attention come first: nobody would make them."""
    shape = dataclasses.replace(Case([(5, 1)]).shape, windows=(), first_layer=3)
    assert TritonAttention(shape)._splits_at == {3}
