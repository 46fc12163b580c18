"""Engines of the benchmark, one at a time, and how they are driven without adding to what they take."""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.drive import Drive
from benchmarks.gpu.figures import Figure, table
from benchmarks.gpu.sizes import SEED, Sizes


@dataclass
class Part:
    """The findings of one part of the benchmark."""

    figures: list[Figure] = field(default_factory=list)  # those with a name
    samples: dict[str, Any] = field(default_factory=dict)  # of the figures, and other findings
    notes: list[str] = field(default_factory=list)  # what was left out, and why


class Bench:
    """At most one engine, random prompts for it, and the ceilings of this run; ``overrides`` come before the sizes' settings.

    Attributes:
        built: Settings, seconds and resolved choices of every engine that was built.
    """

    def __init__(self, sizes: Sizes, ceilings: dict[str, float], overrides: dict[str, Any]) -> None:
        self.sizes = sizes
        self.ceilings = ceilings
        self.overrides = overrides
        self.built: list[dict[str, Any]] = []
        self._rng = np.random.default_rng(SEED)
        self._drive: Drive | None = None
        self._settings: dict[str, Any] = {}
        self._streams: dict[int, np.ndarray] = {}

    def settings(self, shape: str, **more: Any) -> dict[str, Any]:
        """Returns the settings of a shape's engine, which has no host tier unless that is given."""
        sizes = self.sizes
        return {"host_cache_gib": 0, **sizes.settings, **sizes.shapes[shape], **more, **self.overrides}

    def engine(self, shape: str, **more: Any) -> Drive:
        """Returns the engine of a shape: the one that is there, if it has these settings, or a new one in its place."""
        settings = self.settings(shape, **more)
        if self._drive is None or settings != self._settings:
            self.close()  # of callers none may keep the one before
            self._drive = Drive(**settings)
            self._settings = settings
            told = {"settings": settings, "build_s": self._drive.build_s, "memory_bytes": self._drive.memory}
            self.built.append(told | {"startup_s": self._drive.engine.facts.startup_s})
            self._streams = {}
        return self._drive

    def prompt(self, drive: Drive, length: int) -> np.ndarray:
        return self._rng.integers(7, drive.vocab_size, length, dtype=np.int32)

    def beginning(self, drive: Drive, row: int, length: int) -> np.ndarray:
        """Returns the first tokens of a row's text, int32 ``[length]``: shorter ones are prefixes of longer ones."""
        if row not in self._streams:
            self._streams[row] = self.prompt(drive, drive.max_len)
        return self._streams[row][:length]

    def close(self) -> None:
        if self._drive is not None:
            self._drive.close()
        self._drive = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Pace:
    """Steady steps of one batch."""

    rows: int
    mean_context: float  # tokens that a row attended over, in the middle of the steps
    step_s: list[float]
    own_share: float  # share of the time that went by between the engine's steps
    fill_s: float  # seconds until the last row had its first token

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.step_s)

    def told(self) -> dict[str, Any]:
        return asdict(self) | {"median_s": self.median_s, "mean_s": self.mean_s}


def decode(
    bench: Bench,
    drive: Drive,
    rows: int,
    context: int,
    *,
    during: Callable[[Callable[[], None]], None] | None = None,
) -> Pace:
    """Lets rows decode and times their steps, or hands the steady engine over.

    Rows differ in length by up to a page, so that their pages do not all fill in one step.
    """
    sizes = bench.sizes
    length = context - sizes.steps - sizes.warm_steps
    begin = time.perf_counter()
    lengths = [length - row % min(16, length - 1) for row in range(rows)]
    room = drive.max_len - length - 1
    live = [drive.add(bench.beginning(drive, row, each), room) for row, each in enumerate(lengths)]
    while not all(row.times for row in live):
        drive.step()
    fill_s = time.perf_counter() - begin
    for _ in range(sizes.warm_steps):
        drive.step()
    mean_context = statistics.fmean(n + len(row.tokens) for n, row in zip(lengths, live, strict=True)) + sizes.steps / 2
    ends, inside = [time.perf_counter()], 0.0

    def step() -> None:
        nonlocal inside
        before = time.perf_counter()
        updates = drive.engine.step()
        ends.append(time.perf_counter())
        inside += ends[-1] - before
        assert updates is not None and len(updates.uids) == rows, f"a step of {rows} rows brought {updates}"

    if during is not None:
        during(step)
    else:
        for _ in range(sizes.steps):
            step()
    seconds = np.diff(ends).tolist()
    drive.abort(*live)
    return Pace(rows, mean_context, seconds, 1 - inside / (ends[-1] - ends[0]), fill_s)


@dataclass(frozen=True)
class Batch:
    """Requests that were run to their ends."""

    seconds: float  # from the first request to the last token
    input_tokens: int
    output_tokens: int
    steps: int
    own_share: float  # share of the time that went by between the engine's steps
    replies: list[np.ndarray]  # tokens of each, in the order of the prompts; int32

    def told(self) -> dict[str, Any]:
        """Returns all but the replies, for the result file."""
        return {name: value for name, value in asdict(self).items() if name != "replies"}


def run(drive: Drive, prompts: Sequence[np.ndarray], num_new: int, streams: int | None = None) -> Batch:
    """Runs requests, at most ``streams`` of them at once, counting tokens a step and not one by one."""
    waiting, live, parts = deque(prompts), 0, []
    uids: list[int] = []
    begin, inside, steps, output = time.perf_counter(), 0.0, 0, 0
    while waiting or live:
        while waiting and (streams is None or live < streams):
            uids.append(drive.add(waiting.popleft(), num_new).uid)
            live += 1
        before = time.perf_counter()
        updates = drive.engine.step()
        inside += time.perf_counter() - before
        steps += 1
        if updates is not None:
            assert not updates.failed, updates.failed
            output += updates.tokens.size
            live -= sum(map(bool, updates.finishes))
            parts.append((updates.uids, updates.counts, updates.tokens))
    seconds = time.perf_counter() - begin
    owners = np.concatenate([np.repeat(np.array(whose), counts) for whose, counts, _ in parts])
    tokens = np.concatenate([each for _, _, each in parts])
    replies = [tokens[owners == uid] for uid in uids]
    assert output == num_new * len(prompts), f"{len(prompts)} requests of {num_new} tokens brought {output}"
    return Batch(seconds, sum(map(len, prompts)), output, steps, 1 - inside / seconds, replies)


def setting(text: str) -> tuple[str, Any]:
    """Reads ``name=value``; numbers and words as they look."""
    name, value = text.split("=", 1)
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def timed_part(bench: Bench, name: str, measure: Callable[[Bench], Part]) -> dict[str, Any]:
    """Runs a part and prints its figures; after one that fails the next one has a new engine."""
    begin, part, error = time.perf_counter(), Part(), ""
    try:
        part = measure(bench)
    except Exception:  # noqa: BLE001 - the other parts are worth having
        error = traceback.format_exc()
        print(f"{name} failed: {error[-900:]}", flush=True)
    if error:
        bench.close()
    wall_s = time.perf_counter() - begin
    print("\n".join([f"{name} took {wall_s:.1f} s", *part.notes, *_rows(part.figures)]), flush=True)
    figures = [asdict(figure) for figure in part.figures]
    return {"wall_s": wall_s, "error": error, "notes": part.notes, "figures": figures, "samples": part.samples}


def _rows(figures: list[Figure]) -> list[str]:
    return table(asdict(figure) for figure in figures).splitlines()[1:]
