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


@pytest.mark.parametrize("window", [None, 7])
def test_nodes_of_a_tree_see_their_ancestors_and_a_prompt_beside_them_its_own_past(window: int | None) -> None:
    case = Case(((20, 9), (3, 5), (0, 70), (40, 66)), trees=True, window=window)
    for layer in (0, 1):
        torch.testing.assert_close(
            case.run(CpuAttention(case.shape), layer).double(), case.oracle(layer)[0], atol=2e-5, rtol=2e-5
        )


def test_a_row_in_scattered_pages_gathers_those_that_its_window_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = ((100, 1), (90, 7), (3, 2))
    case = Case(lengths, window=20, adjacent=False)
    num_pages, gather = [], CpuAttention._gather

    def count(self: CpuAttention, pool: torch.Tensor, pages: torch.Tensor, first: int, num_keys: int) -> torch.Tensor:
        assert len(pages) == -(-(first + num_keys) // 16)
        num_pages.append(len(pages) - first // 16)
        return gather(self, pool, pages, first, num_keys)

    monkeypatch.setattr(CpuAttention, "_gather", count)
    out = case.run(CpuAttention(case.shape))
    torch.testing.assert_close(out.double(), case.oracle()[0], atol=2e-5, rtol=2e-5)
    assert num_pages == [2, 2, 3, 3]
