"""What is sent: lengths, sharing, scale, and what does not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiserve.bench.cache_run import Requests, build
from hiserve.bench.datasets.recorded import shortened
from hiserve.bench.options import CacheLoadOptions, filled
from hiserve.bench.target import Encoder, Target
from hiserve.core.plan import Int32Array
from hiserve.errors import ConfigError


class Letters:
    """A token for each character."""

    async def encode(self, text: str) -> Int32Array:
        return np.array([ord(letter) for letter in text], dtype=np.int32)


async def encoder() -> Encoder:
    return Letters()


async def made(max_model_len: int | None = None, seed: int = 1, **fields: Any) -> Requests:
    target = Target(model="m", max_model_len=max_model_len, vocab_size=1000, version=None)
    load = filled(CacheLoadOptions(**fields), device=None, max_model_len=None)
    return await build(load, target, encoder, seed)


def lengths(requests: Requests) -> list[list[int]]:
    return [[len(turn.prompt) for turn in turns] for turns in requests.workload.sessions]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def test_conversations_begin_long_and_grow() -> None:
    requests = await made(num_conversations=3, num_rounds=4, conversation_length=100, request_length=8)
    assert lengths(requests) == [[100, 8, 8, 8]] * 3
    turns = [turn for session in requests.workload.sessions for turn in session]
    assert all(turn.extends and turn.max_tokens == 16 for turn in turns)
    assert len({np.asarray(turn.prompt).tobytes() for turn in turns}) == 12
    again = await made(num_conversations=3, num_rounds=4, conversation_length=100, request_length=8)
    assert np.array_equal(np.asarray(again.workload.sessions[2][3].prompt), np.asarray(turns[-1].prompt))


async def test_the_scale_is_of_prompts_and_not_of_replies_that_were_asked_for() -> None:
    sizes = {"conversation_length": 100, "request_length": 8, "num_conversations": 1, "num_rounds": 2}
    requests = await made(length_scale=0.25, output_length=12, **sizes)
    assert lengths(requests) == [[25, 2]]
    assert requests.workload.sessions[0][0].max_tokens == 12


async def test_conversations_that_outgrow_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="context is 300"):
        await made(max_model_len=300, conversation_length=200, request_length=50, num_rounds=3)


async def test_suffixes_share_their_prefix() -> None:
    requests = await made(
        load="shared-prefix",
        num_prefixes=2,
        suffixes_per_prefix=3,
        prefix_length=40,
        suffix_length=10,
        length_scale=0.5,
    )
    prompts = [np.asarray(turns[0].prompt).tolist() for turns in requests.workload.sessions]
    assert {len(prompt) for prompt in prompts} == {25}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 6


TRACE = [
    {"timestamp": 0, "input_length": 1500, "output_length": 320, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 64, "hash_ids": [0, 1]},
]


async def test_the_trace_is_scaled_by_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", TRACE)
    requests = await made(load="conversation-trace", path=path, length_scale=1 / 32, speed=2.0)
    assert lengths(requests) == [[47], [32]]
    first, second = (turns[0] for turns in requests.workload.sessions)
    assert np.asarray(first.prompt).tolist()[:32] == np.asarray(second.prompt).tolist()
    assert (first.max_tokens, second.max_tokens, second.at_s) == (10, 2, 1.5)
    shorter = await made(load="conversation-trace", path=path, length_scale=1 / 32, output_length=4)
    assert [turns[0].max_tokens for turns in shorter.workload.sessions] == [4, 2]


def agents(folder: Path) -> Path:
    """Two sessions; the second prompt of each repeats the first."""
    texts = [("a", "aaaaaaaa\n\nbbbb"), ("b", "cccc"), ("a", "aaaaaaaa\n\nbbbb\n\ndddddddd"), ("b", "cccc\n\ne")]
    rows = [
        {"session_id": name, "timestamp_us": at * 10**6, "input": text, "output": "xx"}
        for at, (name, text) in enumerate(texts)
    ]
    return write(folder / "agents.jsonl", rows)


async def test_sessions_are_sent_as_text_and_their_tokens_are_known(tmp_path: Path) -> None:
    requests = await made(load="agent-sessions", path=agents(tmp_path), speed=2.0)
    found = [[(turn.prompt, turn.max_tokens, turn.at_s) for turn in turns] for turns in requests.workload.sessions]
    assert found == [
        [("aaaaaaaa\n\nbbbb", 2, 0.0), ("aaaaaaaa\n\nbbbb\n\ndddddddd", 2, 1.0)],
        [("cccc", 2, 0.5), ("cccc\n\ne", 2, 1.5)],
    ]
    assert {text: bytes(ids.tolist()).decode() for text, ids in requests.encoded.items()} == {
        text: text for turns in found for text, _, _ in turns
    }


async def test_a_session_ends_before_the_prompt_that_does_not_fit(tmp_path: Path) -> None:
    requests = await made(max_model_len=20, load="agent-sessions", path=agents(tmp_path), speed=math.inf)
    assert lengths(requests) == [[14], [4, 7]]
    assert requests.workload.notes["too_long_prompts_left_out"] == 1
    with pytest.raises(ConfigError, match="--length-scale"):
        await made(max_model_len=5, load="agent-sessions", path=agents(tmp_path))


async def test_scaled_sessions_keep_what_they_share(tmp_path: Path) -> None:
    requests = await made(load="agent-sessions", path=agents(tmp_path), length_scale=0.5)
    first, second = (turn.prompt for turn in requests.workload.sessions[0])
    assert (first, second) == ("aaaa\n\nbb", "aaaa\n\nbb\n\ndddd")


@pytest.mark.parametrize(
    ("text", "scale", "wanted"),
    [("abcd", 0.5, "ab"), ("a\n\n\nbcde\n\n", 0.25, "a\n\n\nb\n\n"), ("abc\ndef", 1.0, "abc\ndef"), ("", 0.5, "")],
)
def test_a_shortened_text_keeps_its_blank_lines(text: str, scale: float, wanted: str) -> None:
    assert shortened(text, scale) == wanted


@pytest.mark.parametrize("load", ["conversation-trace", "agent-sessions"])
async def test_a_recording_needs_a_file(load: Any) -> None:
    with pytest.raises(ConfigError, match="give --path"):
        await made(load=load)
