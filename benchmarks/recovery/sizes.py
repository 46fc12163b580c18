"""What is served, under which load, and what it may take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

HIT_BAR = 0.9  # of the replayed tokens, those that the host tier has
SHARE_BAR = 0.01  # of the CPU time of all processes, what supervision and ledger take
WEIGHTS = "load weights"  # the phase that is not counted


@dataclass(frozen=True)
class Sizes:
    """A load and its engine; lengths in tokens.

    Attributes:
        before: Tokens that each stream has when the worker is killed.
        rounds: Servers that are started, and whose worker is killed.
        bar_s: Longest from the kill to the first new token, weights not counted.
        load_s: How long supervision and ledger are watched.
    """

    settings: dict[str, Any]
    vocab_size: int
    streams: int
    prompt: int
    output: int
    before: int
    rounds: int
    bar_s: float
    load_s: float


LARGE = Sizes(
    settings={
        "shape": "llama-8b",
        "load_format": "dummy",
        "device": "cuda",
        "max_model_len": 4096,
        "max_running_requests": 64,
        "host_cache_gib": 16,
        "spec": "off",
    },
    vocab_size=128256,
    streams=32,
    prompt=1024,
    output=1024,
    before=512,
    rounds=2,
    bar_s=20.0,
    load_s=10.0,
)
SMALL = Sizes(
    settings={
        "model": "hiserve-nano",
        "device": "cpu",
        "max_model_len": 2048,
        "max_running_requests": 8,
        "host_cache_gib": 0.3,
        "cpu_threads": 1,
    },
    vocab_size=4096,
    streams=8,
    prompt=512,
    output=400,
    before=64,
    rounds=3,
    bar_s=8.0,
    load_s=20.0,
)
TINY = replace(SMALL, streams=3, prompt=256, output=80, before=16, rounds=1, load_s=1.5)
