"""Made-up prompts: lengths, sharing, and the same from the same seed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hiserve.bench.datasets.synthetic import check_fits, draw_lengths, random_prompts, shared_prefixes
from hiserve.bench.workload import Turn, Workload, mirrored
from hiserve.errors import ConfigError

RANDOM: dict[str, Any] = {
    "num_prompts": 50,
    "input_length": 100,
    "output_length": 20,
    "range_ratio": 0.0,
    "vocab_size": 300,
    "seed": 42,
}
SHARED: dict[str, Any] = {
    "num_groups": 4,
    "prompts_per_group": 5,
    "system_length": 60,
    "question_length": 10,
    "output_length": 7,
    "num_prompts": None,
    "vocab_size": 300,
    "seed": 42,
}


def prompts(workload: Workload) -> list[list[int]]:
    return [np.asarray(turns[0].prompt).tolist() for turns in workload.sessions]


def test_a_ratio_of_zero_is_exactly_the_length() -> None:
    workload = random_prompts(**RANDOM)
    assert {len(prompt) for prompt in prompts(workload)} == {100}
    assert {turns[0].max_tokens for turns in workload.sessions} == {20}
    ids = {index for prompt in prompts(workload) for index in prompt}
    assert ids <= set(range(300))
    assert len(ids) > 290


def test_a_ratio_spans_both_sides_of_the_length_ends_included() -> None:
    lengths = draw_lengths(np.random.default_rng(42), 20_000, 10, 0.5)
    assert set(lengths) == set(range(5, 16))
    assert np.mean(lengths) == pytest.approx(10, abs=0.1)
    assert min(draw_lengths(np.random.default_rng(42), 1000, 3, 1.0)) == 1


def test_the_same_seed_gives_the_same_requests() -> None:
    def make(seed: int) -> Workload:
        return random_prompts(**RANDOM | {"seed": seed, "range_ratio": 0.3})

    assert prompts(make(1)) == prompts(make(1))
    assert prompts(make(1)) != prompts(make(2))


def test_random_prompts_share_nothing() -> None:
    found = prompts(random_prompts(**RANDOM))
    assert len({tuple(prompt[:4]) for prompt in found}) == len(found)


def test_each_group_shares_its_system_prompt_in_shuffled_order() -> None:
    found = prompts(shared_prefixes(**SHARED))
    groups = [tuple(prompt[:60]) for prompt in found]
    assert {groups.count(group) for group in groups} == {5}
    assert len(set(groups)) == 4
    assert len({tuple(prompt) for prompt in found}) == 20
    assert {len(prompt) for prompt in found} == {70}
    assert sum(first != second for first, second in itertools.pairwise(groups)) > 8
    assert found == prompts(shared_prefixes(**SHARED))
    assert found != prompts(shared_prefixes(**SHARED | {"seed": 43}))


def test_fewer_prompts_are_the_first_of_the_shuffled_ones() -> None:
    assert prompts(shared_prefixes(**SHARED | {"num_prompts": 3})) == prompts(shared_prefixes(**SHARED))[:3]


def test_what_cannot_fit_is_refused_before_it_is_sent() -> None:
    workload = random_prompts(**RANDOM)
    check_fits(workload, 120)
    check_fits(workload, None)
    with pytest.raises(ConfigError, match=r"takes 120 tokens.*context is 119"):
        check_fits(workload, 119)


def test_what_a_chat_will_grow_to_must_fit() -> None:
    turn = Turn(prompt=np.zeros(10, dtype=np.int32), max_tokens=5, extends=True)
    check_fits(Workload(name="chat", sessions=[[turn] * 3]), 45)
    with pytest.raises(ConfigError, match=r"takes 45 tokens"):
        check_fits(Workload(name="chat", sessions=[[turn] * 3]), 44)


def test_a_mirrored_prompt_has_the_size_and_not_the_beginning() -> None:
    assert mirrored("abc") == "cba"
    assert np.asarray(mirrored(np.array([1, 2, 3]))).tolist() == [3, 2, 1]
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert mirrored(chat) == [{"role": "user", "content": "olleh"}]
