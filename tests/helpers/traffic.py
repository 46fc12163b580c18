"""Chats that come back and agents that share a long prefix: what they send, and what they must be answered."""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hiserve import LLM, SamplingParams
from tests.helpers.small_model import small_model

NUM_CHATS, NUM_AGENTS, NUM_TURNS = 6, 4, 3
NUM_NEW = 8
TENANTS = ("", "red", "blue")
SETTINGS: dict[str, Any] = {
    "model": small_model(),
    "dtype": "float64",
    "page_size": 16,
    "max_model_len": 256,
    "max_running_requests": 4,
    "max_batched_tokens": 96,
    "cpu_threads": 1,
    "log_level": "warning",
}
# Under what one tenant's traffic takes, on the device and on both together, by far.
TINY: dict[str, Any] = {"kv_pages": 28, "host_cache_gib": 0.002, "kv_canary": True}
MIB = 2**20
SAMPLE_S = 0.25


@dataclass(frozen=True)
class Turn:
    """A prompt, and the tokens that answer it."""

    prompt: list[int]
    sampling: SamplingParams
    reply: list[int]


Script = list[Turn]


def make_scripts(seed: int) -> list[Script]:
    """Makes conversations whose next prompt holds the last reply, and asks an engine without cache for the replies."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    shared = rng.integers(7, 4096, 100).tolist()
    prompts = [rng.integers(7, 4096, rng.integers(8, 40)).tolist() for _ in range(NUM_CHATS)]
    prompts += [shared + rng.integers(7, 4096, rng.integers(4, 24)).tolist() for _ in range(NUM_AGENTS)]
    greedy = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_NEW, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, seed=7, max_tokens=NUM_NEW, ignore_eos=True)
    sampling = [greedy if index % 2 else drawn for index in range(len(prompts))]
    scripts: list[Script] = [[] for _ in prompts]
    with LLM(in_process=True, disable_prefix_cache=True, spec="off", host_cache_gib=0, **SETTINGS) as llm:
        for _ in range(NUM_TURNS):
            results = llm.generate(prompts, sampling)
            replies = [result.outputs[0].token_ids for result in results]
            for script, prompt, how, reply in zip(scripts, prompts, sampling, replies, strict=True):
                script.append(Turn(prompt, how, reply))
            prompts = [
                [*prompt, *reply, *rng.integers(7, 4096, rng.integers(3, 30)).tolist()]
                for prompt, reply in zip(prompts, replies, strict=True)
            ]
    assert len({token for script in scripts for turn in script for token in turn.reply}) >= 20
    return scripts


def rss_bytes(pid: int | str = "self") -> int:
    """Returns what a process has in memory of its own: without shared segments, which have their size anyway."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * 4096


@dataclass
class Memory:
    """Samples of a process's memory over time, taken as often as asked but for ``SAMPLE_S``.

    Attributes:
        pid: The process; this one, unless given.
        samples: (seconds, bytes).
    """

    pid: int | str = "self"
    samples: list[tuple[float, int]] = field(default_factory=list)

    def sample(self) -> None:
        now = time.monotonic()
        if not self.samples or now - self.samples[-1][0] >= SAMPLE_S:
            self.samples.append((now, rss_bytes(self.pid)))

    def median(self) -> float:
        """Returns the median of the samples, MiB: what a process takes for a moment does not move it."""
        return float(np.median([num_bytes for _, num_bytes in self.samples])) / MIB

    def slope(self) -> float:
        """Fits a line to the samples; returns MiB a minute."""
        seconds, num_bytes = np.array(self.samples, dtype=np.float64).T
        return float(np.polyfit(seconds - seconds[0], num_bytes, 1)[0]) / MIB * 60


def census() -> Counter[str]:
    """Counts the live objects of our classes, by name."""
    gc.collect()
    names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    return Counter(name for name in names if name.startswith("hiserve."))
