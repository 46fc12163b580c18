"""Logits of some tokens: of as many as a graph has, and no one sees the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hiserve.runners.step_output import LogitsHead

NUM_TOKENS, HIDDEN, VOCAB = 20, 4, 7


class Model:
    """Multiplies; notes how many tokens it is asked for."""

    def __init__(self) -> None:
        self.head = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(0))
        self.asked: list[int] = []

    def logits(self, attn_out: Tensor, residual: Tensor, logits_rows: Tensor, features: Tensor | None = None) -> Tensor:
        self.asked.append(logits_rows.shape[0])
        return (attn_out + residual)[logits_rows] @ self.head


@pytest.mark.parametrize(("count", "computed"), [(1, 2), (2, 2), (3, 6), (6, 6), (7, 7), (0, 0)])
def test_as_many_are_computed_as_a_graph_has_and_as_many_are_given_as_are_wanted(count: int, computed: int) -> None:
    model = Model()
    attn_out, residual = torch.randn(2, NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(count) * 2 + 1
    got = LogitsHead(model, (2, 6)).logits(attn_out, residual, rows, None)  # type: ignore[arg-type]
    assert model.asked == [computed]
    torch.testing.assert_close(got, (attn_out + residual)[rows] @ model.head)
