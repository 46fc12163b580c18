"""Token-id prompts drawn from the vocabulary: random ones, and groups that share a prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hiserve.bench.workload import Turn, Workload
from hiserve.core.plan import Int32Array
from hiserve.errors import ConfigError


def draw_tokens(rng: np.random.Generator, count: int, vocab_size: int) -> Int32Array:
    return rng.integers(0, vocab_size, size=count, dtype=np.int32)


def draw_lengths(rng: np.random.Generator, count: int, length: int, range_ratio: float) -> list[int]:
    """Returns lengths drawn uniformly from [length x (1 - ratio), length x (1 + ratio)], both ends included.

    This is vLLM's convention: a ratio of 0.0 is exactly ``length``. (SGLang's ratio is another one: its 1.0
    is exactly ``length``, and its 0.0 draws from 1 to ``length``.)
    """
    low, high = max(1, math.floor(length * (1 - range_ratio))), math.ceil(length * (1 + range_ratio))
    return [int(value) for value in rng.integers(low, high, size=count, endpoint=True)]


def random_prompts(
    *, num_prompts: int, input_length: int, output_length: int, range_ratio: float, vocab_size: int, seed: int
) -> Workload:
    """Returns requests that share nothing; lengths vary as in ``draw_lengths``."""
    rng = np.random.default_rng(seed)
    inputs = draw_lengths(rng, num_prompts, input_length, range_ratio)
    outputs = draw_lengths(rng, num_prompts, output_length, range_ratio)
    sessions = [
        [Turn(prompt=draw_tokens(rng, num_input, vocab_size), max_tokens=num_output)]
        for num_input, num_output in zip(inputs, outputs, strict=True)
    ]
    return Workload(name="random", sessions=sessions)


def shared_prefixes(
    *,
    num_groups: int,
    prompts_per_group: int,
    system_length: int,
    question_length: int,
    output_length: int,
    num_prompts: int | None,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Returns groups of requests, each with one system prompt, in shuffled order, the first ``num_prompts``."""
    rng = np.random.default_rng(seed)
    turns = []
    for _ in range(num_groups):
        system = draw_tokens(rng, system_length, vocab_size)
        for _ in range(prompts_per_group):
            prompt = np.concatenate([system, draw_tokens(rng, question_length, vocab_size)])
            turns.append(Turn(prompt=prompt, max_tokens=output_length))
    order = rng.permutation(len(turns))[:num_prompts]
    return Workload(name="shared-prefix", sessions=[[turns[index]] for index in order])


def conversations(
    *,
    count: int,
    lengths: Sequence[int],
    output_length: int,
    vocab_size: int,
    seed: int,
    think_s: float = 0.0,
    shared_length: int = 0,
) -> list[list[Turn]]:
    """Returns sessions, each prompt of which is all that was said before it and new random tokens, ``lengths`` of them.

    All first prompts begin with the same ``shared_length`` tokens more.
    """
    rng = np.random.default_rng(seed)
    shared = draw_tokens(rng, shared_length, vocab_size)
    sessions: list[list[Turn]] = []
    for _ in range(count):
        prompts = [draw_tokens(rng, length, vocab_size) for length in lengths]
        prompts[0] = np.concatenate([shared, prompts[0]])
        pauses = [0.0, *[think_s] * (len(lengths) - 1)]
        sessions.append(
            [
                Turn(prompt=prompt, max_tokens=output_length, think_s=pause_s, extends=True)
                for prompt, pause_s in zip(prompts, pauses, strict=True)
            ]
        )
    return sessions


def check_fits(workload: Workload, max_model_len: int | None) -> None:
    """Checks that prompts and replies of synthetic requests fit the model's context; None is not known.

    Raises ConfigError.
    """
    longest = 0
    for turns in workload.sessions:
        length = 0
        for turn in turns:
            length = (length if turn.extends else 0) + len(turn.prompt) + turn.max_tokens
            longest = max(longest, length)
    if max_model_len is not None and longest > max_model_len:
        raise ConfigError(
            f"the longest request of {workload.name} takes {longest} tokens, prompt and reply; the model's context "
            f"is {max_model_len}. Ask for shorter ones.",
        )
