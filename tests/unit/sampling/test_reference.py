"""Every parameter, alone and with the others, against the same rules in plain Python."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiserve.core.request import SamplingParams
from hiserve.kernels.noise import gumbel
from hiserve.kernels.step_reference import SAMPLE_STREAM
from hiserve.sampling.params import SamplingRows
from hiserve.sampling.sampler import MAX_FEW, scores
from tests.helpers.sampling import CPU, admit, gather, wanted_logits

VOCAB, ENDS = 2 * MAX_FEW + 3, (1, 77)
TOKENS = st.integers(0, VOCAB - 1)
KNOWN = st.integers(0, 12)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    """Each field is at rest in about half of the examples."""

    def maybe(default: object, strategy: st.SearchStrategy) -> object:
        return draw(st.one_of(st.just(default), strategy))

    return SamplingParams(
        temperature=maybe(0.0, st.floats(0.2, 3.0)),
        top_k=maybe(0, st.integers(1, VOCAB + 5)),
        top_p=maybe(1.0, st.floats(0.05, 0.999)),
        min_p=maybe(0.0, st.floats(0.001, 1.0)),
        repetition_penalty=maybe(1.0, st.floats(0.3, 3.0)),
        presence_penalty=maybe(0.0, st.floats(-2.0, 2.0)),
        frequency_penalty=maybe(0.0, st.floats(-2.0, 2.0)),
        logit_bias=maybe(None, st.dictionaries(KNOWN | TOKENS, st.floats(-100.0, 100.0), max_size=6)),
        min_tokens=maybe(0, st.integers(1, 8)),
        stop_token_ids=maybe((), st.lists(TOKENS, max_size=4).map(tuple)),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


ROWS = st.lists(
    st.tuples(parameters(), st.lists(KNOWN, min_size=1, max_size=14), st.integers(1, 14)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(0, 2**32 - 1))
def test_scores_less_their_noise_are_what_the_rules_say(
    asked: list[tuple[SamplingParams, list[int], int]], seed: int
) -> None:
    """Ragged histories of few distinct tokens; what lies behind a row's position must not count."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(asked), VOCAB)))
    rows = SamplingRows(len(asked) + 1, CPU, ENDS)
    known = torch.randint(0, 13, (len(asked) + 1, 16), dtype=torch.int32)
    requests = []
    for row, (params, tokens, num_prompt) in enumerate(asked, start=1):
        known[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        requests.append(admit(row, params, 0, tokens, min(num_prompt, len(tokens))))
    rows.write(requests)
    positions = [len(tokens) for _, tokens, _ in asked]
    got = scores(logits, gather(rows, range(1, len(asked) + 1), positions, known))
    for index, request in enumerate(requests):
        params, tokens = request.sampling, request.tokens.tolist()
        wanted = np.array(wanted_logits(logits[index].tolist(), params, tokens, request.num_prompt, ENDS))
        noise = np.zeros(VOCAB)
        if params.temperature > 0:
            key = (torch.tensor([each]) for each in (params.seed, 0, len(tokens)))
            noise = gumbel(*key, SAMPLE_STREAM, VOCAB)[0].numpy()
        found = got[index].numpy() - noise
        assert np.array_equal(np.isinf(found), np.isinf(wanted)), (params, tokens)
        finite = np.isfinite(wanted)
        np.testing.assert_allclose(found[finite], wanted[finite], rtol=1e-9, atol=1e-9)


def test_the_same_row_at_several_positions_knows_the_tokens_before_each() -> None:
    """As verification asks: what stands at or behind a position is not known there."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3, min_tokens=2, seed=1)
    tokens, num_prompt = [5, 6, 5, 7, 7, 6], 2
    rows = SamplingRows(2, CPU, ENDS)
    rows.write([admit(1, params, 0, tokens[:3], num_prompt)])
    known = torch.tensor([[0] * 6, tokens], dtype=torch.int32)
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 3, (4, VOCAB)))
    got = scores(logits, gather(rows, [1] * 4, [3, 4, 5, 6], known))
    for index, position in enumerate((3, 4, 5, 6)):
        wanted = wanted_logits(logits[index].tolist(), params, tokens[:position], num_prompt, ENDS)
        np.testing.assert_allclose(got[index].numpy(), wanted, rtol=1e-12)
