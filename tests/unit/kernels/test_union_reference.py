"""Attention over the union of sources, and the choice of rows, against sums by hand; assertions of vLLM's pull request 40899."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hiserve.kernels import union_reference
from hiserve.kernels.union_reference import attend, choose_rows, merge
from hiserve.kernels.union_rows import ChosenRows, RangeRows, RowSource, slots_of
from tests.helpers.compressed_cases import Step, slots_at_ends

WIDE = torch.float64
STEP = Step(cached=(0, 37, 5, 90), new=(9, 1, 3, 6))
NUM_TOKENS, HEADS, WIDTH, SCALE = 19, 3, 8, 0.6


def seen_by_hand(source: RangeRows, token: int) -> list[int]:
    """Returns the slots that a token sees, by the rule as it is written down."""
    position, found = int(source.positions[token]), []
    for row in range(position + 1):
        if row < (position + 1) // source.ratio and (source.window is None or row > position - source.window):
            page = source.table[source.token_rows[token], row // source.page_rows]
            found.append(int(page) * source.page_rows + row % source.page_rows)
    return found


def dense(q: Tensor, rows: list[Tensor], sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attends over rows of each token, ``[k, n]``, one head at a time, by exponentials as they are."""
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf)
    for token, mine in enumerate(rows):
        for head in range(q.shape[1]):
            shares = (mine @ q[token, head] * SCALE).exp()
            total = shares.sum()
            lse[token, head] = total.log()
            if len(mine) or sink is not None:
                out[token, head] = shares @ mine / (total + (0 if sink is None else sink[head].exp()))
    return out, lse


def three_sources(dtype: torch.dtype = WIDE) -> tuple[list[RowSource], list[Tensor]]:
    """Returns a window, a prefix and chosen rows, some twice, some none; and the rows of each token."""
    window, prefix = STEP.paged(WIDTH, 4, 1, 12, dtype), STEP.paged(WIDTH, 2, 4, None, dtype)
    pool = torch.randn(30, WIDTH, dtype=dtype)
    slots = torch.randint(-1, 30, (NUM_TOKENS, 5))
    slots[3], slots[4] = -1, 7
    unowned = torch.ones(30, dtype=torch.bool).index_fill_(0, slots.clamp(min=0).flatten(), False)
    pool[unowned] = torch.nan
    rows = []
    for token in range(NUM_TOKENS):
        mine = [each.pool[seen_by_hand(each, token)] for each in (window, prefix)]
        rows.append(torch.cat([*mine, pool[[slot for slot in slots[token].tolist() if slot >= 0]]]))
    return [window, prefix, ChosenRows(pool, slots)], rows


@pytest.mark.parametrize("has_sink", [True, False])
def test_all_sources_and_the_sink_share_one_softmax(has_sink: bool) -> None:
    torch.manual_seed(1)
    sources, rows = three_sources()
    q, sink = torch.randn(NUM_TOKENS, HEADS, WIDTH, dtype=WIDE), torch.randn(HEADS, dtype=WIDE) if has_sink else None
    expected, found = dense(q, rows, sink), attend(q, sources, sink, SCALE)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert_close(found[1], attend(q, sources, None, SCALE)[1], rtol=0, atol=0)  # logarithms are without the sink


def test_any_partition_and_order_of_the_sources_gives_the_same() -> None:
    torch.manual_seed(2)
    sources, _ = three_sources()
    q, sink = torch.randn(NUM_TOKENS, HEADS, WIDTH, dtype=WIDE), torch.randn(HEADS, dtype=WIDE)
    whole = attend(q, sources, sink, SCALE)
    window, prefix, chosen = sources
    assert isinstance(chosen, ChosenRows)
    assert_close(attend(q, [chosen, window, prefix], sink, SCALE), whole, rtol=1e-12, atol=1e-12)
    halves: list[RowSource] = [ChosenRows(chosen.pool, each) for each in chosen.slots.split([2, 3], 1)]
    for groups in ([[window], [prefix], halves], [[prefix, halves[0]], [window, halves[1]]], [sources]):
        parts = [attend(q, each, None, SCALE) for each in groups]
        assert_close(merge(parts, sink), whole, rtol=1e-12, atol=1e-12)
        assert_close(merge([merge(parts[:1], None), *parts[1:]], sink), whole, rtol=1e-12, atol=1e-12)


def test_who_sees_nothing_gets_exactly_zero() -> None:
    q, nothing = torch.randn(2, HEADS, WIDTH, dtype=WIDE), torch.full((2, 3), -1)
    sources = [ChosenRows(torch.full((4, WIDTH), torch.nan, dtype=WIDE), nothing)]
    for sink in (None, torch.zeros(HEADS, dtype=WIDE)):
        out, lse = attend(q, sources, sink, SCALE)
        assert (out == 0).all() and (lse == -math.inf).all()
        assert (merge([(out, lse), (out, lse)], sink)[0] == 0).all()
        assert (merge([(out, lse)], sink)[1] == -math.inf).all()


def test_a_slot_that_is_there_twice_counts_twice() -> None:
    torch.manual_seed(3)
    pool, q = torch.randn(2, WIDTH, dtype=WIDE), torch.randn(1, HEADS, WIDTH, dtype=WIDE)
    out, _ = attend(q, [ChosenRows(pool, torch.tensor([[0, 1, 1]]))], None, SCALE)
    assert_close(out, dense(q, [pool[[0, 1, 1]]], None)[0])


