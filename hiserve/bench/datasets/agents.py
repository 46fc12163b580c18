"""Recorded agent sessions: whole prompts as text, cut from the front where they exceed the context."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hiserve.bench.datasets.files import read_lines
from hiserve.bench.target import Counter
from hiserve.bench.workload import Turn, Workload
from hiserve.errors import ConfigError

# The recordings join messages by blank lines and do not say which blank lines are inside of a message.
BOUNDARY = re.compile(r"\n\n+")


class AgentRecord(msgspec.Struct):
    """One line of the recording: a request's whole prompt, its recorded reply and its time in microseconds."""

    session_id: str
    timestamp_us: int
    input: str
    output: str


def read_rows(path: Path, num_prompts: int | None) -> tuple[list[AgentRecord], int]:
    """Returns the first prompts in the order of their times, and how many rows have none.

    Raises:
        ConfigError: The file cannot be read or has no prompts.
    """
    rows = sorted(read_lines(path, AgentRecord, "agent-sessions"), key=lambda row: row.timestamp_us)
    found = [row for row in rows if row.input]
    if not found:
        raise ConfigError(f"--path {path} has no prompts.", param="path")
    return found[:num_prompts], len(rows) - len(found)


def shortened(text: str, scale: float) -> str:
    """Returns a text whose paragraphs are cut to a share of their characters, at least one each.

    Whole paragraphs that two texts begin with stay common to both.

    Args:
        text: Messages joined by blank lines.
        scale: The share that is left of the front of each paragraph, above 0, at most 1.
    """
    parts = re.split(f"({BOUNDARY.pattern})", text)
    parts[::2] = [paragraph[: math.ceil(len(paragraph) * scale)] for paragraph in parts[::2]]
    return "".join(parts)


async def agent_sessions(
    rows: list[AgentRecord],
    num_empty: int,
    *,
    counter: Counter,
    speed: float,
    max_model_len: int | None,
    output_length: int | None,
    reserve: int,
) -> Workload:
    """Returns one session for each agent; its requests keep their recorded times and wait for one another.

    Args:
        rows: In the order of their times.
        num_empty: Rows left out before, for the notes.
        counter: Counts tokens.
        speed: 2.0 replays twice as fast; infinity lets each request follow the reply before it.
        max_model_len: Longer prompts lose messages from the front, counted as ``prompts_cut``; replies get at
            most half of it, counted as ``replies_cut``.
        output_length: Longest reply, instead of the recorded one's length.
        reserve: Tokens to leave free for what the server puts around a prompt.
    """
    notes = {"prompts_cut": 0, "replies_cut": 0, "empty_prompts_left_out": num_empty}
    sessions: dict[str, list[Turn]] = {}
    for row in rows:
        max_tokens = output_length or max(1, await counter.count(row.output))
        prompt = row.input
        if max_model_len is not None:
            fitting = min(max_tokens, max_model_len // 2)
            notes["replies_cut"] += fitting < max_tokens
            max_tokens = fitting
            prompt = await cut_front(row.input, max_model_len - max_tokens - reserve, counter)
            notes["prompts_cut"] += len(prompt) < len(row.input)
        at_s = (row.timestamp_us - rows[0].timestamp_us) / 1e6 / speed
        sessions.setdefault(row.session_id, []).append(Turn(prompt=prompt, max_tokens=max_tokens, at_s=at_s))
    return Workload(name="agent-sessions", sessions=list(sessions.values()), notes=notes)


async def cut_front(text: str, room: int, counter: Counter) -> str:
    """Returns the longest end of a text that fits and starts at a message; a part of the last message if need be.

    Args:
        text: Messages joined by blank lines.
        room: Most tokens, at least 1.
        counter: Counts tokens.
    """
    if len(text.encode()) < room or await counter.count(text) <= room:  # a token is at least a byte
        return text
    starts = [match.end() for match in BOUNDARY.finditer(text) if match.end() < len(text)]
    first = await _first_fitting(text, starts, room, counter)
    if first is None:
        last_message = range(starts[-1] if starts else 0, len(text))
        first = await _first_fitting(text, last_message, room, counter)
    return text[first if first is not None else len(text) - 1 :]


async def _first_fitting(text: str, starts: Sequence[int], room: int, counter: Counter) -> int | None:
    """Finds by bisection the first of the ascending starts from which the rest of the text fits."""
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        if await counter.count(text[starts[middle] :]) <= room:
            high = middle
        else:
            low = middle + 1
    return starts[low] if low < len(starts) else None
