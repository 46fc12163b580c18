"""Recorded data: traces keep times and sharing, chats their history, agents their order; what is cut is counted."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiserve.bench.datasets.recorded import (
    agent_sessions,
    chats,
    conversation_trace,
    cut_front,
    read_rows,
    text_like_it,
)
from hiserve.bench.workload import Workload
from hiserve.errors import ConfigError


class Words:
    """Counts words, and how often it was asked."""

    is_exact = True

    def __init__(self) -> None:
        self.num_asked = 0

    async def count(self, text: str) -> int:
        self.num_asked += 1
        return len(text.split())


def write(path: Path, rows: list[Any]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# --- conversation trace -----------------------------------------------------------------------

TRACE = [
    {"timestamp": 0, "input_length": 1500, "output_length": 300, "hash_ids": [0, 1, 2]},
    {"timestamp": 250, "input_length": 2048, "output_length": 1, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 9000, "input_length": 600, "output_length": 40, "hash_ids": [5, 6]},
]
OPTIONS: dict[str, Any] = {
    "speed": 1.0,
    "block_tokens": 512,
    "num_prompts": None,
    "max_model_len": None,
    "vocab_size": 1000,
    "seed": 42,
}


def trace(folder: Path, **options: Any) -> Workload:
    return conversation_trace(write(folder / "trace.jsonl", TRACE), **OPTIONS | options)


def ids(workload: Workload, index: int) -> list[int]:
    return np.asarray(workload.sessions[index][0].prompt).tolist()


def test_the_same_hash_is_the_same_block(tmp_path: Path) -> None:
    workload = trace(tmp_path)
    assert [len(ids(workload, index)) for index in range(3)] == [1500, 2048, 600]
    assert ids(workload, 0)[:1024] == ids(workload, 1)[:1024]
    assert ids(workload, 0)[1024:1500] != ids(workload, 1)[1024:1500]
    assert ids(workload, 2)[:100] != ids(workload, 0)[:100]
    assert [turns[0].max_tokens for turns in workload.sessions] == [300, 1, 40]
    assert ids(workload, 1) == ids(trace(tmp_path), 1)
    assert ids(workload, 1) != ids(trace(tmp_path, seed=43), 1)


@pytest.mark.parametrize(("speed", "times"), [(1.0, [0, 0.25, 9]), (2.0, [0, 0.125, 4.5]), (math.inf, [0, 0, 0])])
def test_recorded_times_are_divided_by_the_speed(tmp_path: Path, speed: float, times: list[float]) -> None:
    assert [turns[0].at_s for turns in trace(tmp_path, speed=speed).sessions] == times


def test_smaller_blocks_shrink_prompts_and_replies_and_keep_what_is_shared(tmp_path: Path) -> None:
    workload = trace(tmp_path, block_tokens=16)
    assert [len(ids(workload, index)) for index in range(3)] == [47, 64, 19]
    assert [turns[0].max_tokens for turns in workload.sessions] == [9, 1, 1]
    assert ids(workload, 0)[:32] == ids(workload, 1)[:32]


def test_prompts_are_cut_at_the_end_and_counted(tmp_path: Path) -> None:
    workload = trace(tmp_path, max_model_len=1000)
    assert [len(ids(workload, index)) for index in range(3)] == [700, 999, 600]
    assert ids(workload, 1) == ids(trace(tmp_path), 1)[:999]
    assert workload.notes == {"prompts_cut": 2, "replies_cut": 0}
    assert trace(tmp_path, max_model_len=100).notes == {"prompts_cut": 3, "replies_cut": 1}


def test_only_the_first_so_many_are_taken(tmp_path: Path) -> None:
    assert trace(tmp_path, num_prompts=2).num_turns == 2


# --- chats ------------------------------------------------------------------------------------


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


DIALOGUES = [
    {
        "id": "x",
        "messages": [
            say("system", "be brief"),
            say("user", "one"),
            say("assistant", "a b c"),
            say("user", "two"),
            say("assistant", "d"),
        ],
    },
    {"messages": [say("assistant", "welcome")]},
    {"messages": [say("user", "three")]},
]


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz"])
async def test_every_message_of_the_user_is_a_request_with_its_recorded_history(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, DIALOGUES)
    workload = await chats(path, counter=Words(), num_prompts=None, output_length=None)
    messages = DIALOGUES[0]["messages"]
    assert [[turn.prompt for turn in turns] for turns in workload.sessions] == [
        [messages[:2], messages[:4]],
        [[say("user", "three")]],
    ]
    assert [[turn.max_tokens for turn in turns] for turns in workload.sessions] == [[3, 1], [1]]


async def test_chats_are_cut_to_a_number_of_requests_and_a_length(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", DIALOGUES)
    assert (await chats(path, counter=Words(), num_prompts=1, output_length=None)).num_turns == 1
    assert (await chats(path, counter=Words(), num_prompts=2, output_length=None)).num_turns == 2
    workload = await chats(path, counter=Words(), num_prompts=None, output_length=9)
    assert {turn.max_tokens for turns in workload.sessions for turn in turns} == {9}
    assert "welcome\nthree" in text_like_it(path)


# --- agent sessions ---------------------------------------------------------------------------

AGENTS = [
    {"session_id": "b", "timestamp_us": 3_000_000, "input": "task\n\nmore\n\nlast", "output": "done"},
    {"session_id": "a", "timestamp_us": 1_000_000, "input": "go", "output": "x y"},
    {"session_id": "b", "timestamp_us": 2_000_000, "input": "task", "output": ""},
    {"session_id": "a", "timestamp_us": 4_000_000, "input": "", "output": "nothing"},
]


async def agents(path: Path, **options: Any) -> Workload:
    rows, num_empty = read_rows(path, options.pop("num_prompts", None))
    given = {"speed": 1.0, "max_model_len": None, "output_length": None, "reserve": 0, "counter": Words()}
    return await agent_sessions(rows, num_empty, **given | options)


async def test_agents_keep_their_times_their_order_and_their_sessions(tmp_path: Path) -> None:
    path = write(tmp_path / "agents.jsonl.gz", AGENTS)
    workload = await agents(path, speed=2.0)
    found = [[(turn.prompt, turn.at_s, turn.max_tokens) for turn in turns] for turns in workload.sessions]
    assert found == [[("go", 0.0, 2)], [("task", 0.5, 1), ("task\n\nmore\n\nlast", 1.0, 1)]]
    assert workload.notes == {"prompts_cut": 0, "replies_cut": 0, "empty_prompts_left_out": 1}
    assert (await agents(path, num_prompts=2)).num_turns == 2


async def test_long_prompts_lose_messages_from_the_front_and_are_counted(tmp_path: Path) -> None:
    messages = [f"message {index} {'word ' * 10}".strip() for index in range(20)]
    rows = [
        {"session_id": "a", "timestamp_us": index, "input": "\n\n".join(messages[: index + 1]), "output": "ok " * 30}
        for index in range(20)
    ]
    path = write(tmp_path / "agents.jsonl", rows)
    workload = await agents(path, max_model_len=100, output_length=4, reserve=2)
    (turns,) = workload.sessions
    room = 100 - 4 - 2
    for index, turn in enumerate(turns):
        first = max(0, index + 1 - room // 12)
        assert turn.prompt == "\n\n".join(messages[first : index + 1])
    assert workload.notes["prompts_cut"] == 20 - room // 12
    capped = await agents(path, max_model_len=40)
    assert capped.notes["replies_cut"] == 20
    assert {turn.max_tokens for turn in capped.sessions[0]} == {20}


async def test_a_message_longer_than_the_room_is_cut_inside() -> None:
    text = "first one\n\n" + " ".join(f"w{index}" for index in range(100))
    cut = await cut_front(text, 10, Words())
    assert text.endswith(cut)
    assert len(cut.split()) == 10


async def test_a_cut_takes_few_counts_and_a_short_text_none() -> None:
    counter = Words()
    text = "\n\n".join("some words here" for _ in range(5000))
    assert len((await cut_front(text, 300, counter)).split()) == 300
    assert counter.num_asked < 20
    counter.num_asked = 0
    assert await cut_front("short", 6, counter) == "short"
    assert counter.num_asked == 0


# --- files ------------------------------------------------------------------------------------


async def test_a_file_that_does_not_do_is_named_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(ConfigError, match=r"cannot read --path .*x\.jsonl"):
        read_rows(path, None)
    path.write_text('{"messages": []}\n\n{"messages": 3}\n')
    with pytest.raises(ConfigError, match="line 3: not a row of chats"):
        await chats(path, counter=Words(), num_prompts=None, output_length=None)
    path.write_text('{"messages": []}\n')
    with pytest.raises(ConfigError, match="no message of a user"):
        await chats(path, counter=Words(), num_prompts=None, output_length=None)
    path.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        conversation_trace(path, **OPTIONS)
    with pytest.raises(ConfigError, match="has no prompts"):
        read_rows(path, None)
    bad = tmp_path / "y.jsonl.gz"
    bad.write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot read"):
        read_rows(bad, None)
    bad.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    with pytest.raises(ConfigError):
        read_rows(bad, None)
