"""The whole engine in one process against transformers, in float64: cache, planner, executor.

Each case asserts by counters that the path it is about really ran. It is about no model: logits and tokens of the others
are those of ``test_transformers_oracle.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.models import load_transformers
from tests.helpers.oracle import MODELS, NUM_NEW, SAMPLED, Subject, continuation, engine_of, generate, make_subject
from tests.helpers.plans import GREEDY
from tests.helpers.widening import some

KINDS = {"greedy": GREEDY, "sampled": SAMPLED}


def matrix(values: tuple[int, ...]) -> list[Any]:
    """Values x depth x kind: each value once in the usual run, every pair in the wide one, the full product in the long one."""
    ways = [(0, "greedy"), (1, "sampled"), (0, "sampled"), (1, "greedy")]
    found = []
    for index, value in enumerate(values):
        for place, (depth, kind) in enumerate(ways):
            marks = (
                []
                if place == (1 + index) % 4
                else [pytest.mark.wide if place // 2 == (1 + index) % 4 // 2 else pytest.mark.long]
            )
            found.append(pytest.param(value, depth, kind, marks=marks))
    return found


@pytest.fixture(scope="module", params=some(MODELS, "qwen3"))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("chunk", "depth", "kind"), matrix((1, 7, 16, 64)))
def test_ragged_batches_in_chunks(subject: Subject, chunk: int, depth: int, kind: str) -> None:
    engine = engine_of(subject, chunk=chunk, depth=depth)
    assert generate(engine, subject.prompts, KINDS[kind]) == getattr(subject, kind)
    total = sum(len(prompt) + NUM_NEW - 1 for prompt in subject.prompts.values())
    assert engine.stats().steps >= -(-total // chunk)
    engine.close()


@pytest.mark.parametrize(("page_size", "depth", "kind"), matrix((1, 4, 16)))
def test_a_second_request_over_the_first_ones_prefix(subject: Subject, page_size: int, depth: int, kind: str) -> None:
    engine = engine_of(subject, depth=depth, page_size=page_size, kv_pages=1000 // page_size)
    assert generate(engine, subject.prompts, KINDS[kind]) == getattr(subject, kind)
    assert engine.stats().cached_tokens == 0
    assert generate(engine, subject.prompts, KINDS[kind]) == getattr(subject, kind)
    cached = sum((len(prompt) - 1) // page_size * page_size for prompt in subject.prompts.values())
    assert engine.stats().cached_tokens == cached > 0
    engine.close()


@pytest.mark.parametrize("depth", some([0, 1], 1))
def test_a_second_turn_over_the_first_ones_reply(subject: Subject, depth: int) -> None:
    engine = engine_of(subject, depth=depth)
    first = generate(engine, subject.prompts)
    turns = {uid: [*prompt, *first[uid], *prompt[:5]] for uid, prompt in subject.prompts.items()}
    oracle = load_transformers(subject.folder, torch.float64)
    expected = {uid: continuation(oracle, prompt) for uid, prompt in turns.items()}
    assert generate(engine, turns) == expected
    history = sum(len(prompt) + NUM_NEW for prompt in subject.prompts.values())
    assert engine.stats().cached_tokens >= history - 4 * 2 * len(turns)
    engine.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_share_a_prefix_in_flight(subject: Subject, depth: int) -> None:
    """The second waits for pages that the first is computing, or computes them too; both are right."""
    engine = engine_of(subject, chunk=16, depth=depth)
    prompt = subject.prompts[4]
    prompts = {1: prompt, 2: prompt, 3: subject.prompts[1]}
    assert generate(engine, prompts) == {1: subject.greedy[4], 2: subject.greedy[4], 3: subject.greedy[1]}
    assert engine.stats().cached_tokens > 0
    engine.close()


@pytest.mark.parametrize(("spare", "depth", "kind"), matrix((6, 12)))
def test_a_pool_too_small_for_all(subject: Subject, spare: int, depth: int, kind: str) -> None:
    """Rows lose their pages half-way and come back; what they wrote is evicted meanwhile."""
    longest = max(len(prompt) for prompt in subject.prompts.values()) + NUM_NEW
    engine = engine_of(subject, chunk=16, depth=depth, kv_pages=1 + -(-longest // 4) + spare)
    assert generate(engine, subject.prompts, KINDS[kind]) == getattr(subject, kind)
    assert generate(engine, subject.prompts, KINDS[kind]) == getattr(subject, kind)
    stats = engine.stats()
    assert stats.preemptions >= 1
    assert stats.evicted_pages >= 1
    engine.close()
