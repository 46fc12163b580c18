"""What the benchmark of the cache measures, and on which engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.conversations import Conversations
from benchmarks.drive import Drive, Seen
from hiserve.models.model_config import NANO

SEED = 20261121


@dataclass(frozen=True)
class Sizes:
    """What is measured; lengths in tokens."""

    settings: dict[str, Any]  # of both engines
    host_gib: float  # host tier of the engine that has one
    prefix: int  # on the host before each measured hit
    suffix: int  # new behind it
    repeats: int  # of each time to first token
    rows: int  # that decode while loads run, and with and without write-through
    row_prompt: int  # of each of them
    row_output: int  # of each of them, with and without write-through
    num_loads: int  # while others decode
    gap_steps: int  # steps between two of these, and a tenth of those before the first
    conversations: Conversations  # over both engines


FULL = Sizes(
    settings={
        "load_format": "dummy",
        "shape": "llama-8b",
        "device": "cuda",
        "dtype": "bfloat16",
        "kv_pages": 4096,
        "page_size": 16,
        "max_model_len": 17_408,
        "max_batched_tokens": 2048,
        "max_running_requests": 32,
    },
    host_gib=34.0,
    prefix=16_384,
    suffix=256,
    repeats=5,
    rows=8,
    row_prompt=512,
    row_output=96,
    num_loads=15,
    gap_steps=10,
    conversations=Conversations(32, 4, 6144, 256, 16, 2),
)
TINY = Sizes(
    settings={
        "model": NANO,
        "device": "cpu",
        "dtype": "float32",
        "kv_pages": 160,
        "page_size": 16,
        "max_model_len": 1400,
        "max_batched_tokens": 256,
        "max_running_requests": 8,
        "cpu_threads": 1,
        "spec": "off",  # as the large shape, which has no head: one token a step
    },
    host_gib=0.1,
    prefix=1024,
    suffix=32,
    repeats=2,
    rows=4,
    row_prompt=32,
    row_output=24,
    num_loads=3,
    gap_steps=4,
    conversations=Conversations(8, 2, 512, 32, 4, 2),
)


class Bench:
    """Two engines of one shape, with a host tier and without, and random prompts for both."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.host = Drive(host_cache_gib=sizes.host_gib, **sizes.settings)
        self.device = Drive(host_cache_gib=0, **sizes.settings)
        self._rng = np.random.default_rng(SEED)

    def prompt(self, length: int) -> np.ndarray:
        return self._rng.integers(7, self.host.vocab_size, length, dtype=np.int32)

    def first_token(self, drive: Drive, prompt: np.ndarray) -> Seen:
        """Runs a request of one token, and what it leaves to be copied."""
        seen = drive.add(prompt, 1)
        drive.finish(seen)
        drive.settle()
        return seen

    def close(self) -> None:
        self.host.close()
        self.device.close()