@pytest.mark.parametrize("num_elements", [1, 300, 2000])
def test_the_tokens_in_memory_at_once_change_nothing(monkeypatch: pytest.MonkeyPatch, num_elements: int) -> None:
    torch.manual_seed(4)
    sources, _ = three_sources()
    q, sink = torch.randn(NUM_TOKENS, HEADS, WIDTH, dtype=WIDE), torch.randn(HEADS, dtype=WIDE)
    whole = attend(q, sources, sink, SCALE)
    monkeypatch.setattr(union_reference, "_NUM_ELEMENTS", num_elements)
    assert_close(attend(q, sources, sink, SCALE), whole, rtol=1e-13, atol=1e-13)


def test_a_looser_bound_of_the_rows_changes_nothing() -> None:
    torch.manual_seed(5)
    tight = STEP.paged(WIDTH, 2, 4, None, WIDE)
    loose = RangeRows(tight.pool, tight.table, tight.token_rows, tight.positions, 2, most=100, ratio=4)
    q = torch.randn(NUM_TOKENS, HEADS, WIDTH, dtype=WIDE)
    assert_close(attend(q, [loose], None, SCALE), attend(q, [tight], None, SCALE), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("ratio", "window"), [(1, None), (1, 5), (4, None), (16, None)])
def test_a_token_sees_a_row_once_its_last_token_is_there(ratio: int, window: int | None) -> None:
    source = STEP.paged(WIDTH, 2, ratio, window, WIDE)
    found = slots_of(source).tolist()
    for token in range(NUM_TOKENS):
        assert [slot for slot in found[token] if slot >= 0] == seen_by_hand(source, token), token


def test_a_row_is_written_where_its_last_token_sees_it() -> None:
    source = STEP.paged(WIDTH, 2, 4, None, WIDE)
    for token, slot in enumerate(slots_at_ends(source).tolist()):
        is_end = (int(source.positions[token]) + 1) % 4 == 0
        assert slot == (seen_by_hand(source, token)[-1] if is_end else 0)


def scores_by_hand(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    found = torch.zeros(len(keys), dtype=WIDE)
    for row, key in enumerate(keys):
        for head in range(q.shape[0]):
            found[row] += weights[head] * max(0.0, float(q[head] @ key)) * SCALE
    return found


@pytest.mark.parametrize("most", [1, 6, 11, 40])
def test_the_best_rows_are_chosen_and_of_equal_ones_the_first(most: int) -> None:
    torch.manual_seed(6)
    keys = STEP.paged(WIDTH, 4, 2, None, WIDE)
    q, weights = torch.randn(NUM_TOKENS, HEADS, WIDTH, dtype=WIDE), torch.rand(NUM_TOKENS, HEADS, dtype=WIDE)
    found = choose_rows(q, weights, keys, most, SCALE)
    assert found.shape == (NUM_TOKENS, most)
    has_tie = False
    for token in range(NUM_TOKENS):
        slots = seen_by_hand(keys, token)
        scores = scores_by_hand(q[token], weights[token], keys.pool[slots]).tolist()
        has_tie |= most < scores.count(0.0)
        best = sorted(range(len(slots)), key=lambda row: (-scores[row], row))[:most]
        wanted = [slots[row] for row in sorted(best)]
        assert found[token].tolist() == wanted + [-1] * (most - len(wanted)), token
    assert has_tie or most > 1


def test_where_there_are_no_more_rows_all_are_chosen_whatever_their_scores() -> None:
    keys = STEP.paged(WIDTH, 4, 4, None, WIDE)
    q, weights = torch.full((NUM_TOKENS, 1, WIDTH), torch.nan, dtype=WIDE), torch.ones(NUM_TOKENS, 1, dtype=WIDE)
    assert torch.equal(choose_rows(q, weights, keys, keys.most, SCALE), slots_of(keys))


def test_chunks_of_slots_and_of_tokens_are_the_whole() -> None:
    """As the loops of vLLM's prompts, of every size: with slots that are there twice, absent ones, and a token that has none."""
    torch.manual_seed(8)
    pool, q = torch.randn(12, WIDTH, dtype=WIDE), torch.randn(5, HEADS, WIDTH, dtype=WIDE)
    sink, slots = torch.randn(HEADS, dtype=WIDE), torch.randint(-1, 12, (5, 7))
    slots[1], slots[2, 3:], pool[11] = -1, 4, torch.nan
    slots[slots == 11] = -1
    whole = attend(q, [ChosenRows(pool, slots)], sink, SCALE)[0]
    for num_slots, num_tokens in product(range(1, 8), range(1, 6)):
        outs = []
        for some, mine in zip(q.split(num_tokens), slots.split(num_tokens), strict=True):
            parts = [attend(some, [ChosenRows(pool, each)], None, SCALE) for each in mine.split(num_slots, 1)]
            outs.append(merge(parts, sink)[0])
        assert_close(torch.cat(outs), whole, rtol=1e-12, atol=1e-12)
        assert (torch.cat(outs)[1] == 0).all()
