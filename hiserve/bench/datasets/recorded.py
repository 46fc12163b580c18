"""Recorded data sets, one JSON object a line, gzipped or not: dialogues, agent sessions, a trace in Mooncake's format."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from hiserve.bench.datasets.synthetic import draw_tokens
from hiserve.bench.target import Counter
from hiserve.bench.workload import Messages, Turn, Workload
from hiserve.core.plan import Int32Array
from hiserve.errors import ConfigError

_T = TypeVar("_T")
SAMPLED_DIALOGUES = 20
# The recordings join messages by blank lines and do not say which blank lines are inside of a message.
BOUNDARY = re.compile(r"\n\n+")
# Tokens per hash of the trace (Mooncake, FAST'25).
TRACE_BLOCK_TOKENS = 512


def read_lines(path: Path, row: type[_T], what: str) -> Iterator[_T]:
    """Yields the rows of a file. Raises ConfigError."""
    decoder = msgspec.json.Decoder(row)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _decode(decoder, line, f"--path {path}, line {number}: not a row of {what}")
    except (OSError, EOFError) as error:
        raise ConfigError(f"cannot read --path {path}: {error}.", param="path") from None


def required(path: Path | None, choice: str) -> Path:
    """Returns the file of a data set that needs one. Raises ConfigError."""
    if path is None:
        raise ConfigError(f"{choice} reads a file; give --path.", param="path")
    return path


def _decode(decoder: msgspec.json.Decoder[_T], line: bytes, complaint: str) -> _T:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{complaint}: {error}.", param="path") from None


class Message(msgspec.Struct):
    """One message of a dialogue."""

    role: str
    content: str


class Dialogue(msgspec.Struct):
    """One line of the file."""

    messages: list[Message]

    def as_sent(self) -> Messages:
        return [{"role": message.role, "content": message.content} for message in self.messages]


async def chats(path: Path, *, counter: Counter, num_prompts: int | None, output_length: int | None) -> Workload:
    """Returns one session for each dialogue, ``{"messages": [{"role", "content"}, ...]}`` a line; its history grows turn by turn.

    A reply may be ``output_length`` long, or as long as the recorded one. Raises ConfigError.
    """
    sessions: list[list[Turn]] = []
    room = num_prompts
    for dialogue in read_lines(path, Dialogue, "chats"):
        if room == 0:
            break
        session: list[Turn] = []
        messages = dialogue.as_sent()
        for index, message in enumerate(messages):
            if message["role"] != "user" or len(session) == room:
                continue
            reply = messages[index + 1]["content"] if index + 1 < len(messages) else ""
            max_tokens = output_length or max(1, await counter.count(reply))
            session.append(Turn(prompt=messages[: index + 1], max_tokens=max_tokens))
        if session:
            sessions.append(session)
            room = None if room is None else room - len(session)
    if not sessions:
        raise ConfigError(f"--path {path} has no message of a user.", param="path")
    return Workload(name="chats", sessions=sessions)


def text_like_it(path: Path) -> str:
    """Returns some of the file's text, for measuring how many tokens such text has."""
    dialogues = islice(read_lines(path, Dialogue, "chats"), SAMPLED_DIALOGUES)
    return "\n".join(message.content for dialogue in dialogues for message in dialogue.messages)


class AgentRecord(msgspec.Struct):
    """One line of the recording: a request's whole prompt, its recorded reply and its time in microseconds."""

    session_id: str
    timestamp_us: int
    input: str
    output: str


def read_rows(path: Path, num_prompts: int | None) -> tuple[list[AgentRecord], int]:
    """Returns the first prompts in the order of their times, and how many rows have none. Raises ConfigError."""
    rows = sorted(read_lines(path, AgentRecord, "agent-sessions"), key=lambda row: row.timestamp_us)
    found = [row for row in rows if row.input]
    if not found:
        raise ConfigError(f"--path {path} has no prompts.", param="path")
    return found[:num_prompts], len(rows) - len(found)


def shortened(text: str, scale: float) -> str:
    """Returns a text whose paragraphs keep a share of their characters, at least one each.

    Whole paragraphs that two texts begin with stay common to both.
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

    With an infinite ``speed`` each request follows the reply before it. Prompts lose messages from the front until they fit
    ``max_model_len`` less ``reserve`` (``prompts_cut``); replies get at most half of it (``replies_cut``).
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
    """Returns the longest end of a text that fits and starts at a message; a part of the last message if need be."""
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


class TraceRecord(msgspec.Struct):
    """One line of the trace."""

    timestamp: float  # milliseconds from the start
    input_length: int  # tokens of the prompt
    output_length: int  # tokens of the reply
    hash_ids: list[int]  # one for each block of the prompt; the same id is the same block after the same blocks


def conversation_trace(
    path: Path,
    *,
    speed: float,
    block_tokens: int,
    num_prompts: int | None,
    max_model_len: int | None,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Returns the requests of a trace at their recorded times; an infinite ``speed`` sends all at once. Raises ConfigError.

    ``block_tokens`` are made up for each hash; fewer than 512 shrink prompts and replies in proportion. What does not fit
    ``max_model_len`` loses its end, as what is shared is at the front (``prompts_cut``); replies get at most half of it (``replies_cut``).
    """
    blocks: dict[int, Int32Array] = {}
    scale = block_tokens / TRACE_BLOCK_TOKENS
    notes = {"prompts_cut": 0, "replies_cut": 0}
    sessions: list[list[Turn]] = []
    for row in read_lines(path, TraceRecord, "conversation-trace"):
        if len(sessions) == num_prompts:
            break
        for hash_id in row.hash_ids:
            if hash_id not in blocks:
                blocks[hash_id] = draw_tokens(np.random.default_rng((seed, hash_id)), block_tokens, vocab_size)
        prompt = np.concatenate([blocks[hash_id] for hash_id in row.hash_ids])
        prompt = prompt[: max(1, round(row.input_length * scale))]
        max_tokens = max(1, round(row.output_length * scale))
        if max_model_len is not None:
            fitting = min(max_tokens, max_model_len // 2)
            room = max_model_len - fitting
            notes["replies_cut"] += fitting < max_tokens
            notes["prompts_cut"] += room < prompt.size
            prompt, max_tokens = prompt[:room], fitting
        sessions.append([Turn(prompt=prompt, max_tokens=max_tokens, at_s=row.timestamp / 1000 / speed)])
    if not sessions:
        raise ConfigError(f"--path {path} is empty.", param="path")
    return Workload(name="conversation-trace", sessions=sessions, notes=notes)
