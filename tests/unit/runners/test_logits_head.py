"""Logits of some tokens: of as many as a graph has, and no one sees the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hiserve.core.forward import ForwardOutputs
from hiserve.runners.mixed import StaticInputs
from hiserve.runners.step_output import LogitsHead

NUM_TOKENS, HIDDEN, VOCAB = 20, 4, 7


class Model:
    """Multiplies; notes how many tokens it is asked for."""

    def __init__(self) -> None:
        self.head = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(0))
        self.asked: list[int] = []

    def finish(self, reached: tuple[Tensor, Tensor], inputs: Any, features: Tensor | None) -> ForwardOutputs:
        self.asked.append(inputs.logits_rows.shape[0])
        assert all(each.shape[0] == NUM_TOKENS for each in reached)
        return ForwardOutputs(sum(reached)[inputs.logits_rows] @ self.head, features)


@pytest.mark.parametrize(("count", "computed"), [(1, 2), (2, 2), (3, 6), (6, 6), (7, 7), (0, 0)])
def test_as_many_are_computed_as_a_graph_has_and_as_many_are_given_as_are_wanted(count: int, computed: int) -> None:
    model = Model()
    reached = torch.randn(2, NUM_TOKENS + 3, HIDDEN, generator=torch.Generator().manual_seed(1)).unbind()
    static = StaticInputs(NUM_TOKENS, 1, 1, 1, torch.device("cpu")).inputs
    inputs = replace(static, logits_rows=torch.arange(count) * 2 + 1)
    got = LogitsHead(model, (2, 6)).finish(reached, inputs, reached[0])  # type: ignore[arg-type]
    assert model.asked == [computed]
    torch.testing.assert_close(got.logits, sum(reached)[inputs.logits_rows] @ model.head)
    assert got.hidden_states is not None and got.hidden_states.shape[0] == NUM_TOKENS
