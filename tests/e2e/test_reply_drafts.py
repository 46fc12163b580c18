"""Replies that come again: nearly every draft is accepted, no token changes, and nothing is kept where requests share nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.core.usage import DraftStats, DraftUse
from tests.helpers.cache_paths import SMALL_MODEL, pool
from tests.helpers.tiered import engine_of

NUM_NEW, NUM_DRAFT = 24, 5
NGRAM = {"spec": "ngram", "spec_steps": NUM_DRAFT}
# Drawn: a greedy reply to these repeats itself soon, and its own tokens foresee it.
SAMPLING = [SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_NEW, ignore_eos=True) for seed in range(2)]


def prompts() -> list[list[int]]:
    return np.random.default_rng(47).integers(7, 4096, (2, 20)).tolist()


def ask(llm: LLM) -> tuple[list[list[int]], DraftUse]:
    """Returns the tokens, and all drafts of the replies together."""
    results = llm.generate(prompts(), SAMPLING)
    use = sum((result.outputs[0].drafts or DraftUse() for result in results), DraftUse())
    return [result.outputs[0].token_ids for result in results], use


def stats_of(llm: LLM) -> DraftStats:
    return engine_of(llm).stats().drafts


def engine(**settings: Any) -> LLM:
    return LLM(**SMALL_MODEL | pool(16) | {"host_cache_gib": 0} | NGRAM | settings)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with engine(spec="off", spec_steps="auto", disable_prefix_cache=True) as llm:
        return ask(llm)[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_drafts_of_a_reply_that_comes_again_are_accepted(expected: list[list[int]], depth: int) -> None:
    with engine(overlap=depth) as llm:
        tokens, first = ask(llm)
        assert not stats_of(llm).reply_searches["found"]
        again, second = ask(llm)
        assert tokens == again == expected
        assert first.accept_length < 1.5
        # The last drafts pass the end of a reply.
        assert second.accept_length > 0.7 * (1 + NUM_DRAFT)
        assert stats_of(llm).reply_searches["found"] > 0.9 * second.verify_steps
        assert llm.flush() > 0
        tokens, third = ask(llm)
        assert tokens == expected
        assert third.accept_length == first.accept_length, "a flush leaves replies"


@pytest.mark.parametrize("settings", [{"spec_history": 0}, {"disable_prefix_cache": True}], ids=str)
def test_no_replies_are_kept_where_requests_share_nothing(expected: list[list[int]], settings: dict[str, Any]) -> None:
    with engine(**settings) as llm:
        (tokens, first), (again, second) = ask(llm), ask(llm)
        assert tokens == again == expected
        assert first == second
        assert (stats_of(llm).reply_searches, stats_of(llm).kept_reply_tokens) == ({}, 0)
