"""Rows of sampling parameters: tenants, needs, end tokens that come too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiserve.core.request import MAX_BIASES, MAX_STOP_TOKENS, SamplingParams
from hiserve.sampling.params import SamplingRows
from hiserve.sampling.sampler import sample, scores
from tests.helpers.sampling import CPU, admit, gather

VOCAB, ENDS = 2000, (1, 9)
PLAIN = SamplingParams(temperature=0.0, seed=1)
DRAWN = SamplingParams(temperature=1.0, seed=5)
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=3,
    top_p=0.5,
    min_p=0.2,
    repetition_penalty=2.0,
    presence_penalty=1.0,
    frequency_penalty=1.0,
    logit_bias=dict.fromkeys(range(100), 50.0),
    min_tokens=50,
    stop_token_ids=(4, 5),
    seed=2**40,
    logprobs=7,
    prompt_logprobs=3,
)
SETTINGS = {
    "greedy": PLAIN,
    "drawn": DRAWN,
    "few": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=3),
    "many": SamplingParams(temperature=0.9, top_k=200, seed=3),
    "top-p": SamplingParams(temperature=0.9, top_p=0.9, seed=3),
    "min-p": SamplingParams(temperature=0.9, min_p=0.1, seed=3),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.4, seed=3),
    "greedy with penalties": SamplingParams(temperature=0.0, frequency_penalty=0.5, seed=3),
    "bias": SamplingParams(temperature=0.8, logit_bias={7: 3.0}, seed=3),
    "greedy with bias": SamplingParams(temperature=0.0, logit_bias={7: 3.0}, seed=3),
    "minimum": SamplingParams(temperature=0.8, min_tokens=99, seed=3),
    "everything": EVERYTHING,
}


def inputs(num_rows: int, size: int = VOCAB, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and known tokens; row r of the tokens goes with logits r - 1."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn((num_rows, size), generator=generator, dtype=dtype) * 3
    return logits, torch.randint(0, 50, (num_rows + 1, 30), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("size", [VOCAB, 1237], ids=["even", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_untouched_by_whatever_the_others_ask_for(dtype: torch.dtype, size: int) -> None:
    """Bit by bit: every setting alone, then among all others, in two orders and with copies of itself."""
    names = list(SETTINGS)
    logits, known = inputs(len(names), size, dtype)
    rows = SamplingRows(len(names) + 1, CPU, ENDS)
    rows.write([admit(row, SETTINGS[name], 0, [0] * 6) for row, name in enumerate(names, start=1)])
    alone = [
        scores(logits[row - 1 : row], gather(rows, [row], [10 + row], known))[0] for row in range(1, len(names) + 1)
    ]
    drawn = {int(each.argmax()) for each in alone}
    assert len(drawn) >= 8
    forward = list(range(1, len(names) + 1))
    for order in (forward, forward[::-1], forward[::2] * 2 + forward[1::2], forward[:4] * 3):
        picked = torch.tensor(order)
        batch = gather(rows, order, [10 + row for row in order], known)
        together = scores(logits[picked - 1], batch)
        for index, row in enumerate(order):
            assert torch.equal(together[index], alone[row - 1]), names[row - 1]
        assert sample(logits[picked - 1], batch).tolist() == [int(alone[row - 1].argmax()) for row in order]


def test_logits_are_not_changed_in_place() -> None:
    logits, known = inputs(1)
    before = logits.clone()
    rows = SamplingRows(2, CPU, ENDS)
    rows.write([admit(1, EVERYTHING)])
    scores(logits, gather(rows, [1], [20], known))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_forgets_its_last_tenant(name: str) -> None:
    logits, known = inputs(1)
    fresh, used = SamplingRows(2, CPU, ENDS), SamplingRows(2, CPU, ENDS)
    used.write([admit(1, EVERYTHING, choice=3, tokens=[0] * 9)])
    for rows in (fresh, used):
        rows.write([admit(1, SETTINGS[name], tokens=[0] * 4)])
    expected, got = (scores(logits, gather(rows, [1], [20], known)) for rows in (fresh, used))
    assert torch.equal(got, expected)
    host = np.array([1], dtype=np.int32)
    assert used.num_top(host) == SETTINGS[name].logprobs
    assert used.num_prompt_top(host) == SETTINGS[name].prompt_logprobs


def test_the_most_scores_that_any_row_wants() -> None:
    rows = SamplingRows(5, CPU)
    asked = [None, 0, 20, 3]
    rows.write([admit(row, SamplingParams(seed=1, logprobs=each)) for row, each in enumerate(asked, start=1)])
    host = [np.array(each, dtype=np.int32) for each in ([1], [1, 2], [1, 2, 3, 4], [4, 2], [])]
    assert [rows.num_top(each) for each in host] == [None, 0, 20, 3, None]
    assert [rows.num_prompt_top(each) for each in host] == [None] * 5


@pytest.mark.parametrize(
    ("asked", "masked"),
    [
        ({}, {1, 9}),
        ({"stop_token_ids": (3, 9)}, {1, 3, 9}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": (3,)}, {3}),
        ({"logit_bias": {1: 100.0, 2: 1.0}}, {1, 9}),
    ],
)
def test_what_ends_a_reply_cannot_be_chosen_before_the_minimum(asked: dict[str, object], masked: set[int]) -> None:
    logits, known = inputs(1)
    rows = SamplingRows(2, CPU, ENDS)
    rows.write([admit(1, SamplingParams(temperature=0.0, seed=1, min_tokens=4, **asked), tokens=[0] * 10)])
    for position in (10, 13):
        early = scores(logits, gather(rows, [1], [position], known))[0]
        assert set(torch.isinf(early).nonzero().flatten().tolist()) == masked
    assert torch.isfinite(scores(logits, gather(rows, [1], [14], known))).all()


def test_the_most_biases_and_stop_tokens_fit() -> None:
    logits, known = inputs(1)
    rows = SamplingRows(2, CPU, ENDS)
    bias = {token: token / 100 for token in range(500, 500 + MAX_BIASES)}
    stops = tuple(range(100, 100 + MAX_STOP_TOKENS))
    rows.write([admit(1, SamplingParams(temperature=0.0, seed=1, logit_bias=bias, stop_token_ids=stops, min_tokens=9))])
    got = scores(logits.double(), gather(rows, [1], [5], known))[0]
    expected = logits[0].double()
    for token, value in bias.items():
        expected[token] += value
    expected[[*stops, *ENDS]] = -torch.inf
    assert torch.equal(got, expected)


def test_rows_without_wishes_cost_nothing() -> None:
    rows = SamplingRows(3, CPU, ENDS)
    rows.write([admit(1, PLAIN), admit(2, EVERYTHING)])
    _, known = inputs(2)
    batch = gather(rows, [1], [5], known)
    assert all(getattr(batch, part) is None for part in ("biases", "penalties", "free", "few", "filtered"))


def test_an_admission_without_a_seed_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="row 1 was admitted without a seed"):
        SamplingRows(2, CPU).write([admit(1, SamplingParams())])
