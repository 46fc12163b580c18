"""What users ask in a soak, how they read the answers, and what they got."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from hiserve.bench.datasets.chats import Dialogue
from hiserve.bench.datasets.files import read_lines
from hiserve.bench.datasets.synthetic import draw_tokens
from hiserve.bench.options import SoakOptions
from hiserve.bench.spec.spec_prompts import HELD_OUT
from hiserve.bench.target import Target
from hiserve.bench.workload import Prompt, Sample, Turn

# Tokens of a chat's template and of what no history may come near.
MARGIN = 64

Source: TypeAlias = Literal["chat", "agent"]
Way: TypeAlias = Literal["read", "slow", "cancelled", "burst"]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One request that users repeat.

    Attributes:
        prompt: What is sent: a dialogue's messages, or an agent's token ids.
        is_drawn: The reply is sampled, with a seed; otherwise greedy.
    """

    prompt: Prompt
    max_tokens: int
    is_drawn: bool

    @property
    def source(self) -> Source:
        """Who asks."""
        return "chat" if isinstance(self.prompt, list) else "agent"


class SentQuestion(msgspec.Struct, kw_only=True):
    """A question that was sent.

    Attributes:
        way: How the answer was read: to its end, slowly, until the user left, or as one of many at once.
    """

    question: int
    way: Way
    sample: Sample = msgspec.field(default_factory=Sample)


# Questions that follow one another: each prompt begins like the one before.
Session: TypeAlias = list[int]


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """All questions by index, and the indices of each session's questions."""

    all: list[Question]
    sessions: list[Session]


def build(soak: SoakOptions, target: Target, seed: int) -> Questions:
    """Returns dialogues that come along, and agents that share a long prefix; every second session is sampled.

    Raises:
        ConfigError: The size of the vocabulary is not known.
    """
    room = (target.max_model_len or 1 << 30) - soak.output_length - MARGIN
    dialogues = islice(_dialogues(soak, room), soak.num_dialogues)
    found: list[Question] = []
    sessions: list[Session] = []
    for turns in [*dialogues, *_agents(soak, target, room, seed)]:
        is_drawn, first = len(sessions) % 2 == 1, len(found)
        found += [Question(prompt=turn.prompt, max_tokens=turn.max_tokens, is_drawn=is_drawn) for turn in turns]
        sessions.append(list(range(first, len(found))))
    return Questions(all=found, sessions=sessions)


def _dialogues(soak: SoakOptions, room: int) -> Iterator[list[Turn]]:
    """Yields the dialogues of several turns: each user message after the recorded history."""
    for dialogue in read_lines(HELD_OUT, Dialogue, "chats"):
        messages = dialogue.as_sent()
        histories = [messages[: index + 1] for index, message in enumerate(messages) if message["role"] == "user"]
        # A token is at least a byte.
        fitting = [each for each in histories if sum(len(said["content"].encode()) for said in each) <= room]
        if len(fitting) > 1:
            yield [Turn(prompt=each, max_tokens=soak.output_length) for each in fitting[: soak.num_turns]]


def _agents(soak: SoakOptions, target: Target, room: int, seed: int) -> list[list[Turn]]:
    """Returns agents that begin alike and learn something new in each turn, as token ids."""
    rng, size = np.random.default_rng(seed), target.require_vocab_size()
    shared = draw_tokens(rng, soak.prefix_length, size)
    sessions = []
    for _ in range(soak.num_agents):
        prompt, turns = shared, []
        for _ in range(soak.num_turns):
            prompt = np.concatenate([prompt, draw_tokens(rng, soak.turn_length, size)])
            if prompt.size <= room:
                turns.append(Turn(prompt=prompt, max_tokens=soak.output_length))
        if turns:
            sessions.append(turns)
    return sessions
