"""Drafts that repeat what stood before, or go on as a reply before did: the twin against plain searches, Triton against the twin."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hiserve.core.plan import MAX_FOLLOWING
from hiserve.kernels import draft_reference as twins
from tests.helpers.draft_cases import continuations_of, drafts_after, looked_up, repeating_state
from tests.helpers.interpreted import run_interpreted

NUM_CASES = 150
PROGRAM = """
import torch
from hiserve.kernels import draft_reference, draft_triton
from tests.helpers.draft_cases import continuations_of, repeating_state
from tests.helpers.step_cases import copied

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(SEED)
draft_triton._NGRAM_BLOCK = 4
num_followed = 0
for number in range(NUM_CASES):
    row_len = 9 + number % 4
    known_lens = torch.randint(0, row_len + 1, (6,), generator=generator).tolist()
    ours = repeating_state(generator, row_len, [0, 1, row_len, *known_lens], 1 + number % 3)
    theirs = copied(ours)
    rows = torch.tensor([0, *(torch.randperm(8, generator=generator) + 1).tolist(), 0])
    continuations = continuations_of(generator, rows, ours, number % 7)
    sizes = dict(num_draft=1 + number % 5, min_ngram=1 + number % 2, max_ngram=2 + number % 3, max_known=row_len)
    draft_triton.draft_ngrams(rows, ours, continuations, **sizes)
    draft_reference.draft_ngrams(rows, theirs, continuations, **sizes)
    assert torch.equal(ours.tokens, theirs.tokens), (number, sizes, continuations, ours.tokens, theirs.tokens)
    num_followed += int((ours.tokens >= 1000).sum())
assert num_followed > NUM_CASES, num_followed
"""


def drafts_of(
    text: list[int], num_draft: int, row_len: int = 16, max_ngram: int = 3, continuation: tuple[int, ...] = (0, 0)
) -> list[int]:
    """What the twin writes behind a text; 0 for places it leaves alone."""
    state = repeating_state(torch.Generator(), row_len, [0, len(text)], 1)
    state.tokens[1] = torch.tensor(text + [0] * (row_len - len(text)))
    rows, continuations = torch.tensor([1]), torch.tensor([continuation], dtype=torch.int32)
    sizes = {"min_ngram": 1, "max_ngram": max_ngram, "max_known": len(text)}
    twins.draft_ngrams(rows, state, continuations, num_draft=num_draft, **sizes)
    assert state.tokens[1, : len(text)].tolist() == text
    return state.tokens[1, len(text) : len(text) + num_draft].tolist()


def test_drafts_are_what_a_plain_search_finds() -> None:
    generator = torch.Generator().manual_seed(29)
    seen: Counter[str] = Counter()
    for number in range(NUM_CASES):
        row_len, num_draft, min_ngram = 6 + number % 15, 1 + number % 5, 1 + number % 3
        known_lens = torch.randint(0, row_len + 1, (5,), generator=generator).tolist()
        state = repeating_state(generator, row_len, [0, *known_lens], 1 + number % 4)
        before = state.tokens.tolist()
        rows = torch.cat(((torch.randperm(5, generator=generator) + 1)[: 1 + number % 5], torch.tensor([0, 0])))
        continuations = continuations_of(generator, rows, state, number % 6)
        sizes = {"num_draft": num_draft, "min_ngram": min_ngram, "max_ngram": 3}
        twins.draft_ngrams(rows, state, continuations, max_known=max(1, max(known_lens)), **sizes)
        by_row = dict(zip(rows.tolist(), continuations.tolist(), strict=True))
        for row in range(1, 6):
            known, wanted = int(state.known_len[row]), before[row]
            if row in by_row:
                drafts = drafts_after(wanted[:known], by_row[row], num_draft, min_ngram, 3)
                seen["followed"] += bool(drafts) and drafts != looked_up(wanted[:known], num_draft, min_ngram, 3)
                drafts = drafts[: row_len - known]
                wanted = wanted[:known] + drafts + wanted[known + len(drafts) :]
                seen["known"] += bool(drafts)
                seen["full"] += known == row_len
                seen["cut"] += bool(drafts) and len(drafts) < num_draft
                seen["nothing known"] += not known
            assert state.tokens[row].tolist() == wanted, (number, row)
        assert state.tokens[0].tolist() == [0] * row_len
    print(seen)
    assert min(seen.values()) > 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 9, 2, 3], [4, 9, 2]),  # two tokens agree
        ([2, 3, 5, 1, 2, 3, 7, 3, 8, 1, 2, 3], [7, 3, 8]),  # three that agree are better than one that stands later
        ([1, 5, 1, 6, 1], [6, 1, 6]),  # of equals the latest, and what follows goes round
        ([4, 4], [4, 4, 4]),
        ([1, 2, 3], [3, 3, 3]),  # nothing agrees
        ([7], [7, 7, 7]),
    ],
)
def test_the_longest_agreement_wins_and_of_these_the_latest(text: list[int], expected: list[int]) -> None:
    assert drafts_of(text, 3) == expected


@pytest.mark.parametrize(
    ("continuation", "expected"),
    [
        ((7, 3, 80, 81, 82), [80, 81, 82]),  # three tokens agree before it, two in the row
        ((7, 2, 80, 81, 82), [4, 9, 2]),  # of equals the row's own
        ((5, 1, 2, 3, 80, 81, 82), [80, 81, 82]),  # one, and the two that came since
        ((5, 0, 2, 3, 80, 81, 82), [4, 9, 2]),  # it has none
        ((5, 9, 2, 7, 80, 81, 82), [4, 9, 2]),  # another token came
        ((5, 9, 2, 3, 80), [80, 9, 2]),  # too short: the row's own come after it
        ((5, 9, 2, 3), [4, 9, 2]),  # it is over
        ((8, 9, 80, 81, 82), [4, 9, 2]),  # of a longer row
    ],
)
def test_a_continuation_is_followed_while_more_tokens_agree_with_it(
    continuation: tuple[int, ...], expected: list[int]
) -> None:
    assert drafts_of([1, 2, 3, 4, 9, 2, 3], 3, continuation=continuation) == expected


def test_a_full_row_is_left_alone() -> None:
    assert drafts_of([1, 2, 1], 3, row_len=4) == [2]
    assert drafts_of([1, 2, 1, 2], 3, row_len=4) == []


@pytest.mark.parametrize("seed", [31])
def test_triton_writes_the_drafts_that_the_twin_writes(seed: int) -> None:
    print(f"seed {seed}")
    run_interpreted(PROGRAM.replace("SEED", str(seed)).replace("NUM_CASES", "12"))


def test_triton_refuses_continuations_that_are_longer_than_its_block() -> None:
    program = """
    import torch
    from hiserve.kernels import draft_triton
    from tests.helpers.draft_cases import repeating_state
    state = repeating_state(torch.Generator(), 16, [0, 4], 2)
    rows, continuations = torch.tensor([1]), torch.zeros((1, 2 + LONG), dtype=torch.int32)
    draft_triton.draft_ngrams(rows, state, continuations, num_draft=1, min_ngram=1, max_ngram=3, max_known=4)
    """.replace("LONG", str(MAX_FOLLOWING + 1)).replace("\n    ", "\n")
    with pytest.raises(AssertionError, match=f"continuations of {MAX_FOLLOWING + 1} tokens"):
        run_interpreted(program)
