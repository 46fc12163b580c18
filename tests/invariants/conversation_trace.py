"""Requests of a real conversation trace, 32 times as short."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

TRACE = Path(__file__).parent.parent / "data" / "conversation_trace_500.jsonl.gz"
PAGE = 16  # one block of 512 tokens in the trace is one page here, the last, partial one too
MAX_LEN = 256 * PAGE


def requests() -> list[tuple[np.ndarray, int]]:
    """(prompt, tokens to generate) of each request: 16 made-up tokens per block, lengths divided by 32."""
    lines = [json.loads(line) for line in gzip.decompress(TRACE.read_bytes()).splitlines()]
    rng = np.random.default_rng(0)
    num_blocks = 1 + max(max(line["hash_ids"]) for line in lines)
    blocks = rng.integers(2, 128_000, (num_blocks, PAGE)).astype(np.int32)
    return [(blocks[line["hash_ids"]].reshape(-1), max(1, line["output_length"] // 32)) for line in lines]
