"""Conversations that a pool of pages cannot hold, visited in groups on an engine of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.drive import Drive
from hiserve.ipc.messages import GateCounts

Texts = tuple[list[np.ndarray], list[list[np.ndarray]]]


@dataclass(frozen=True)
class Conversations:
    """How many conversations there are, and how long; the first turn is not counted."""

    conversations: int
    group: int
    history: int  # tokens of a conversation's first turn
    turn_input: int  # new tokens of each later turn
    turn_output: int
    turns: int

    def texts(self, draw: Callable[[int], np.ndarray], count: int | None = None) -> Texts:
        """Draws the first prompts, int32, and what each later turn adds to each; ``count`` in place of all conversations."""
        first = [draw(self.history) for _ in range(count or self.conversations)]
        return first, [[draw(self.turn_input) for _ in first] for _ in range(self.turns - 1)]


def visit(drive: Drive, case: Conversations, texts: Texts) -> list[dict[str, Any]]:
    """Returns turn, seconds, input tokens and cached tokens of each group, in order."""
    first, later = texts
    histories, groups = list(first), []
    for turn in range(case.turns):
        for start in range(0, len(histories), case.group):
            members = range(start, min(start + case.group, len(histories)))
            begin = time.perf_counter()
            requests = [drive.add(histories[i], case.turn_output) for i in members]
            drive.finish(*requests)
            seconds = time.perf_counter() - begin
            groups.append(
                {
                    "turn": turn,
                    "seconds": seconds,
                    "input_tokens": sum(len(histories[i]) for i in members),
                    "device_tokens": sum(seen.cached.device for seen in requests if seen.cached),
                    "host_tokens": sum(seen.cached.host for seen in requests if seen.cached),
                }
            )
            if turn + 1 < case.turns:
                for i, seen in zip(members, requests, strict=True):
                    said = np.array(seen.tokens, dtype=np.int32)
                    histories[i] = np.concatenate((histories[i], said, later[turn][i]))
    return groups


def counted(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if group["turn"] > 0]


def input_rate(groups: Sequence[dict[str, Any]]) -> float:
    later = counted(groups)
    return float(sum(group["input_tokens"] for group in later) / sum(group["seconds"] for group in later))


def copied_pages(before: Any, after: Any) -> dict[str, int]:
    """Returns the pages that were loaded and stored between two ``stats().cache``."""
    return {
        "loaded_pages": after.loads.num_fulfilled - before.loads.num_fulfilled,
        "stored_pages": after.stores.num_fulfilled - before.stores.num_fulfilled,
    }


def gate_between(before: GateCounts, after: GateCounts) -> GateCounts:
    """Returns the gate's counts of the steps between two ``stats().graph_gate``."""
    return {
        action: {reason: count - before.get(action, {}).get(reason, 0) for reason, count in reasons.items()}
        for action, reasons in after.items()
    }
