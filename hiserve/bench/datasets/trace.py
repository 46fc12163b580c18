"""Recorded arrivals and lengths, in Mooncake's format; the prompts are made up, block by block."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from hiserve.bench.datasets.files import read_lines
from hiserve.bench.datasets.synthetic import draw_tokens
from hiserve.bench.workload import Turn, Workload
from hiserve.core.plan import Int32Array
from hiserve.errors import ConfigError

# Tokens per hash of the trace (Mooncake, FAST'25).
TRACE_BLOCK_TOKENS = 512


class TraceRecord(msgspec.Struct):
    """One line of the trace.

    Attributes:
        timestamp: Milliseconds from the start.
        input_length: Tokens of the prompt.
        output_length: Tokens of the reply.
        hash_ids: One for each block of the prompt; the same id is the same block after the same blocks.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


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
    """Returns the requests of a trace at their recorded times.

    Args:
        path: One row a line.
        speed: 2.0 replays twice as fast; infinity sends everything at once.
        block_tokens: Tokens made up for each hash. Fewer than 512 shrink prompts and replies in proportion.
        num_prompts: Take only the first so many, or None for all.
        max_model_len: Longer prompts lose their end (what is shared is at the front), counted as
            ``prompts_cut``; replies get at most half of it, counted as ``replies_cut``.
        vocab_size: Token ids are below it.
        seed: The same seed and hash give the same block.

    Raises:
        ConfigError: The file cannot be read or is empty.
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
