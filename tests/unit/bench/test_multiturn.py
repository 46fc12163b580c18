"""Chats in rounds: what is sent, what a round shows."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.bench.datasets.synthetic import conversations
from hiserve.bench.options import MultiturnOptions
from hiserve.bench.summary import by_round, num_without_ids
from tests.helpers.samples import run_of, sample

ROUNDS = MultiturnOptions(num_clients=3, num_rounds=2, request_length=10, output_length=4, think_time=1.5)


def test_every_client_has_its_own_new_tokens_each_round() -> None:
    sessions, again = (
        conversations(count=3, lengths=[10, 10], output_length=4, think_s=1.5, vocab_size=1000, seed=42)
        for _ in range(2)
    )
    prompts = [tuple(np.asarray(turn.prompt).tolist()) for turns in sessions for turn in turns]
    assert len(set(prompts)) == 6
    assert {len(prompt) for prompt in prompts} == {10}
    assert [[turn.think_s for turn in turns] for turns in sessions] == [[0.0, 1.5]] * 3
    assert all(turn.extends and turn.max_tokens == 4 for turns in sessions for turn in turns)
    assert np.array_equal(np.asarray(again[2][1].prompt), np.asarray(sessions[2][1].prompt))


def test_a_round_summarises_its_own_samples() -> None:
    run = run_of(
        sample(0.0, 0.1, turn=0, num_prompt=10, num_cached=0),
        sample(0.0, 0.3, turn=0, num_prompt=10, num_cached=2),
        sample(1.0, 1.05, turn=1, num_prompt=24, num_cached=12),
        sample(1.0, 9.0, turn=1, error="connection"),
    )
    first, second = by_round(run, ROUNDS, 4)
    assert (first.number, first.num_ok, first.ttft_ms.mean) == (1, 2, pytest.approx(200))
    assert (first.hit_rate, first.best_hit_rate) == (0.1, 0.0)
    assert (second.num_ok, second.ttft_ms.median) == (1, pytest.approx(50))
    assert (second.hit_rate, second.best_hit_rate) == (0.5, pytest.approx(12 / 24)), "whole pages of the 14 tokens"
    assert by_round(run, ROUNDS, 1)[1].best_hit_rate == pytest.approx(14 / 24)


def test_a_hit_rate_is_not_made_up() -> None:
    run = run_of(sample(0.0, 0.1, turn=0, num_cached=-1))
    first, second = by_round(run, ROUNDS, 1)
    assert first.hit_rate is None
    assert (second.num_ok, second.hit_rate) == (0, None)


def test_replies_without_ids_are_counted() -> None:
    run = run_of(sample(0.0, 0.1), sample(0.0, 0.1, output_ids=[1]), sample(0.0, error="timeout", num_output=1))
    assert num_without_ids(run) == 1
