"""Which rows the CPU backend reads in place."""

from __future__ import annotations

import pytest
import torch

from hiserve.attention.cpu import CpuAttention
from tests.helpers.attention import RAGGED, Case


def test_rows_over_adjacent_pages_are_read_in_place_whatever_their_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(*args: object) -> torch.Tensor:
        raise AssertionError("a row was gathered")

    monkeypatch.setattr(CpuAttention, "_gather", gather)
    case = Case(RAGGED, adjacent=True)
    case.run(CpuAttention(case.shape))
    with pytest.raises(AssertionError, match="a row was gathered"):
        Case(RAGGED, adjacent=False).run(CpuAttention(case.shape))


def test_a_prompt_without_a_prefix_is_never_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuAttention, "_gather", None)
    case = Case(((0, 40), (0, 33)), adjacent=False)
    case.run(CpuAttention(case.shape))


def test_a_tree_is_refused() -> None:
    case = Case(((20, 3),), trees=True)
    with pytest.raises(AssertionError, match="no tree masks"):
        case.run(CpuAttention(case.shape))
